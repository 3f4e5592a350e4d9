"""The real `cleave run` while its devices join, leave and fail: the loss still equals that of plain PyTorch, and the
results say what was done to the fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import parquet
from small_runs import RUN_LIMIT_S

if TYPE_CHECKING:
    from conftest import Start

CLEAVE = "import sys; from testbed.commands.cli import main; sys.exit(main())"
SMALL = ("--no-predict", "--set", "data.batch=2", "--set", "data.sequence=16", "--set", "fleet.line_share=1.0")
CHURN = ("--devices", "30", "--steps", "4", "--set", "churn.kind=poisson", "--set", "churn.leave_per_minute=600%")
FAULTS = """[
    {at = "0 s", do = "slow", share = "20%", factor = 3.0},
    {at = "0 s", do = "vanish", network = "uk-ftth", seconds = 0.5},
    {at = "10 ms", do = "corrupt"},
    {at = "20 ms", do = "freeze", devices = 2, seconds = 0.3},
    {at = "30 ms", do = "flap", devices = 3, times = 2, period = "200 ms"},
    {at = "50 ms", do = "stop", seconds = 0.1},
    {at = "100 ms", do = "kill"},
    {at = "10 h", do = "leave", share = "100%"},
]""".replace("\n", " ")


LIES = "[" + ", ".join(
    f'{{at = "0 s", do = "lie", devices = 1, how = "{how}"}}' for how in ("noise", "element", "stale", "zeros", "nan")
) + "]"  # fmt: skip
# One device in twenty lies, each in its own way, for two steps. Devices are alike, and there is work for all of them.
LIARS = ("--devices", "100", "--steps", "2", "--set", "data.batch=8", "--set", "data.sequence=64")
ALIKE = ("--set", "fleet.kinds={pixel-8 = 1}", "--set", "fleet.networks={us-starlink-2025q1 = 1}")
SLOW = ("--set", "fleet.line_share=0.05", "--set", "fleet.pods=1")  # so that another line is worth its latency


class Run:
    def __init__(self, folder: Path) -> None:
        (self.folder,) = folder.iterdir()
        self.summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        self.injected = [event for event in map(json.loads, lines) if event["event"] == "injected"]

    def check(self) -> None:
        """Right at any load of the machine."""
        assert self.summary["loss_max_abs_diff"] <= 1e-4
        assert self.summary["flops_done"] == self.summary["flops_reference"]
        assert self.summary["verdict"] in ("VALID", "DEGRADED")
        text = (self.folder / "summary.txt").read_text(encoding="utf-8")
        assert "faults and churn" in text


@pytest.fixture(scope="module")
def runs(start_warm_module: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    options = {
        "churn": (*CHURN, "--set", "churn.mean_away=1 s", "--set", "churn.how=leave"),
        "faults": ("--devices", "30", "--steps", "4", "--set", "fleet.pods=3", "--set", f"faults={FAULTS}"),
    }
    options["lies"] = (*LIARS, *ALIKE, *SLOW, "--set", f"faults={LIES}")
    folders = {name: tmp_path_factory.mktemp(name) for name in options}
    programs = {
        name: start_warm_module("-c", CLEAVE, "run", "quickstart", "--results", str(folders[name]), *SMALL, *more)
        for name, more in options.items()
    }
    for name, program in programs.items():
        program.wait(RUN_LIMIT_S)
        assert "results in" in program.output, f"{name}: {program.output}"
    return {name: Run(folder) for name, folder in folders.items()}


@pytest.mark.slow
def test_with_churn_the_loss_equals_plain_pytorchs(runs: dict[str, Run]) -> None:
    run = runs["churn"]
    run.check()
    audit = run.summary["audit"]["churn"]
    assert audit["complete"], audit
    assert audit["leaves"] > 0
    assert audit["joins"] > 0
    assert {event["do"] for event in run.injected} == {"leave", "return"}
    assert sum(len(event["devices"]) for event in run.injected) == audit["scheduled"]


@pytest.mark.slow
def test_with_faults_of_every_kind_but_lies_the_loss_equals_plain_pytorchs(runs: dict[str, Run]) -> None:
    run = runs["faults"]
    run.check()
    audit = run.summary["audit"]["faults"]
    assert audit["after_the_end"] >= 1
    assert audit["injected"] + audit["after_the_end"] >= 10, audit
    asked = {"slow", "vanish", "corrupt", "freeze", "leave", "return", "stop", "kill"}
    assert {event["do"] for event in run.injected} >= asked
    assert run.summary["lost_devices"] >= 10  # those of the killed pod


@pytest.mark.slow
def test_all_liars_and_no_others_are_caught_within_two_steps_and_the_loss_equals_plain_pytorchs(
    runs: dict[str, Run],
) -> None:
    run = runs["lies"]
    run.check()
    liars = {device for event in run.injected for device in event["devices"]}
    assert len(liars) == 5
    names = parquet.read_table(run.folder / "blocks.parquet")["device_name"].to_pylist()
    worked = {int(name.rsplit("/", 1)[1]) for name in set(names)}
    assert liars <= worked, "a device without work cannot lie"
    caught = {int(label.split(" ")[0].rsplit("/", 1)[1]) for label in run.summary["suspended"]}
    assert caught == liars
    assert run.summary["verification"]["wrong"] >= len(caught)
    assert run.summary["verification"]["checked"] >= run.summary["blocks"]
