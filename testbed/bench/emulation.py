"""Accuracy of the emulation: this machine at three CPU quotas as three devices, measured, fitted and compared with
their twins.

`python -m testbed.bench.emulation FOLDER`: profiles and figures go to the folder; existing profiles are not measured
again. About eight minutes on an idle machine, root (control groups), 2 cores. Not part of `make bench`. Progress goes
to standard error; the table at the end has the goal next to each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.protocol.errors import Failure

if TYPE_CHECKING:
    from testbed.twins.twin import Comparison

PERIOD_US = 10_000
QUOTAS_US = (2500, 4000, 6000)
TOGETHER = {"two": (0, 1), "mix": (0, 0, 1), "alone": (1,)}  # which devices run at once
STEP_S = 0.4
MEDIAN_GOAL, P95_GOAL, STEP_GOAL, BLOCK_GOAL = 0.05, 0.15, 0.05, 0.10


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    value: float
    goal: float | None  # largest distance from zero; None: for comparison only
    note: str = ""

    def __str__(self) -> str:
        beside = "" if self.goal is None else f"{self.goal:.0%}".rjust(5) + ("  holds" if self.holds else "  MISSED")
        return f"{self.what:<46}{self.value:+8.1%}  {beside:<14}{self.note}".rstrip()

    @property
    def holds(self) -> bool:
        return self.goal is None or abs(self.value) <= self.goal


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench.emulation", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twins", nargs="*", choices=TOGETHER, default=list(TOGETHER))
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for small matrices; read when NumPy and SciPy are imported
    from testbed.twins.quota import served_first

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # agents and control groups are removed in any case
    options.folder.mkdir(parents=True, exist_ok=True)
    with served_first():
        return compare(options)


def compare(options: argparse.Namespace) -> int:
    from emulator.model.calibration import calibrate
    from emulator.model.samples import read_samples
    from testbed.twins import twin
    from testbed.twins.twin_blocks import TwinDevice

    devices, figures, compared = [], [], {}
    for quota_us in QUOTAS_US:
        path = options.folder / f"quota-{100 * quota_us // PERIOD_US}.json"
        if not path.exists():
            say(f"measuring {path.stem}")
            measure(path, quota_us, options.shapes, options.rounds)
        samples = read_samples(path)
        fitted = calibrate(samples)
        devices.append(TwinDevice(samples, fitted))
        low, high = fitted.drift
        seen = f"{len(fitted.shapes)} shapes; drift while measuring p5 {low:+.0%}, p95 {high:+.0%}"
        figures.append(Figure(f"{path.stem}: held out, median", fitted.median_error, MEDIAN_GOAL, seen))
        figures.append(Figure(f"{path.stem}: held out, p95", fitted.p95_error, P95_GOAL))
    for name in options.twins:
        together = [devices[number] for number in TOGETHER[name]]
        say(f"twin, {name}")
        found = twin.compare(together, options.steps, STEP_S, options.seed, say)
        compared[name] = twin.as_json(found)
        figures += of_twins(name, found)
    for figure in figures:
        print(figure)
    result = {"figures": [asdict(figure) for figure in figures], "twins": compared}
    (options.folder / f"result-{options.seed}.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def of_twins(name: str, found: Comparison) -> Sequence[Figure]:
    from testbed.twins import twin

    rows = zip(twin.rows(found.real, found.twin), twin.rows(found.real, found.undrifted), strict=True)
    asked = name != "alone"
    return [
        Figure(
            f"twin, {name}: {row.what}",
            row.error,
            None if not asked or "computing" in row.what else STEP_GOAL if "step" in row.what else BLOCK_GOAL,
            f"real {1000 * row.real_s:.0f} ms, twin {1000 * row.twin_s:.0f}; without drift {without.error:+.1%}",
        )
        for row, without in rows
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(path: Path, quota_us: int, shapes: int, rounds: int) -> None:
    from testbed.twins import twin
    from testbed.twins.quota import cpu_quota, enter

    command = [sys.executable, "-m", "agent", "measure", "--out", str(path), "--name", path.stem, "--sustained", "3"]
    command += ["--kernel", "onnxruntime", "--shapes", str(shapes), "--rounds", str(rounds)]
    with twin.serving() as server, cpu_quota(quota_us, PERIOD_US) as group:
        process = subprocess.Popen([*command, "--ps", server.address])
        enter(group, process.pid)
        if process.wait() != 0:
            raise Failure(f"measuring at {quota_us} us failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
