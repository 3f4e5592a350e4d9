"""Promises of emulator.links.shaping on a kernel that has netem: delay, jitter, loss and rate are set as requested, and
a round trip takes that long. The kernel is Debian's user-mode Linux (`netem_kernel.py`), started once for all tests."""

from __future__ import annotations

import json
import sys
from typing import Any

import netem_kernel
import pytest
from places import ROOT

from emulator.links.shaping_plan import class_rate

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="kernel links are Linux's"),
    pytest.mark.root("fetching a kernel, and its namespaces"),
    pytest.mark.slow,
]


def test_the_kernel_can_be_fetched() -> None:
    """Beside other tests, so that those which run alone need not wait for the download."""
    if (why := netem_kernel.why_not()) is not None:
        pytest.skip(why)
    netem_kernel.fetch()


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    if (why := netem_kernel.why_not()) is not None:
        pytest.skip(why)
    done = netem_kernel.run([sys.executable, "tests/helpers/netem_inside.py"], ROOT)
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.alone
def test_the_kernel_has_netem_and_nothing_is_left_to_user_space(told: dict[str, Any]) -> None:
    assert told["probe"]["netem"]
    assert told["applied"]["in_user_space"] == []
    assert (told["applied"]["classes"], told["applied"]["leaves"]) == (6, 6)


@pytest.mark.alone
def test_delay_jitter_loss_and_rate_are_read_back_as_requested(told: dict[str, Any]) -> None:
    """Up to the kernel's units: bytes per second, 64 ns, 2^-32."""
    for way, rows in told["set"].items():
        assert len(rows) == len(told["asked"])
        for minor, asked in enumerate(told["asked"], start=2):
            row = rows[str(minor)]
            assert row["rate_bytes_s"] == class_rate(asked[f"rate_{way}_bps"])
            assert row["delay_s"] == pytest.approx(asked[f"delay_{way}_s"], abs=64e-9)
            assert row["jitter_s"] == pytest.approx(asked[f"jitter_{way}_s"], abs=64e-9)
            assert row["loss"] == pytest.approx(asked[f"loss_{way}"], abs=2**-31)


@pytest.mark.alone
@pytest.mark.parametrize("by", ["ping_s", "zeromq_s"])
def test_a_round_trip_takes_the_delay_of_both_ways(told: dict[str, Any], by: str) -> None:
    for asked, took_s in zip(told["asked"], told[by], strict=False):
        assert took_s == pytest.approx(asked["delay_down_s"] + asked["delay_up_s"], rel=0.1)


@pytest.mark.alone
def test_a_changed_delay_holds_from_then_on(told: dict[str, Any]) -> None:
    assert told["changed_ping_s"] == pytest.approx(0.26, rel=0.1)


@pytest.mark.alone
def test_clearing_leaves_no_class_and_no_leaf(told: dict[str, Any]) -> None:
    assert told["left"] == {"up": {}, "down": {}}
