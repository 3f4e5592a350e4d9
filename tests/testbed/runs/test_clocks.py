"""Promises of the clocks: each gives the right device time; virtual time never waits and is the same every time."""

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
from emulator.model.scales import Trial
from testbed.results.files import Summary, print_summary
from testbed.results.known_scales import KnownScales
from testbed.runs.clock_choice import Chosen, choose
from testbed.runs.display import Display
from testbed.runs.run import run
from testbed.runs.scenario import ClockSection, load_scenario

# ---- the clocks themselves


@given(st.floats(1, 10_000))
def test_device_time_runs_slower_by_the_scale(scale: float) -> None:
    before_ns = time.monotonic_ns()
    now_ns = ScaledClock(scale).now_ns()
    after_ns = time.monotonic_ns()
    assert before_ns / scale - 2 <= now_ns <= after_ns / scale + 2


@given(st.floats(1, 10_000), st.floats(0, 1000))
def test_waiting_for_a_device_time_takes_longer_by_the_scale(scale: float, seconds: float) -> None:
    clock = ScaledClock(scale)
    wait_s = clock.wait_s(clock.now_ns() + int(1e9 * seconds))
    assert wait_s <= scale * seconds + 1e-3
    assert wait_s >= scale * seconds - 1.0  # a busy machine may lose some time in between
    assert clock.wait_s(clock.now_ns() - 1) == 0


@pytest.mark.parametrize("scale", [0.0, 0.99, -1.0, float("nan"), float("inf")])
def test_no_clock_is_faster_than_the_host(scale: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ScaledClock(scale)


def test_two_processes_with_the_same_scale_agree() -> None:
    one, two = ScaledClock(7.5), ScaledClock(7.5)
    assert one.now_ns() <= two.now_ns() <= one.now_ns()


def test_the_wall_clock_is_the_hosts_clock() -> None:
    before, now, after = time.monotonic_ns(), WallClock().now_ns(), time.monotonic_ns()
    assert before <= now <= after


def test_a_virtual_clock_jumps_forward_and_never_back() -> None:
    clock = VirtualClock()
    clock.jump(3600.0)
    clock.jump(1.0)
    assert clock.now_ns() == 3600 * 10**9
    assert clock.wait_s(10**18) == 0


def test_every_clock_has_the_clock_interface() -> None:
    clocks: list[Clock] = [WallClock(), ScaledClock(2), VirtualClock()]
    assert all(clock.now_ns() >= 0 for clock in clocks)


# ---- the choice of a clock


class Host:
    """A host that keeps up from a scale on; below, it is saturated and late by a delay."""

    def __init__(self, least: float, probe_s: float = 1.0) -> None:
        self.least, self.probe_s, self.now_s, self.probed = least, probe_s, 0.0, list[float]()

    def probe(self, scale: float, left_s: float) -> Fidelity:
        self.now_s += self.probe_s
        self.probed.append(scale)
        stretch = 1.02 if scale >= self.least else 1.1 * self.least / scale
        return Fidelity(VALID if scale >= self.least else DEGRADED, "", 9, stretch, 0.0, 0.0, step_stretch=stretch)

    def choose(self, known: tuple[Trial, ...] = (), limit_s: float = 100.0) -> Chosen:
        return choose(ClockSection(kind="auto"), self.probe, known, limit_s=limit_s, now_s=lambda: self.now_s)


def test_auto_is_real_time_where_the_host_keeps_up_and_says_why() -> None:
    host = Host(1.0)
    chosen = host.choose()
    assert (chosen.kind, chosen.scale, host.probed) == ("wall", 1.0, [1.0])
    assert "keeps up" in chosen.why
    assert "2.0%" in chosen.why


@given(st.floats(1.05, 500.0))
def test_auto_finds_a_scale_that_is_honest_and_at_most_one_and_a_half_times_the_least(least: float) -> None:
    host = Host(least)
    chosen = host.choose()
    assert chosen.kind == "scaled"
    assert least <= chosen.scale <= 1.5 * least
    assert len(host.probed) <= 10
    assert f"{chosen.scale:g}x" in chosen.why


@given(st.floats(2.0, 500.0), st.floats(1.0, 60.0))
def test_the_search_ends_in_its_time(least: float, probe_s: float) -> None:
    host = Host(least, probe_s)
    chosen = host.choose()
    assert host.now_s <= 100.0 + probe_s
    assert chosen.scale > 1.0


def test_out_of_time_the_scale_is_an_estimate_and_said_to_be_one() -> None:
    class Hopeless(Host):
        def probe(self, scale: float, left_s: float) -> Fidelity:
            super().probe(scale, left_s)
            return Fidelity(DEGRADED, "", 9, 2.0, 0.0, 0.0)

    host = Hopeless(1.0, probe_s=80.0)
    chosen = host.choose()
    assert len(host.probed) == 2
    assert chosen.scale > host.probed[-1]
    assert "estimate" in chosen.why


def test_what_was_found_before_is_taken_without_a_probe() -> None:
    host = Host(14.0)
    found = host.choose()
    host.probed.clear()
    again = host.choose(found.trials)
    assert (again.kind, again.scale, host.probed) == (found.kind, found.scale, [])
    assert "earlier" in again.why


def test_scales_are_kept_for_the_same_scenario_only(tmp_path: Path) -> None:
    trials = (Trial(1.0, 9.0), Trial(14.0, 1.02))
    quickstart = load_scenario("quickstart")
    KnownScales(tmp_path, quickstart).keep(trials)
    assert KnownScales(tmp_path, quickstart).trials() == trials
    assert KnownScales(tmp_path, load_scenario("quickstart", {"training.steps": "9"})).trials() == trials
    assert KnownScales(tmp_path, load_scenario("quickstart", {"fleet.devices": "9"})).trials() == ()
    KnownScales(tmp_path, quickstart).keep(())
    assert KnownScales(tmp_path, quickstart).trials() == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 3}', "\x00"])
def test_a_damaged_file_of_scales_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    known = KnownScales(tmp_path, load_scenario("quickstart"))
    known.path.write_text(text)
    assert known.trials() == ()
    known.keep([Trial(1.0, 1.0)])
    assert known.trials() == (Trial(1.0, 1.0),)


@pytest.mark.parametrize(
    "asked", [ClockSection(), ClockSection(kind="scaled", scale=3.0), ClockSection(kind="virtual")]
)
def test_what_was_asked_for_is_taken_without_a_probe(asked: ClockSection) -> None:
    def never(scale: float, left_s: float) -> Fidelity:
        raise AssertionError("nothing is to be chosen")

    chosen = choose(asked, never)
    assert (chosen.kind, chosen.scale) == (asked.kind, asked.scale)


# ---- runs

SLOW_LINES = "0.006"  # modelled seconds that dwarf this host's work


class Runs:
    """Runs of a tiny model, keyed by their overrides; each runs once."""

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
            predicts = scenario == "quickstart"  # a disturbed step is not compared with the predicted one
            self._made[key] = run(loaded, self._folder, Display(Console(quiet=True)), predicts)
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
    order, and plans change slightly with the numbers of the devices."""
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
def test_a_scaled_run_takes_longer_than_its_device_time_by_the_scale(runs: Runs) -> None:
    _, summary = runs(**CLOCKS["scaled"])
    assert summary.training_host_s >= 2 * 2 * 0.9 * runs(**CLOCKS["virtual"])[1].step_s["p50"]


@pytest.mark.slow
def test_a_virtual_run_does_not_wait(runs: Runs) -> None:
    """The run has more modelled seconds than any machine would need."""
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
    kinds = {name: [event["event"] for event in _events(folder)] for name, folder in contents.items()}
    assert kinds["scaled"] == kinds["wall"]
    undisturbed = [kind for kind in kinds["wall"] if kind != "predicted"]  # a virtual run is its own prediction
    assert kinds["virtual"] == kinds["shapes"] == undisturbed
    columns = [pyarrow.parquet.read_schema(folder / "blocks.parquet").names for folder in contents.values()]
    assert all(one == columns[0] for one in columns)
    summaries = [set(json.loads((folder / "summary.json").read_text())) for folder in contents.values()]
    assert all(one == summaries[0] for one in summaries)


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_with_shapes_only_reports_no_loss(runs: Runs) -> None:
    folder, summary = runs(**CLOCKS["shapes"])
    console = Console(width=110)
    with console.capture() as captured:
        print_summary(console, summary)
    assert "none computed: shapes only" in captured.get()
    assert json.loads((folder / "summary.json").read_text())["loss_max_abs_diff"] is None


# ---- determinism

FAULTY = {"clock__kind": "virtual", "training__steps": "2", "fleet__devices": "40", "fleet__line_share": "0.0005"}


@pytest.mark.slow
def test_virtual_runs_of_one_seed_are_equal_to_the_byte_and_those_of_another_differ(runs: Runs) -> None:
    """With devices that leave, return, freeze and fall silent."""
    one, two, other = (runs("churn", **FAULTY, **more) for more in ({}, {"again": "1"}, {"seed": "2"}))
    assert one[0] != two[0]
    first = (one[0] / "events.jsonl").read_bytes()
    assert first == (two[0] / "events.jsonl").read_bytes()
    assert first != (other[0] / "events.jsonl").read_bytes()
    assert any(event["event"] == "injected" for event in _events(one[0]))
    blocks = [pyarrow.parquet.read_table(folder / "blocks.parquet") for folder, _ in (one, two)]
    assert blocks[0].equals(blocks[1])


@pytest.mark.slow
def test_faults_happen_at_their_virtual_time(runs: Runs) -> None:
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
