"""Promises of `cleave links check` and of emulator.links.probe: requested against achieved, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from emulator.links.probe import GROUP_BPS, Asked, MeasuredLink, Rate, groups, spans_s
from emulator.links.shaping import Applied
from emulator.model.link import LinkSpec
from testbed.inspect import link_check

SPEC = LinkSpec(20e6, 1e6, 0.03, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
EXACT = MeasuredLink("10.253.0.2", 20e6, 1e6, 0.05)
CLEAVE = [sys.executable, "-c", "from testbed.commands.cli import main; main()", "links", "check", "quickstart"]


# ---- judging


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (EXACT, ()),
        (replace(EXACT, down_bps=19.1e6, up_bps=1.04e6), ()),
        (replace(EXACT, down_bps=18.5e6), ("down",)),
        (replace(EXACT, up_bps=1.2e6), ("up",)),
        (replace(EXACT, round_trip_s=0.056), ()),
        (replace(EXACT, round_trip_s=0.06), ("round trip",)),
        (replace(EXACT, round_trip_s=0.04), ("round trip",)),
    ],
)
def test_a_link_is_judged_by_both_rates_and_the_round_trip(got: MeasuredLink, wrong: tuple[str, ...]) -> None:
    assert link_check.judge("phone", SPEC, got, latency_in_kernel=True).wrong == wrong


def test_latency_held_in_user_space_is_not_expected_of_the_kernel() -> None:
    row = link_check.judge("phone", SPEC, replace(EXACT, round_trip_s=0.001), latency_in_kernel=False)
    assert (row.asked_round_trip_s, row.wrong) == (None, ())
    assert link_check.judge("phone", SPEC, EXACT, latency_in_kernel=False).wrong == ("round trip",)


def test_the_verdict_counts_wrong_links_and_says_what_user_space_does() -> None:
    applied = Applied(100, 200, 0, False, ("latency", "jitter"), 0.1)
    good = link_check.judge("phone", SPEC, EXACT, True)
    bad = link_check.judge("laptop", SPEC, replace(EXACT, up_bps=1.0), True)
    assert link_check.verdict(applied, [good]).startswith("VALID: 1 of 100 devices")
    assert "latency, jitter held in user space" in link_check.verdict(applied, [good])
    assert "1 of 2 devices do not carry what was asked for (laptop: up)" in link_check.verdict(applied, [good, bad])


@given(st.integers(1, 5000), st.integers(1, 100), st.integers(0, 2**31))
def test_a_sample_has_different_devices_and_is_the_same_for_the_same_seed(count: int, most: int, seed: int) -> None:
    chosen = link_check.choose(count, most, seed)
    assert len(set(chosen)) == len(chosen) == min(count, most)
    assert all(0 <= device < count for device in chosen)
    assert chosen == link_check.choose(count, most, seed)


# ---- measuring


@given(st.lists(st.tuples(st.floats(1e3, 1e9), st.floats(1e3, 1e9)), min_size=1, max_size=60))
def test_every_device_is_in_one_group_and_a_group_fits_or_is_one_device(rates: list[tuple[float, float]]) -> None:
    devices = [Asked(str(number), down, up) for number, (down, up) in enumerate(rates)]
    made = list(groups(devices))
    assert sorted(one.address for group in made for one in group) == sorted(one.address for one in devices)
    for group in made:
        assert len(group) == 1 or sum(one.down_bps + one.up_bps for one in group) <= GROUP_BPS


@given(st.floats(1e4, 1e9), st.integers(100, 100_000))
def test_the_measured_rate_is_that_of_a_steady_stream(bps: float, chunk: int) -> None:
    rate = Rate(bps)
    warm_up_s, needs_s = spans_s(bps)
    step_s = (warm_up_s + needs_s) / 200  # 200 arrivals, each with the bytes that came since the last
    now_s = 1000.0
    while not rate.enough:
        rate.arrived(round(bps / 8 * step_s) + chunk, now_s)
        now_s += step_s
    assert rate.bps == pytest.approx(8 * (round(bps / 8 * step_s) + chunk) / step_s, rel=1e-6)
    assert now_s - 1000.0 >= warm_up_s + needs_s


# ---- the command


@pytest.mark.root("network namespaces")
@pytest.mark.slow
def test_the_command_measures_a_sample_of_a_scenarios_fleet() -> None:
    options = ["--set", "fleet.devices=40", "--set", "fleet.uniform=paper", "--set", "fleet.line_share=0.02"]
    done = subprocess.run(
        [*CLEAVE, *options, "--sample", "3", "--format", "json"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode in (0, 1), done.stderr  # 1: this machine was too busy for its links
    told = json.loads(done.stdout)
    assert told["verdict"] == ("VALID" if done.returncode == 0 else "DEGRADED")
    assert told["applied"]["devices"] == 40
    assert told["applied"]["classes"] == 80
    assert len(told["devices"]) == 3
    assert all(row["down_bps"] > 0 and row["up_bps"] > 0 and row["round_trip_s"] > 0 for row in told["devices"])


@pytest.mark.parametrize(
    ("options", "says"), [(["--sample", "0"], "--sample is 0"), (["--format", "xml"], "must be table or json")]
)
def test_a_wrong_option_gets_one_line(options: list[str], says: str) -> None:
    done = subprocess.run([*CLEAVE, *options], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
