"""The quickstart on three clocks: do the step times agree, and how much faster is virtual time?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.runs.display import Display
from testbed.runs.run import run
from testbed.runs.scenario import load_scenario

STEPS = 2  # the first does not count
FEW_LEND = "0.04"  # share of its line that each of 100 devices lends: a step would otherwise take over a minute
CLOCKS: dict[str, dict[str, str]] = {
    "wall": {},
    "scaled": {"clock.kind": "scaled", "clock.scale": "4"},
    "virtual": {"clock.kind": "virtual", "clock.arithmetic": "false"},
}


def measure() -> dict[str, Any]:
    """All three clocks with 1,000 devices; with 100, each lending more, the two clocks whose speed is compared."""
    told: dict[str, Any] = {name: _run(1000, name) for name in CLOCKS}
    told["100 devices"] = {name: _run(100, name) for name in ("wall", "virtual")}
    modelled_s = told["virtual"]["step_s"]
    told["wall_differs"] = told["wall"]["step_s"] / modelled_s - 1
    told["scaled_differs"] = told["scaled"]["step_s"] / modelled_s - 1
    told["faster_1000"] = told["wall"]["host_s"] / told["virtual"]["host_s"]
    told["faster_100"] = told["100 devices"]["wall"]["host_s"] / told["100 devices"]["virtual"]["host_s"]
    return told


def _run(devices: int, clock: str) -> dict[str, Any]:
    overrides = {"fleet.devices": str(devices), "training.steps": str(STEPS)} | CLOCKS[clock]
    if devices < 1000:
        overrides["fleet.line_share"] = FEW_LEND
    with tempfile.TemporaryDirectory() as folder:
        scenario = load_scenario("quickstart", overrides)
        _, summary = run(scenario, Path(folder), Display(Console(quiet=True)))
    return {
        "step_s": summary.step_s["p50"],
        "host_s": summary.training_host_s / summary.steps,
        "blocks": summary.blocks // summary.steps,
        "verdict": summary.verdict,
        "stretch": summary.fidelity["stretch"],
        "step_stretch": summary.fidelity["step_stretch"],
        "host": summary.fidelity["host"],
        "pod_late_p99_s": summary.fidelity["pod_late_p99_s"],
        "server_late_p99_s": summary.fidelity["server_late_p99_s"],
    }
