"""`cleave doctor`: what this host can do, what replaces missing features, and how many devices it emulates honestly.

Facts come from a few harmless commands; kernel features are tried in a network namespace that ends with the command.
Short trial steps in real time (`testbed.runs.trial_step`) find the largest honest number of devices: double or halve
the scenario's number until the answer changes, then bisect; a number counts as too many only if it fails twice.
Everything that touches the host is passed in.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from agent.protocol.units import format_size
from emulator.model.fidelity import STRETCH_ENOUGH, Fidelity
from emulator.model.scales import Trial, next_scale

COMMAND_LIMIT_S = 5.0
MOST_DEVICES = 65_536
CLOSE = 1.15  # bisect until the ends of the interval are this close

Try = Callable[[Sequence[str]], bool]
Measure = Callable[[int], Fidelity]


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str
    fine: bool = True
    instead: str = ""  # what replaces a missing feature, or what to do about it


@dataclass(slots=True)
class HonestFleet:
    """How many devices of a scenario this host emulates in real time."""

    devices: int  # largest number found honest; 0 if none
    too_many: int | None  # smallest number found too many; None if none
    asked: int  # by the scenario
    probes: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    scale: float = 1.0  # of the clock, for the scenario's own number
    causes: list[str] = field(default_factory=list)  # what limits the number of devices


# ---- facts


def try_command(command: Sequence[str]) -> bool:
    """Whether the command succeeds. Its output is discarded."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def facts(attempt: Try = try_command, has: Callable[[str], str | None] = shutil.which) -> list[Fact]:
    """What this host has. A feature whose program is not installed counts as missing; its fact says so."""
    memory = psutil.virtual_memory()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = math.inf if files[1] == resource.RLIM_INFINITY else files[1]
    found = [
        Fact("Python", platform.python_version()),
        Fact("cores", str(os.cpu_count() or 1)),
        Fact("memory", f"{format_size(memory.total)}, {format_size(memory.available)} free"),
        Fact(
            "open files",
            f"{files[0]}, at most {hard:g}",
            hard >= 4096,
            "" if hard >= 4096 else "agents with a connection each are limited by this; pods need one per process",
        ),
        _package("torch", "", "nothing runs without it: make setup"),
        _package("onnxruntime", "", "blocks are computed by NumPy"),
        _docker(attempt, has),
    ]
    inside = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    spaces = bool(has("unshare")) and attempt(["unshare", "--map-root-user", "true"])
    found.append(
        Fact("user namespaces", "yes" if spaces else "no", spaces, "" if spaces else "kernel-shaped links need root")
    )
    user_space = 'is held in user space: modelled links (links.kind = "model")'
    for name, program, command, instead in (
        ("netem", "tc", "tc qdisc add dev lo root netem delay 1ms", f"latency {user_space}"),
        ("htb", "tc", "tc qdisc add dev lo root htb", f"the rate of lines {user_space}"),
        ("ifb", "ip", "ip link add probe type ifb", "shaping downwards at the server's side of a veth pair"),
        ("veth", "ip", "ip link add probe0 type veth peer name probe1", f"every line {user_space}"),
    ):
        if not (has("unshare") and has(program)):
            found.append(Fact(name, f"unknown: {program} or unshare is not installed", False, instead))
            continue
        there = attempt([*inside, "sh", "-c", command])
        found.append(Fact(name, "yes" if there else "not in this kernel", there, "" if there else instead))
    return found


def _package(name: str, note: str, instead: str) -> Fact:
    try:
        return Fact(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Fact(name, "not installed", False, instead)


def _docker(attempt: Try, has: Callable[[str], str | None]) -> Fact:
    instead = "pods are processes of this machine"
    if not has("docker"):
        return Fact("Docker engine", "not installed", False, instead)
    running = attempt(["docker", "version", "--format", "{{.Server.Version}}"])
    return Fact("Docker engine", "running" if running else "not running", running, "" if running else instead)


# ---- the largest honest number of devices


def _worst(result: Fidelity) -> float:
    return max(result.stretch, result.step_stretch or 1.0)


def largest_honest(
    asked: int,
    measure: Measure,
    limit_s: float,
    tell: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> HonestFleet:
    """Double or halve from the scenario's number, then bisect, within about `limit_s` seconds."""
    found = HonestFleet(0, None, asked)
    begun, low, high = clock(), 0, math.inf

    def honest(devices: int) -> bool:
        result = measure(devices)
        if _worst(result) > STRETCH_ENOUGH:  # try again: brief load by other processes must not count
            result = min(result, measure(devices), key=_worst)
        worst = _worst(result)
        fine = worst <= STRETCH_ENOUGH
        used = clock() - begun
        probe = {"devices": devices, "honest": fine, "stretch": result.stretch, "step_stretch": result.step_stretch}
        found.probes.append(probe | {"blocks": result.blocks, "late_p99_s": result.late_p99_s})
        if devices == asked:
            found.scale = 1.0 if fine else next_scale([Trial(1.0, worst)], STRETCH_ENOUGH) or 1.0
        if not fine:
            found.causes = result.causes or found.causes
        tell(
            f"{devices:,} devices: {'honest' if fine else 'too many'}, times {100 * (worst - 1):.1f}% too long, "
            f"{result.blocks:,} blocks; at most {max(0.0, limit_s - used):.0f} s left"
        )
        return fine

    devices = asked
    while clock() - begun < limit_s or not found.probes:
        if honest(devices):
            low = max(low, devices)
        else:
            high = min(high, devices)
        if low >= MOST_DEVICES or high <= 1:
            break
        if high == math.inf:
            devices = min(2 * low, MOST_DEVICES)
        elif low == 0:
            devices = max(1, int(high) // 2)
        elif high <= CLOSE * low or high - low <= 1:
            break
        else:
            devices = round(math.sqrt(low * high))
    found.devices, found.too_many = low, None if high == math.inf else int(high)
    found.seconds = clock() - begun
    return found


# ---- output


def advice(found: HonestFleet) -> list[str]:
    """What to change if this host cannot emulate the scenario's devices in real time."""
    if found.devices >= found.asked:
        if found.too_many is None:
            return [f"no limit was found: up to {found.devices:,} devices the host keeps up"]
        return []
    return [
        f"the scenario's {found.asked:,} devices are too many for real time on this host"
        + (f": {'; '.join(found.causes)}" if found.causes else ""),
        f"slow the clock down to about {found.scale:g}x (now 1x): --set clock.kind=auto finds the least scale",
        "or do not wait at all: --set clock.kind=virtual (add --set clock.arithmetic=false for shapes only)",
        "or lend less of each line (fleet.line_share), which makes steps longer and gives the host more time",
        "or take a host with more cores: pods and server share them",
    ]


def as_json(found: Sequence[Fact], honest: HonestFleet | None, scenario: str | None) -> dict[str, Any]:
    told: dict[str, Any] = {"host": [asdict(fact) for fact in found]}
    if honest is not None:
        told["scenario"] = scenario
        told["honest"] = asdict(honest) | {"advice": advice(honest)}
    return told


def print_doctor(console: Console, found: Sequence[Fact], honest: HonestFleet | None, scenario: str | None) -> None:
    table = Table(title="this host", title_justify="left")
    for heading in ("what", "", "instead"):
        table.add_column(heading)
    for fact in found:
        colour = "green" if fact.fine else "yellow"
        table.add_row(fact.name, f"[{colour}]{fact.value}[/{colour}]", fact.instead)
    console.print(table)
    if honest is None:
        return
    probes = Table(title=f"{scenario}: one step in real time", title_justify="left")
    for heading in ("devices", "blocks", "blocks too long by", "steps too long by", "late, p99", ""):
        probes.add_column(heading, justify="right")
    for probe in sorted(honest.probes, key=lambda p: int(p["devices"])):
        probes.add_row(
            f"{probe['devices']:,}",
            f"{probe['blocks']:,}",
            f"{100 * (probe['stretch'] - 1):.1f}%",
            "" if probe["step_stretch"] is None else f"{100 * (probe['step_stretch'] - 1):.1f}%",
            f"{1e3 * probe['late_p99_s']:.1f} ms",
            "honest" if probe["honest"] else "too many",
        )
    console.print(probes)
    limit = "none was too many" if honest.too_many is None else f"{honest.too_many:,} are too many"
    console.print(
        f"largest honest number of devices: {honest.devices:,} ({limit}); {honest.seconds:.0f} s of trial steps"
    )
    for line in advice(honest):
        console.print(f"- {line}", soft_wrap=True)
