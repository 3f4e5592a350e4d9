"""Promises of the ledger and the verdict: lateness is reported, with its cause and a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from emulator.model.fidelity import DEGRADED, STRETCH_ALLOWED, VALID, Fidelity, HostLoad, device_ledger, judge
from emulator.model.fleet import uniform_fleet
from emulator.model.scales import Trial, next_scale
from ps.transport.jobs import Totals
from testbed.runs.clock_choice import SEARCH_S, choose
from testbed.runs.display import Display
from testbed.runs.load import Look, between, look
from testbed.runs.run import run
from testbed.runs.scenario import ClockSection, Scenario, load_scenario
from testbed.runs.trial_step import TrialStep

if TYPE_CHECKING:
    from numpy.typing import NDArray


def late(
    by_s: float, pod_share: float = 0.5, step_stretch: float | None = None, host: HostLoad | None = None
) -> dict[str, Any]:
    """A hundred blocks of one second, each this late; the pod caused this share of it."""
    sent_s = np.arange(100.0)
    due_s = sent_s + 1.0
    left_s = due_s + pod_share * by_s
    return {
        "sent_s": sent_s,
        "due_s": due_s,
        "received_s": due_s + by_s,
        "left_s": left_s,
        "step_stretch": step_stretch,
        "host": host,
    }


# ---- kernel links


def test_over_kernel_links_the_pods_are_judged_and_not_the_time_on_the_line() -> None:
    """Answers that leave on time are on time, however long they travel."""
    slow_line, slow_pods = late(0.5, pod_share=0.0), late(0.5, pod_share=1.0)
    assert judge(**slow_line).verdict == DEGRADED
    found = judge(**slow_line, kernel_links=True)
    assert (found.verdict, found.stretch) == (VALID, 1.0)
    assert "cleave links check" in found.reason
    found = judge(**slow_pods, kernel_links=True)
    assert found.verdict == DEGRADED
    assert found.causes[0].startswith("pods late")
    assert "slow the clock" not in found.reason  # links of a kernel have only one speed
    assert found.scale_suggested is None


@pytest.mark.parametrize(("step_stretch", "verdict"), [(1.08, VALID), (1.12, DEGRADED)])
def test_steps_over_kernel_links_may_be_a_tenth_longer_than_modelled(step_stretch: float, verdict: str) -> None:
    assert judge(**late(0.0, step_stretch=step_stretch), kernel_links=True).verdict == verdict


# ---- causes


@pytest.mark.parametrize(
    ("host", "named"),
    [
        (HostLoad(busy=0.97, own=0.9), "host CPU saturated: 97% busy, 90% by this run"),
        (HostLoad(busy=0.97, own=0.2), "host CPU saturated: 97% busy, 77% by other programs"),
        (HostLoad(busy=0.7, own=0.2), "other programs took 50% of the host's CPU"),
        (HostLoad(busy=0.5, own=0.5, stolen=0.3), "steal: the hypervisor gave 30%"),
    ],
)
def test_a_shortage_of_the_host_is_named_first(host: HostLoad, named: str) -> None:
    verdict = judge(**late(0.5, host=host))
    assert verdict.verdict == DEGRADED
    assert verdict.causes[0].startswith(named)
    assert named in verdict.reason


@pytest.mark.parametrize(("pod_share", "named"), [(1.0, "pods late"), (0.0, "server late")])
def test_the_place_where_answers_waited_is_named(pod_share: float, named: str) -> None:
    verdict = judge(**late(0.5, pod_share))
    assert verdict.causes[0].startswith(f"{named}: ")
    assert "500.0 ms" in verdict.causes[0]


def test_a_server_that_is_slow_between_products_degrades_steps_whose_blocks_are_on_time() -> None:
    verdict = judge(**late(0.001, step_stretch=1.2, host=HostLoad(server_busy=0.6)))
    assert verdict.verdict == DEGRADED
    assert verdict.causes[0].startswith("server slow: ")
    assert "60%" in verdict.causes[0]


def test_a_valid_run_has_no_cause_and_needs_no_other_scale() -> None:
    verdict = judge(**late(0.001, step_stretch=1.01, host=HostLoad(busy=1.0, stolen=0.5)))
    assert (verdict.verdict, verdict.causes, verdict.scale_suggested, verdict.late_share) == (VALID, [], None, 0.0)


def test_the_share_of_late_blocks_is_reported() -> None:
    columns = late(0.0)
    columns["received_s"] = columns["received_s"] + np.where(np.arange(100) < 30, 1.0, 0.0)
    columns["left_s"] = columns["due_s"]
    verdict = judge(**columns)
    assert verdict.late_share == pytest.approx(0.3)
    assert "30% of the blocks" in verdict.reason


# ---- the scale that helps


@given(st.floats(0.0, 50.0), st.floats(1.0, 20.0), st.floats(1.0, 50.0))
def test_the_verdict_suggests_what_the_search_for_a_scale_would_try_next(
    by_s: float, step_stretch: float, scale: float
) -> None:
    found = judge(**late(by_s, step_stretch=step_stretch), scale=scale)
    worst = max(found.stretch, step_stretch)
    if worst <= STRETCH_ALLOWED:
        assert found.scale_suggested is None
        return
    assert found.scale_suggested == next_scale([Trial(scale, worst)], STRETCH_ALLOWED)
    assert f"slow the clock down to {found.scale_suggested:g}x (now {scale:g}x)" in found.reason


def test_the_verdict_suggests_the_scale_that_a_search_has_found_honest() -> None:
    tried = (Trial(1.0, 9.0), Trial(16.0, 1.02))
    found = judge(**late(0.0, step_stretch=1.5), scale=10.0, tried=tried)
    assert found.scale_suggested == 16.0


# ---- the ledger


@given(st.integers(1, 6), st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_every_emulated_block_is_in_the_ledger_once(devices: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns: dict[str, NDArray[Any]] = {
        "device": rng.integers(0, devices, count),
        "sent_s": rng.uniform(0, 10, count),
        "compute_s": rng.uniform(0, 1, count),
    }
    columns["due_s"] = columns["sent_s"] + rng.uniform(0.1, 1, count)
    columns["received_s"] = columns["due_s"] + rng.uniform(0, 1, count)
    real = rng.random(count) < 0.2
    columns["due_s"][real] = np.nan
    profiles = uniform_fleet("extreme", devices, seed % 100)
    ledger = device_ledger(columns, profiles)
    assert sorted(ledger["device"].tolist()) == sorted(set(columns["device"][~real].tolist()))
    assert ledger["blocks"].sum() == (~real).sum()
    for row, device in enumerate(ledger["device"].tolist()):
        mine = ~real & (columns["device"] == device)
        took = (columns["received_s"] - columns["sent_s"])[mine]
        assert ledger["achieved_s"][row] == pytest.approx(took.mean())
        assert ledger["late_max_s"][row] == pytest.approx((columns["received_s"] - columns["due_s"])[mine].max())
        assert ledger["down_achieved_bps"][row] <= ledger["down_bps"][row] == profiles["down_bps"][device]
        assert ledger["latency_achieved_s"][row] >= ledger["latency_s"][row]


def test_the_ledger_of_a_run_without_emulated_devices_is_empty() -> None:
    columns = {name: np.array([1.0]) for name in ("sent_s", "received_s", "compute_s")}
    ledger = device_ledger(
        columns | {"due_s": np.array([np.nan]), "device": np.array([0])}, uniform_fleet("paper", 1, 0)
    )
    assert all(len(values) == 0 for values in ledger.values())


# ---- the host


def test_shares_of_the_host_are_measured_between_two_readings() -> None:
    before = Look(total_s=100.0, idle_s=50.0, stolen_s=1.0, own_s=10.0, server_s=2.0, now_s=0.0)
    after = Look(total_s=120.0, idle_s=54.0, stolen_s=3.0, own_s=15.0, server_s=5.0, now_s=10.0)
    load = between(before, after, longest_turn_s=0.1)
    assert (load.busy, load.stolen, load.own) == pytest.approx((0.7, 0.1, 0.25))
    assert (load.server_busy, load.server_turn_s) == pytest.approx((0.3, 0.1))


def test_a_reading_of_this_host_includes_this_process() -> None:
    before = look([os.getpid(), 2**22 + 1], Totals(), 0.0)  # a process that is gone counts as zero
    sum(range(3_000_000))
    after = look([os.getpid()], Totals(), 1.0)
    assert after.own_s > before.own_s > 0
    assert after.total_s > before.total_s >= before.idle_s > 0


# ---- real runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fidelity")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=256,
        max_position_embeddings=64,
    )
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    threads = torch.get_num_threads()
    yield path
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def small_scenario(folder: Path, **overrides: str) -> Scenario:
    values = {
        "model.config": str(folder / "config.json"),
        "data.batch": "4",
        "data.sequence": "16",
        "training.steps": "1",
    }
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_scenario("quickstart", values)


@pytest.mark.alone
def test_a_run_whose_devices_are_much_slower_than_the_host_is_valid(folder: Path) -> None:
    """A dozen devices on lines so slow that a product takes a fifth of a second: the host's speed does not matter."""
    scenario = small_scenario(folder, fleet__devices="12", fleet__line_share="0.0015")
    path, summary = run(scenario, folder, Display(Console(quiet=True)))
    assert summary.verdict == VALID, summary.reasons
    assert summary.fidelity["scale_suggested"] is None
    ledger = pyarrow.parquet.read_table(path / "ledger.parquet").to_pydict()
    assert sum(ledger["blocks"]) == summary.fidelity["blocks"] > 0
    assert len(set(ledger["device_name"])) == len(ledger["device"]) <= 12


@contextmanager
def overloaded() -> Iterator[None]:
    """Two busy loops per core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.alone
def test_on_an_overloaded_host_the_verdict_is_degraded_names_the_cause_and_auto_finds_a_scale_that_helps(
    folder: Path,
) -> None:
    """A hundred devices on whole lines: a step of a tenth of a second, too fast for such a host."""
    trial = TrialStep(small_scenario(folder, fleet__line_share="1.0"))
    seen: list[Fidelity] = []

    def probe(scale: float, left_s: float) -> Fidelity:
        seen.append(trial.measure(100, scale))
        return seen[-1]

    def until_one_is_valid_s() -> float:
        return time.monotonic() + (SEARCH_S if any(one.verdict == VALID for one in seen) else 0.0)

    with overloaded():
        chosen = choose(ClockSection(kind="auto"), probe, now_s=until_one_is_valid_s)
    first = seen[0]
    assert first.verdict == DEGRADED
    assert any(cause.startswith("host CPU saturated") for cause in first.causes), first.causes
    assert "host CPU saturated" in first.reason
    assert f"slow the clock down to {first.scale_suggested:g}x (now 1x)" in first.reason
    assert 0 < first.late_share <= 1
    assert chosen.kind == "scaled"
    assert any(one.verdict == VALID for one in seen), [one.reason for one in seen]
