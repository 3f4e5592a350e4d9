"""`cleave twin`: the same stream of blocks on real agents and on their emulated twins, side by side.

A real server drives both sides with the same products and firm plans: every device gets the same blocks in the same
order, all at once, and no device takes over another's work. The real side is agent processes of this machine with the
threads and the CPU quota of their profile; the other side is pods with the fitted models.

The host's speed may have changed since the profile was made. It is probed before every step of the real side (see
`testbed.twins.anchor`), and the twins' models are scaled accordingly. The twins run both with and without this
correction, and both results are reported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agent.measure.link import measure_link
from agent.protocol.errors import Failure, UserError
from agent.protocol.profile import MAX_RATE, Profile, pack_profiles
from agent.protocol.units import format_duration
from emulator.model.calibration import stretched
from emulator.model.fleet import Fleet
from emulator.model.performance import Models, Performance
from emulator.model.samples import Samples
from ps.transport.server import Server
from testbed.launch.processes import Pods
from testbed.twins.anchor import Now, anchors, probe
from testbed.twins.calibrate import link_figures
from testbed.twins.message_cost import message_costs
from testbed.twins.quota import running
from testbed.twins.twin_blocks import Part, TwinDevice, run_step, stream

Integers = NDArray[np.int64]
CREDIT = 64  # blocks; more than a device gets of one product
MEMORY_BYTES = 1 << 30
JOIN_S = 60.0
# `python -m agent`, which ends with this process even if this process is killed
AGENT = """import runpy
from emulator.pods.pod import die_with_parent
die_with_parent()
runpy.run_module("agent", run_name="__main__")"""
TRIES = 3  # warm-up products that do not count


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Results of one side: per block, in order of device and block; and per step."""

    device: Integers
    block_s: NDArray[np.float64]  # from sending to the answer, as seen by the server
    compute_s: NDArray[np.float64]  # as reported by the device
    step_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    names: tuple[str, ...]  # of the devices
    real: Side
    twin: Side  # at the host's speed measured during the real side
    undrifted: Side  # at the host's speed when the profiles were made
    now: tuple[Now, ...]  # per device: the correction applied to `twin`


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    real_s: float
    twin_s: float

    @property
    def error(self) -> float:
        return self.twin_s / self.real_s - 1


def compare(
    devices: Sequence[TwinDevice], steps: int, step_s: float, seed: int, say: Callable[[str], None]
) -> Comparison:
    """The real side; the twins at the host's current speed; and the twins at its speed when the profiles were made."""
    parts = stream(devices, steps + TRIES, step_s, seed)
    say(f"real: {len(devices)} agent(s), {steps} steps of about {step_s:g} s")
    with serving() as server, ExitStack() as stack:
        links = [_link(device, server.address) for device in devices]
        agents = []
        for number, device in enumerate(devices):
            agents.append(stack.enter_context(real_agent(device, server.address, number)))
            _wait(server, number + 1)
        message_s = message_costs(server, devices, [agent.pid for agent in agents], seed)
        found = stack.enter_context(anchors([(device.samples, device.calibration) for device in devices]))
        real = drive(server, parts, seed, before_step=lambda: probe(found))
        now = tuple(Now(anchor.drift, cost) for anchor, cost in zip(found, message_s, strict=True))
    for device, found_now in zip(devices, now, strict=True):
        say(f"host drift since the profile, {device.samples.name}: {found_now}")
    say("twin: the same blocks on emulated devices, as fast as the host is now")
    twin = _emulated(devices, now, links, parts, seed)
    say("twin: the same, as fast as the host was when the profile was made")
    undrifted = _emulated(devices, (Now(),) * len(devices), links, parts, seed)
    return Comparison(tuple(device.samples.name for device in devices), real, twin, undrifted, now)


def _emulated(
    devices: Sequence[TwinDevice],
    now: Sequence[Now],
    links: Sequence[dict[str, float]],
    parts: Sequence[Sequence[Part]],
    seed: int,
) -> Side:
    models = [
        of_now.applied(device.calibration.model, stretched(device.samples))
        for device, of_now in zip(devices, now, strict=True)
    ]
    fleet = twin_fleet(devices, models, links, seed)
    with serving() as server, Pods(fleet, _pods(devices), server.address, "model", pod_pass=server.pod_pass) as pods:
        _wait(server, len(devices), pods)
        # devices join in any order; the plan names them by their number in the stream
        order = [int(label.rsplit("/", 1)[1]) for label in server.labels]
        try:
            return drive(server, parts, seed, order)
        finally:
            server.stop()


def _pods(devices: Sequence[TwinDevice]) -> int:
    return min(len(devices), os.cpu_count() or 1)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server().start()
    try:
        yield server
    finally:
        server.stop()
        if server.error is not None:
            raise Failure(f"the server failed: {server.error!r}")


@contextmanager
def real_agent(device: TwinDevice, address: str, number: int) -> Iterator[subprocess.Popen[bytes]]:
    samples = device.samples
    command = [sys.executable, "-c", AGENT, "--ps", address, "--once", "--name", f"real-{number}"]
    command += ["--threads", str(samples.threads), "--kernel", device.calibration.kernel]
    command += ["--credit", str(CREDIT), "--memory", f"{MEMORY_BYTES} B", "--unmeasured"]
    with running(command, samples.quota, samples.threads) as agent:
        yield agent


def twin_fleet(
    devices: Sequence[TwinDevice], models: Sequence[Performance], links: Sequence[dict[str, float]], seed: int
) -> Fleet:
    profiles = [
        Profile(
            flops=device.calibration.large_flops,
            overhead_s=device.calibration.model.overhead_s,
            down_bps=min(link["down_bps"], MAX_RATE),
            up_bps=min(link["up_bps"], MAX_RATE),
            latency_s=link["latency_s"],
            memory_bytes=MEMORY_BYTES,
            credit_blocks=CREDIT,
        )
        for device, link in zip(devices, links, strict=True)
    ]
    count = len(devices)
    kinds = Models(tuple(models), np.arange(count), tuple((seed, i) for i in range(count)))
    names = [device.samples.name for device in devices]
    return Fleet(pack_profiles(profiles), names, ["as-measured"] * count, {"measured": count}, models=kinds)


def drive(
    server: Server,
    steps: Sequence[Sequence[Part]],
    seed: int,
    order: Sequence[int] | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> Side:
    """Run every step's products, one step after the other; the first steps do not count. `order`: for each joined
    device, in order of joining, its number in the stream. `before_step`: called before each step that counts, while all
    devices are idle."""
    rng = np.random.default_rng(seed)
    ids = np.arange(server.devices) if order is None else np.argsort(np.array(order))
    step_s = []
    for number, parts in enumerate(steps):
        if number >= TRIES:
            before_step()
        step_s.append(run_step(server, parts, ids, rng, number))
    columns = server.records.columns()
    counts = columns["step"] >= TRIES
    columns = {name: values[counts] for name, values in columns.items()}
    sort = np.lexsort((columns["block"], columns["job"]))
    return Side(
        device=np.argsort(ids)[columns["device"][sort]],
        block_s=(columns["received_s"] - columns["sent_s"])[sort],
        compute_s=columns["compute_s"][sort],
        step_s=np.array(step_s[TRIES:]),
    )


def rows(real: Side, twin: Side) -> list[Row]:
    found = [Row("mean step", float(real.step_s.mean()), float(twin.step_s.mean()))]
    for what, one, two in (
        ("block, sent to answered", real.block_s, twin.block_s),
        ("block, computing", real.compute_s, twin.compute_s),
    ):
        for quantile in (50, 90):
            values = (float(np.percentile(x, quantile)) for x in (one, two))
            found.append(Row(f"{what}, p{quantile}", *values))
    return found


def print_rows(console: Console, found: Comparison) -> None:
    names, sides = found.names, (found.real, found.twin, found.undrifted)
    tables = [("all devices", sides)]
    if len(names) > 1:
        for number, name in enumerate(names):
            one, two, three = (
                Side(s.device, s.block_s[s.device == number], s.compute_s[s.device == number], s.step_s) for s in sides
            )
            tables.append((f"device {number}, {name}", (one, two, three)))
    table = Table(box=None)
    for column in ("", "real", "twin", "error", "error without drift"):
        table.add_column(column, justify="left" if not column else "right")
    for title, (real, twin, undrifted) in tables:
        table.add_row(f"[bold]{title}[/bold]")
        for row, without in list(zip(rows(real, twin), rows(real, undrifted), strict=True))[tables[0][0] != title :]:
            times = format_duration(row.real_s), format_duration(row.twin_s)
            table.add_row(f"  {row.what}", *times, f"{row.error:+.1%}", f"{without.error:+.1%}")
    console.print(table)
    for number, (name, now) in enumerate(zip(names, found.now, strict=True)):
        console.print(
            f"host drift since the profile, given to the twin: device {number}, {name}: {now}", soft_wrap=True
        )


def as_json(found: Comparison) -> dict[str, Any]:
    def side(values: Side) -> dict[str, Any]:
        return {
            "device": values.device.tolist(),
            "block_s": values.block_s.tolist(),
            "compute_s": values.compute_s.tolist(),
            "step_s": values.step_s.tolist(),
        }

    def compared(twin: Side) -> list[dict[str, Any]]:
        return [
            {"what": row.what, "real_s": row.real_s, "twin_s": row.twin_s, "error": row.error}
            for row in rows(found.real, twin)
        ]

    return {
        "devices": list(found.names),
        "now": [asdict(now) for now in found.now],
        "compared": compared(found.twin),
        "compared_without_drift": compared(found.undrifted),
        "real": side(found.real),
        "twin": side(found.twin),
    }


def _link(device: TwinDevice, address: str) -> dict[str, float]:
    """The device's link from its profile, or else the loopback link, which the real agent uses."""
    if found := link_figures(device.samples, wire_only=True):
        return found
    here = link_figures(replace(device.samples, link=measure_link(address)), wire_only=True)
    assert here is not None
    return here


def _wait(server: Server, count: int, pods: Pods | None = None) -> None:
    until = time.monotonic() + JOIN_S
    while not server.wait_for_devices(count, 0.5):
        if pods is not None:
            pods.check()
        if time.monotonic() > until:
            raise Failure(f"{server.devices} of {count} devices joined within {JOIN_S:.0f} s; is this host overloaded?")


def check(devices: Sequence[Samples]) -> None:
    for samples in devices:
        cores = os.cpu_count() or 1
        if samples.threads > cores:
            raise UserError(f"{samples.path} was measured with {samples.threads} threads, this machine has {cores}")
