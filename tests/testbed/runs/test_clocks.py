"""Promises of the clocks: each tells device time truly; virtual time waits for nobody and is the same every time."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent.protocol.clock import Clock, ScaledClock, VirtualClock, WallClock
from emulator.model.fidelity import DEGRADED, VALID, Fidelity
from testbed.results.files import Summary, print_summary
from testbed.runs.clock_choice import choose
from testbed.runs.display import Display
from testbed.runs.run import run
from testbed.runs.scenario import ClockSection, load_scenario

# ---- the clocks themselves


@given(st.floats(1, 10_000))
def test_device_time_goes_so_many_times_slower(scale: float) -> None:
    before_ns = time.monotonic_ns()
    now_ns = ScaledClock(scale).now_ns()
    after_ns = time.monotonic_ns()
    assert before_ns / scale - 2 <= now_ns <= after_ns / scale + 2


@given(st.floats(1, 10_000), st.floats(0, 1000))
def test_a_moment_in_device_time_is_waited_for_so_many_times_longer(scale: float, seconds: float) -> None:
    clock = ScaledClock(scale)
    wait_s = clock.wait_s(clock.now_ns() + int(1e9 * seconds))
    assert wait_s <= scale * seconds + 1e-3
    assert wait_s >= scale * seconds - 1.0  # a busy machine may have spent a moment in between
    assert clock.wait_s(clock.now_ns() - 1) == 0


@pytest.mark.parametrize("scale", [0.0, 0.99, -1.0, float("nan"), float("inf")])
def test_no_clock_is_faster_than_the_host(scale: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ScaledClock(scale)


def test_two_processes_with_the_same_scale_agree() -> None:
    one, two = ScaledClock(7.5), ScaledClock(7.5)
    assert one.now_ns() <= two.now_ns() <= one.now_ns()


def test_the_wall_clock_is_the_hosts() -> None:
    before, now, after = time.monotonic_ns(), WallClock().now_ns(), time.monotonic_ns()
    assert before <= now <= after


def test_a_virtual_clock_jumps_and_never_goes_back() -> None:
    clock = VirtualClock()
    clock.jump(3600.0)
    clock.jump(1.0)
    assert clock.now_ns() == 3600 * 10**9
    assert clock.wait_s(10**18) == 0


def test_every_clock_is_a_clock() -> None:
    clocks: list[Clock] = [WallClock(), ScaledClock(2), VirtualClock()]
    assert all(clock.now_ns() >= 0 for clock in clocks)


# ---- which one a run gets

FINE = Fidelity(VALID, "", 9, 1.01, 0.0, 0.0, step_stretch=1.02)
SLOW = Fidelity(DEGRADED, "", 9, 1.2, 0.0, 0.0, step_stretch=1.4, causes=["pods late"], scale_needed=14.0)


def test_auto_is_real_time_where_the_host_keeps_up_and_says_why() -> None:
    chosen = choose(ClockSection(kind="auto"), lambda scale: FINE)
    assert (chosen.kind, chosen.scale) == ("wall", 1.0)
    assert "keeps up" in chosen.why
    assert "2.0%" in chosen.why


def test_auto_is_as_slow_as_needed_where_it_does_not() -> None:
    chosen = choose(ClockSection(kind="auto"), lambda scale: SLOW)
    assert (chosen.kind, chosen.scale) == ("scaled", 14.0)
    assert "pods late" in chosen.why


@pytest.mark.parametrize(
    "asked", [ClockSection(), ClockSection(kind="scaled", scale=3.0), ClockSection(kind="virtual")]
)
def test_what_was_asked_for_is_taken_without_a_probe(asked: ClockSection) -> None:
    def never(scale: float) -> Fidelity:
        raise AssertionError("nothing is to be chosen")

    chosen = choose(asked, never)
    assert (chosen.kind, chosen.scale) == (asked.kind, asked.scale)


# ---- runs

SLOW_LINES = "0.006"  # modelled seconds, beside which the work of this host is little


class Runs:
    """Runs of a tiny model, by their overrides; each is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, dict[tuple[tuple[str, str], ...], tuple[Path, Summary]]()
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=256,
            max_position_embeddings=64,
        )
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(config.to_dict()))

    def __call__(self, scenario: str = "quickstart", **overrides: str) -> tuple[Path, Summary]:
        values = {
            "model.config": str(self._config),
            "data.batch": "4",
            "data.sequence": "16",
            "training.steps": "2",
            "fleet.devices": "12",
            "fleet.pods": "2",
            "fleet.line_share": SLOW_LINES,
        }
        values |= {key.replace("__", "."): value for key, value in overrides.items()}
        key = (("scenario", scenario), *sorted(values.items()))
        if key not in self._made:
            loaded = load_scenario(scenario, {k: v for k, v in values.items() if k != "again"})
            self._made[key] = run(loaded, self._folder, Display(Console(quiet=True)))
        return self._made[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    threads = torch.get_num_threads()
    yield Runs(tmp_path_factory.mktemp("clocks"))
    torch.set_num_threads(threads)
    torch._dynamo.reset()


CLOCKS: dict[str, dict[str, str]] = {
    "wall": {},
    "scaled": {"clock__kind": "scaled", "clock__scale": "2"},
    "virtual": {"clock__kind": "virtual"},
    "shapes": {"clock__kind": "virtual", "clock__arithmetic": "false"},
}


@pytest.mark.slow
def test_the_same_scenario_is_the_same_run_on_every_clock(runs: Runs) -> None:
    """A busy machine makes real time longer than modelled time, and nothing makes it shorter; but pods join in any
    order, and with the numbers of devices plans change a little."""
    told = {name: runs(**clock)[1] for name, clock in CLOCKS.items()}
    modelled = told["virtual"]
    for name, summary in told.items():
        assert summary.clock["kind"] == ("virtual" if name == "shapes" else name)
        assert summary.flops_done == summary.flops_reference == modelled.flops_done
        assert summary.products_per_step == modelled.products_per_step
        assert summary.step_s["p50"] >= 0.9 * modelled.step_s["p50"]
    assert told["shapes"].step_s == pytest.approx(modelled.step_s)
    assert told["shapes"].blocks == modelled.blocks
    for name in ("wall", "scaled", "virtual"):
        difference = told[name].loss_max_abs_diff
        assert difference is not None
        assert difference <= 1e-4
    assert told["shapes"].losses == []


@pytest.mark.slow
def test_a_scaled_run_takes_so_many_times_longer_than_it_tells(runs: Runs) -> None:
    _, summary = runs(**CLOCKS["scaled"])
    assert summary.training_host_s >= 2 * 2 * 0.9 * runs(**CLOCKS["virtual"])[1].step_s["p50"]


@pytest.mark.slow
def test_virtual_time_is_not_waited_for(runs: Runs) -> None:
    """Modelled seconds are so many here that no machine is as slow."""
    _, summary = runs(fleet__line_share="0.00001", **CLOCKS["shapes"])
    assert sum(_seconds(runs(fleet__line_share="0.00001", **CLOCKS["shapes"])[0])) > 600
    assert summary.training_host_s < 60


def _seconds(folder: Path) -> list[float]:
    with (folder / "steps.csv").open(newline="", encoding="utf-8") as file:
        return [float(row["seconds"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_every_clock_leaves_the_same_folder(runs: Runs) -> None:
    contents = {name: runs(**clock)[0] for name, clock in CLOCKS.items()}
    names = [{path.name for path in folder.iterdir()} for folder in contents.values()]
    assert all(one == names[0] for one in names)
    assert {"summary.json", "events.jsonl", "blocks.parquet", "ledger.parquet", "steps.csv", "report.html"} <= names[0]
    kinds = [[event["event"] for event in _events(folder)] for folder in contents.values()]
    assert all(one == kinds[0] for one in kinds)
    columns = [pyarrow.parquet.read_schema(folder / "blocks.parquet").names for folder in contents.values()]
    assert all(one == columns[0] for one in columns)
    summaries = [set(json.loads((folder / "summary.json").read_text())) for folder in contents.values()]
    assert all(one == summaries[0] for one in summaries)


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_shapes_only_says_that_there_is_no_loss(runs: Runs) -> None:
    folder, summary = runs(**CLOCKS["shapes"])
    console = Console(width=110)
    with console.capture() as captured:
        print_summary(console, summary)
    assert "none computed: shapes only" in captured.get()
    assert json.loads((folder / "summary.json").read_text())["loss_max_abs_diff"] is None


# ---- the same every time

FAULTY = {"clock__kind": "virtual", "training__steps": "2", "fleet__devices": "40", "fleet__line_share": "0.0005"}


@pytest.mark.slow
def test_a_seeded_virtual_run_twice_is_the_same_to_the_byte_and_another_seed_is_another(runs: Runs) -> None:
    """With devices that come and go, freeze and fall silent."""
    one, two, other = (runs("churn", **FAULTY, **more) for more in ({}, {"again": "1"}, {"seed": "2"}))
    assert one[0] != two[0]
    first = (one[0] / "events.jsonl").read_bytes()
    assert first == (two[0] / "events.jsonl").read_bytes()
    assert first != (other[0] / "events.jsonl").read_bytes()
    assert any(event["event"] == "injected" for event in _events(one[0]))
    blocks = [pyarrow.parquet.read_table(folder / "blocks.parquet") for folder, _ in (one, two)]
    assert blocks[0].equals(blocks[1])


@pytest.mark.slow
def test_faults_come_at_their_virtual_moment(runs: Runs) -> None:
    _, summary = runs("churn", **FAULTY)
    assert summary.audit["faults"]["injected"] == summary.audit["faults"]["scheduled"] > 0
    assert summary.audit["faults"]["worst_delay_s"] == pytest.approx(0.0, abs=1e-6)
    assert summary.audit["churn"]["worst_delay_s"] == pytest.approx(0.0, abs=1e-6)
    assert summary.flops_done == summary.flops_reference


@pytest.mark.slow
def test_stamps_of_a_virtual_run_are_virtual(runs: Runs) -> None:
    folder, summary = runs(**CLOCKS["virtual"])
    events = _events(folder)
    ends = [event["at_s"] for event in events if event["event"] == "step"]
    np.testing.assert_allclose(np.diff([0.0, *ends]), _seconds(folder), atol=1e-5)
    blocks = pyarrow.parquet.read_table(folder / "blocks.parquet").to_pydict()
    late = np.subtract(blocks["received_s"], blocks["due_s"])
    assert (late >= -1e-6).all()
    assert (late <= 0.001).all()
    assert summary.verdict == VALID
