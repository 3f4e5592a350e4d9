"""Pauses must not kill a run: real runs whose server or pods are stopped (SIGSTOP) at random times, and go on.

    python -m testbed.faults.pauses --seconds 1 5 20 60 --who server pods --seed 0

Each case is a small `cleave run`; a process is stopped once the run has taken some steps. A run must end with the loss
of plain PyTorch, and its pods must survive. Prints one line per run, with the median step time before and after the
pause, and exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agent.protocol.errors import Failure

CLEAVE = "import sys; from testbed.commands.cli import main; sys.exit(main())"
SMALL = ("--devices", "40", "--set", "data.batch=2", "--set", "data.sequence=16", "--set", "fleet.line_share=0.05")
WHO = ("server", "pods", "one pod")
LIMIT_S = 300.0  # per run, without its pause
STEPS, BEFORE = 24, 8  # steps per run, and steps taken before the pause
WITHIN_S = 3.0  # latest start of the pause after those steps


@dataclass(frozen=True, slots=True)
class Outcome:
    who: str
    seconds: float
    after_s: float  # from the end of the first steps to the start of the pause
    code: int
    difference: float | None
    lost: int  # devices, temporarily
    step_before_s: float  # median of the steps before the pause, without the first
    step_since_s: float  # median over the last third of the run
    verdict: str
    reason: str

    @property
    def exact(self) -> bool:
        return self.code == 0 and self.difference is not None and self.difference <= 1e-4

    def told(self) -> str:
        return (
            f"{self.who} stopped for {self.seconds:g} s, {self.after_s:.2f} s after step {BEFORE}: "
            f"{'exact' if self.exact else f'NOT EXACT (exit code {self.code})'}, loss differs by {self.difference}, "
            f"{self.lost} devices lost meanwhile, steps of {self.step_before_s:.3f} s before and "
            f"{self.step_since_s:.3f} s since, {self.verdict} {self.reason}"
        )


def pause(who: str, seconds: float, rng: random.Random, results: Path, steps: int = STEPS) -> Outcome:
    """One run with one pause."""
    after_s = rng.uniform(0, WITHIN_S)
    command = [sys.executable, "-c", CLEAVE, "run", "quickstart", *SMALL, "--steps", str(steps)]
    with subprocess.Popen(
        [*command, "--results", str(results)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            said = _until_steps_were_taken(run)
            time.sleep(after_s)
            _stop(run.pid, who, seconds, rng)
            said += run.communicate(timeout=LIMIT_S)[0]
        finally:
            if run.poll() is None:
                run.kill()  # also ends a stopped process; pods end with it
    found = sorted(results.glob("*/summary.json"))
    summary: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8")) if found else {}
    reasons = " ".join(summary.get("reasons", [said[-2000:]]))
    difference = summary.get("loss_max_abs_diff")
    lost, verdict = summary.get("lost_devices", 0), summary.get("verdict", "")
    before_s, since_s = _steps(found[-1].with_name("steps.csv")) if found else (0.0, 0.0)
    return Outcome(who, seconds, after_s, run.returncode, difference, lost, before_s, since_s, verdict, reasons)


def _steps(path: Path) -> tuple[float, float]:
    with path.open(newline="", encoding="utf-8") as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
    return statistics.median(seconds[1:BEFORE]), statistics.median(seconds[-(len(seconds) // 3) :])


def _until_steps_were_taken(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    said = ""
    for line in run.stdout:  # the run's own limits end it, if nothing else does
        said += line
        if f"step {BEFORE} of" in line:
            return said
    raise Failure(f"the run did not take {BEFORE} steps; it said:\n{said}")


def _stop(pid: int, who: str, seconds: float, rng: random.Random) -> None:
    run = psutil.Process(pid)
    pods = run.children()
    stopped = {"server": [run], "pods": pods, "one pod": [rng.choice(pods)]}[who]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    for process in stopped:
        process.send_signal(signal.SIGCONT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.faults.pauses", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 5.0, 20.0, 60.0])
    parser.add_argument("--who", nargs="+", choices=WHO, default=["server", "pods"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, failed = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="cleave-pauses-") as folder:
        for seconds in options.seconds:
            for who in options.who:
                outcome = pause(who, seconds, rng, Path(folder) / f"{who.replace(' ', '-')}-{seconds:g}")
                failed += not outcome.exact
                print(outcome.told(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
