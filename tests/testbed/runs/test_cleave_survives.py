"""The real `cleave run` when all its pods are killed: it waits, says for what, and a real agent completes it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import small_runs
from small_runs import CLEAVE, RUN_LIMIT_S

if TYPE_CHECKING:
    from conftest import Start

SMALL = ("--devices", "12", *small_runs.SMALL)
STAY_DEAD = ("--set", "launch.restarts=0")


@pytest.mark.slow
def test_with_all_pods_killed_the_run_waits_and_an_agent_completes_it_with_the_loss_of_plain_pytorch(
    start_warm: Start, tmp_path: Path
) -> None:
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, *STAY_DEAD, "--steps", "8", "--results", str(tmp_path))
    run.expect("step 1 of 8", RUN_LIMIT_S)
    pods = psutil.Process(run.pid).children()
    assert pods
    for process in pods:
        process.send_signal(signal.SIGKILL)
    waiting = run.expect("waiting for a device that can go on", RUN_LIMIT_S)
    assert "no device is there; gone are" in waiting
    assert " and 9 others" in waiting
    command = re.search(r"python -m (agent) (--ps) (tcp://\S+)$", waiting)
    assert command is not None, waiting
    fast = ("--unmeasured", "--kernel", "numpy", "--down", "10 Gbit", "--up", "10 Gbit", "--latency", "0 ms")
    agent = start_warm(*command.groups(), "--name", "newcomer", "--once", *fast)
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    assert agent.wait() == 0
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["flops_done"] == summary["flops_reference"]
    assert list(summary["real_devices"]) == ["newcomer"]
    assert summary["lost_devices"] == 12
    assert summary["verdict"] == "DEGRADED"
    (reason,) = summary["reasons"]
    assert "the requested fleet did not do the work" in reason
    assert reason.count("SIGKILL, not by us") == len(pods)
    assert "12 of 12 emulated devices at the beginning, 0 at the end, at least 0" in reason
    assert "too slow" not in reason
    assert summary["recovery"]["departures"] >= 12
