"""The results folder of a run: files that one line of pandas or duckdb reads, and a readable summary. No pickle."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent.protocol.clock import Clock, WallClock
from agent.protocol.errors import UserError
from agent.protocol.units import format_duration, format_size
from ps.transport.attendance import LEFT, LOST, SUSPENDED
from testbed.results.keeping import Keeping

RESULTS_VERSION = 1


@dataclass(slots=True)
class Summary:
    """summary.json. Times in seconds, sizes in bytes."""

    name: str
    model: str
    parameters: int
    seed: int
    clock: dict[str, Any]
    devices: int
    pods: int
    joined_s: float  # from the start of the first pod until all devices had joined
    steps: int
    losses: list[float]  # empty with shapes only
    reference_losses: list[float]
    loss_max_abs_diff: float | None  # None with shapes only
    weights_max_abs_diff: float | None
    step_s: dict[str, float]  # achieved
    predicted_step_s: float | None  # by the model, before the run; None if there is none
    first_step_s: float
    products_per_step: int
    flops_done: int  # by devices
    flops_reference: int  # counted in the plain PyTorch run; with shapes only, in the captured graph
    blocks: int
    devices_used: int
    bytes_down: int  # to devices, each slab charged to every device that needs it
    bytes_up: int
    socket_bytes_down: int  # bytes through this host's sockets: a slab once per connection
    lost_devices: int
    real_devices: dict[str, int]  # every real device that joined: name -> blocks returned; see ps/transport/roster.py
    basis: dict[str, int]  # provenance of the emulated devices' figures
    links: str  # modelled or shaped by the kernel, and which effects user space provides instead
    training_host_s: float  # real seconds of all steps; the steps' own seconds are device time
    fidelity: dict[str, Any]
    verdict: str
    memory_bytes: int = 0
    total_s: float = 0.0  # real seconds of the whole run
    reasons: list[str] = field(default_factory=list)
    recovery: dict[str, float] = field(default_factory=dict)  # all departures, and recovery times of devices with work
    verification: dict[str, float] = field(default_factory=dict)
    late_blocks_helped: int = 0  # overdue blocks that got a speculative copy
    suspended: dict[str, str] = field(default_factory=dict)  # device -> why
    real_devices_forgotten: int = 0  # further real devices, which left without returning a block
    departures: list[dict[str, Any]] = field(default_factory=list)  # real devices that left, why, and for how long
    device_files: list[str] = field(default_factory=list)  # kinds for other scenarios, made from real devices
    audit: dict[str, Any] = field(default_factory=dict)  # faults and churn: injected against requested
    audit_line: str = ""  # the same in one line
    fleet: dict[str, Any] = field(default_factory=dict)  # devices present at the start, at the end, at the minimum
    incomplete: list[str] = field(default_factory=list)  # why there is less than requested: steps, files
    comparison: dict[str, Any] = field(default_factory=dict)  # steps that plain PyTorch took from the same weights
    version: int = RESULTS_VERSION


def new_folder(parent: Path, name: str) -> Path:
    """runs/<time>-<name>, never an existing one."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = parent / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"cannot make the results folder {folder}: {error.strerror}; choose another place with --results"
            ) from None
    raise UserError(f"cannot make a folder for the results in {parent}: all names are taken")


def environment() -> dict[str, Any]:
    packages = ("cleave-testbed", "torch", "transformers", "numpy", "pyzmq", "pyarrow", "onnxruntime")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": versions,
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class EventLog:
    """events.jsonl: one line per event, written at once, stamped in device time. A line that cannot be written is lost
    and noted in `keeping`; once there is space again, later events are written."""

    def __init__(self, path: Path, clock: Clock | None = None, keeping: Keeping | None = None) -> None:
        self._file = path.open("wb", buffering=0)
        self._name, self._keeping = path.name, keeping
        self._lock = threading.Lock()  # server, injector and watchdog write from their own threads
        self._torn = False  # the last line is incomplete
        self._clock = clock or WallClock()
        self._begun_ns = self._clock.now_ns()

    def write(self, event: str, **fields: Any) -> None:
        record = {"at_s": round((self._clock.now_ns() - self._begun_ns) / 1e9, 6), "event": event, **fields}
        with self._lock:
            line = memoryview(b"\n" * self._torn + json.dumps(record).encode() + b"\n")
            try:
                while line:
                    line = line[self._file.write(line) or 0 :]
                self._torn = False
            except OSError as error:
                self._torn = True
                if self._keeping is None:
                    raise
                self._keeping.lost(self._name, error)

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(_plain(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def write_blocks(
    path: Path, columns: Mapping[str, NDArray[Any]], labels: list[str], real: Collection[int] = ()
) -> None:
    """`real`: devices that are not emulated."""
    table = {name: pyarrow.array(values) for name, values in columns.items()}
    if table:
        table["device_name"] = pyarrow.DictionaryArray.from_arrays(
            columns["device"], pyarrow.array(labels, pyarrow.string())
        )
        table["real"] = pyarrow.array(np.isin(columns["device"], list(real)))
        product = table["product"]
        table["product"] = product.dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def write_ledger(path: Path, columns: Mapping[str, NDArray[Any]], labels: list[str], links: str) -> None:
    """One row per device: requested against achieved, and the kind of links."""
    table = {name: pyarrow.array(values) for name, values in columns.items()}
    table["links"] = pyarrow.array([links] * len(columns["device"]), pyarrow.string())
    table["device_name"] = pyarrow.array([labels[device] for device in columns["device"].tolist()], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def write_steps(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["step"])
        writer.writeheader()
        writer.writerows(rows)


def write_summary_text(path: Path, summary: Summary) -> None:
    with path.open("w", encoding="utf-8") as file:
        print_summary(Console(file=file, width=110, highlight=False), summary)


def _compared(told: dict[str, Any]) -> str:
    """One line on the steps that plain PyTorch took from the fleet's own weights."""
    how = "all" if told["every"] == 1 else f"one in {told['every']}"
    return (
        f"{told['steps'] - told['wrong']} of {told['steps']} compared are those of plain PyTorch ({how}): "
        f"loss within {told['loss']:.1e}, gradients within {told['gradient']:.1e}"
    )


class Printer(Protocol):
    """A Rich console, or anything that prints like one."""

    def print(self, what: object, /) -> None: ...


def print_summary(console: Printer, s: Summary) -> None:
    colour = {"VALID": "green", "DEGRADED": "yellow"}.get(s.verdict, "red")
    table = Table(title=f"{s.name}: {s.model} on {s.devices:,} devices", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    same = s.flops_done == s.flops_reference
    rows = [
        ("verdict", f"[{colour}]{s.verdict}[/{colour}]"),
        *(("", reason) for reason in s.reasons),
        ("clock", _clock(s)),
        *([("steps from the same weights", _compared(s.comparison))] if s.comparison else []),
        ("loss against plain PyTorch", _difference(s, s.loss_max_abs_diff) + f" over {s.steps} steps"),
        ("weights after the last step", _difference(s, s.weights_max_abs_diff)),
        ("FLOPs done by devices", f"{s.flops_done:,}, {'all' if same else 'NOT all'} of the step's products"),
        ("seconds per step", _seconds(s)),
        ("blocks", f"{s.blocks:,} on {s.devices_used:,} devices, {s.products_per_step} products per step"),
        ("bytes down / up", f"{format_size(s.bytes_down)} / {format_size(s.bytes_up)}"),
        (
            "blocks late",
            f"p50 {1e3 * s.fidelity['late_p50_s']:.1f} ms, p99 {1e3 * s.fidelity['late_p99_s']:.1f} ms; "
            f"{s.fidelity['stretch']:.3f}x the modelled time",
        ),
        *([("fleet", s.fleet["told"])] if s.fleet else []),
        *([] if s.clock["kind"] == "virtual" else [("host", _host(s.fidelity))]),
        ("device figures", ", ".join(f"{count:,} {basis}" for basis, count in s.basis.items()) + f"; links {s.links}"),
    ]
    if s.clock["kind"] != "virtual":
        rows.append(("joined", f"all in {format_duration(s.joined_s)}"))
        rows.append(("memory", f"{format_size(s.memory_bytes)}, server and {s.pods} pods"))
    real = [f"{name} ({n} blocks)" for name, n in s.real_devices.items()]
    if s.real_devices_forgotten:
        real.append(f"{s.real_devices_forgotten:,} more that left without having returned a block")
    if real:
        rows.append(("real devices", ", ".join(real)))
    if s.device_files:
        rows.append(("", f"measured, to be emulated: devices/{', '.join(s.device_files)}"))
    if s.departures:
        rows.append(("left by their owners' rules", _departures(s.departures)))
    if s.lost_devices:
        rows.append(("devices lost", str(s.lost_devices)))
    if s.recovery:
        rows.append(("recovery", _recovery(s.recovery)))
    if s.late_blocks_helped:
        rows.append(("stragglers", f"{s.late_blocks_helped:,} overdue blocks were also cut over others"))
    if s.verification:
        rows.append(("verification", _verification(s)))
    if s.audit_line:
        rows.append(("faults and churn", s.audit_line))
    for label, text in rows:
        table.add_row(label, text if label == "verdict" else escape(text))  # a device's name is untrusted text
    console.print(table)
    if not s.losses:
        return
    curves = Table(title="loss", title_justify="left")
    for heading in ("step", "devices", "plain PyTorch", "difference"):
        curves.add_column(heading, justify="right")
    shown = _some(len(s.losses), 12)
    for i in shown:
        one, two = s.losses[i], s.reference_losses[i]
        curves.add_row(str(i + 1), f"{one:.6f}", f"{two:.6f}", f"{abs(one - two):.1e}")
    console.print(curves)


def _clock(s: Summary) -> str:
    took = f"{format_duration(s.training_host_s)} of this host for {s.steps} steps"
    match s.clock["kind"]:
        case "virtual":
            what = "values computed" if s.clock["arithmetic"] else "shapes only"
            return f"virtual: the server's own work takes no time; {what}; {took}"
        case "scaled":
            slower = f"scaled: all modelled time {s.clock['scale']:g} times slower, told in device time"
            return f"{slower}; {took}{_why(s)}"
    return f"wall: modelled time is real time; {took}{_why(s)}"


def _why(s: Summary) -> str:
    return "" if s.clock.get("why", "as asked") == "as asked" else f"; chosen because {s.clock['why']}"


def _host(f: dict[str, Any]) -> str:
    host = f["host"]
    text = f"CPU {100 * host['busy']:.0f}% busy ({100 * host['own']:.0f}% this run), {100 * host['stolen']:.0f}% stolen"
    if f["pod_late_p99_s"] is not None:
        late = f"p99 {1e3 * f['pod_late_p99_s']:.1f} ms in pods, {1e3 * f['server_late_p99_s']:.1f} ms to the server"
        text += f"; {late}"
    return f"{text}; server at work {100 * host['server_busy']:.0f}%, at most {1e3 * host['server_turn_s']:.0f} ms"


def _difference(s: Summary, difference: float | None) -> str:
    if difference is None:
        return "not compared: the run stopped before" if s.reference_losses else "none computed: shapes only"
    return f"largest difference {difference:.1e}"


def _departures(departures: list[dict[str, Any]]) -> str:
    said = []
    for left in departures[:5]:
        away = "not back" if left["away_s"] is None else f"back after {format_duration(left['away_s'])}"
        handed = f", {left['blocks']} blocks handed back" if left["blocks"] else ""
        said.append(f"{left['name']}: {left['reason']}{handed}, {away}")
    more = f"; and {len(departures) - 5} times more" if len(departures) > 5 else ""
    return "; ".join(said) + more


def _recovery(r: dict[str, float]) -> str:
    told = ""
    if "departures" in r:
        kinds = ", ".join(f"{r[how]:.0f} {how}" for how in (LOST, LEFT, SUSPENDED) if how in r)
        told = f"{r['departures']:.0f} departures ({kinds})"
    if "losses" not in r:
        return f"{told}, none with work in its hands"
    return (told and f"{told}; ") + (
        f"{r['losses']:.0f} losses of devices with {r['blocks']:.0f} blocks; from detection to all done again "
        f"p50 {format_duration(r['p50_s'])}, p99 {format_duration(r['p99_s'])}, "
        f"of which to cut them again {format_duration(r['planned_p50_s'])}"
    )


def _verification(s: Summary) -> str:
    v = s.verification
    text = f"{v['checked']:,.0f} blocks checked, {v['wrong']:.0f} wrong; {100 * v['share']:.1f}% of the server's time"
    text += f", and {v['background_seconds']:.1f} s beside it"
    if s.suspended:
        some = ", ".join(f"{name}: {why}" for name, why in list(s.suspended.items())[:3])
        text += f"; {len(s.suspended)} devices suspended ({some}{', ...' if len(s.suspended) > 3 else ''})"
    return text


def _seconds(s: Summary) -> str:
    return f"p50 {s.step_s['p50']:.2f}, p95 {s.step_s['p95']:.2f}{_against(s)}" if s.steps else "no step was completed"


def _against(s: Summary) -> str:
    if not s.predicted_step_s:
        return ""
    over = s.step_s["p50"] / s.predicted_step_s - 1
    return f"; predicted {s.predicted_step_s:.2f} (achieved {100 * over:+.0f}%)"


def _some(count: int, most: int) -> list[int]:
    """All of 0..count-1, or a choice that includes the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})
