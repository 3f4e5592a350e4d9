"""Promises of emulator.model.zoo and emulator.model.fleet: the shipped files are sound, a fleet has the lines it asks
for."""

from __future__ import annotations

import time
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.protocol.profile import PROFILE, check_profiles
from emulator.model.fleet import UNIFORM, draw_fleet, uniform_fleet
from emulator.model.zoo import (
    TECHNOLOGIES,
    UnknownName,
    device_names,
    load_device,
    load_network,
    network_names,
    parse_device,
    parse_network,
)

DEVICE = (resources.files("emulator") / "devices" / "pixel-8.toml").read_text(encoding="utf-8")
NETWORK = (resources.files("netem_profiles") / "uk-ftth.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", device_names())
def test_every_device_file_is_complete_plausible_and_sourced(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert 10e9 <= device.flops <= 2e12
    assert 10e-6 <= device.overhead_s <= 1e-3
    assert device.budget_bytes < device.ram_bytes
    assert device.source


@pytest.mark.parametrize("name", network_names())
def test_every_network_file_is_complete_plausible_and_sourced(name: str) -> None:
    network = load_network(name)
    assert network.name == name
    assert 0.1e6 <= network.up.p10 <= network.up.p90 <= 1e9
    assert 0.5e6 <= network.down.p10 <= network.down.p90 <= 5e9
    assert 1e-3 <= network.rtt_s <= 0.8  # at most that of a geostationary satellite
    assert network.technology == "satellite" or network.rtt_s <= 0.1
    for loaded_s in (network.rtt_loaded_down_s, network.rtt_loaded_up_s):
        assert loaded_s is None or network.rtt_s < loaded_s < 1.0
    assert network.source


def test_the_zoo_covers_every_kind_and_twenty_networks() -> None:
    assert {load_device(name).kind for name in device_names()} == {"phone", "tablet", "board", "laptop", "mini-pc"}
    networks = [load_network(name) for name in network_names()]
    assert len(networks) >= 40
    assert {network.technology for network in networks} == set(TECHNOLOGIES)
    assert {network.country for network in networks} >= {"GB", "US", "IN", "CA", "world"}
    spread = {network.technology for network in networks if network.up.p10 < network.up.p50 < network.up.p90}
    assert spread == set(TECHNOLOGIES) - {"mixed"}  # each kind has a profile from which households can be drawn


def test_an_unknown_device_is_answered_with_the_nearest_names_and_where_all_are() -> None:
    with pytest.raises(UnknownName, match=r'unknown device "pixel-88"; nearest: pixel-8,.*emulator.devices'):
        load_device("pixel-88")


def test_an_unknown_network_is_answered_with_the_nearest_names_and_where_all_are() -> None:
    with pytest.raises(UnknownName, match=r'unknown network "uk-fth"; nearest: uk-ftth,.*netem_profiles'):
        load_network("uk-fth")


def test_a_name_cannot_leave_the_folder() -> None:
    with pytest.raises(UnknownName):
        load_device("../devices/pixel-8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"140.9 GFLOPS"', "140.9", 'key "gemm": 140.9 .* has no unit|key "gemm".*no unit'),
        ("gemm =", "gem =", 'missing key "gemm"'),
        ("title =", 'colour = "red"\ntitle =', 'unknown key "colour"'),
        ('basis = "estimate"', 'basis = "guess"', "is not one of measured, published, estimate"),
        ('budget = "512 MB"', 'budget = "0 MB"', "more than zero"),
        ("kind =", "kind", "line 2"),
    ],
)
def test_a_malformed_device_file_says_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in DEVICE
    with pytest.raises(ValueError, match=message):
        parse_device("x", DEVICE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('p10 = "74.58 Mbit"', 'p10 = "900 Mbit"', 'key "down": percentiles must'),
        ('rtt = "6.61 ms"', 'rtt = "6.61"', 'key "rtt".*no unit'),
        ("loss_percent = 0.0108", "loss_percent = 101", "from 0 to 100"),
        ("samples = 596", "samples = 0", "at least 1"),
    ],
)
def test_a_malformed_network_file_says_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in NETWORK
    with pytest.raises(ValueError, match=message):
        parse_network("x", NETWORK.replace(old, new, 1))


def test_an_absent_figure_stays_absent_instead_of_becoming_zero() -> None:
    network = load_network("us-cable-cox")
    assert network.jitter_s is None
    assert network.loss is None


ONE_DEVICE = {"pixel-8": 1.0}
ONE_NETWORK = {"uk-ftth": 1.0}


@settings(deadline=None)
@given(
    st.integers(1, 300),
    st.dictionaries(st.sampled_from(device_names()), st.floats(0.01, 100), min_size=1),
    st.dictionaries(st.sampled_from(network_names()), st.floats(0.01, 100), min_size=1),
    st.integers(0, 2**63 - 1),
)
def test_any_fleet_consists_of_valid_profiles_of_the_named_kinds(
    count: int, kinds: dict[str, float], networks: dict[str, float], seed: int
) -> None:
    fleet = draw_fleet(count, kinds, networks, seed)
    assert fleet.profiles.shape == (count,)
    assert fleet.profiles.dtype == PROFILE
    check_profiles(fleet.profiles)
    assert set(fleet.device_names) <= set(kinds)
    assert set(fleet.network_names) <= set(networks)
    assert sum(fleet.basis.values()) == len(fleet) == count


def test_the_same_seed_gives_the_same_fleet_and_another_seed_another() -> None:
    mix = dict.fromkeys(device_names(), 1.0), dict.fromkeys(network_names(), 1.0)
    first, again, other = (draw_fleet(50, *mix, seed=seed) for seed in (7, 7, 8))
    assert np.array_equal(first.profiles, again.profiles)
    assert first.device_names == again.device_names
    assert not np.array_equal(first.profiles, other.profiles)


def test_a_larger_fleet_begins_with_the_smaller_one() -> None:
    mix = dict.fromkeys(device_names(), 1.0), dict.fromkeys(network_names(), 1.0)
    small, large = draw_fleet(20, *mix, seed=3), draw_fleet(200, *mix, seed=3)
    assert np.array_equal(large.profiles[:20], small.profiles)
    assert large.device_names[:20] == small.device_names


def test_the_order_of_the_shares_does_not_matter() -> None:
    kinds = {"pixel-8": 1.0, "iphone-x": 2.0, "pixel-3": 3.0}
    backwards = dict(reversed(kinds.items()))
    one, two = (draw_fleet(100, shares, ONE_NETWORK, seed=1) for shares in (kinds, backwards))
    assert one.device_names == two.device_names


def test_shares_are_weights() -> None:
    fleet = draw_fleet(20_000, {"pixel-8": 3, "pixel-3": 1}, ONE_NETWORK, seed=1)
    assert fleet.device_names.count("pixel-8") / 20_000 == pytest.approx(0.75, abs=0.01)


def test_the_percentiles_of_a_fleet_are_those_of_the_measured_households() -> None:
    network = load_network("uk-ftth")
    rates = draw_fleet(20_000, ONE_DEVICE, ONE_NETWORK, seed=1).profiles["up_bps"]
    expected = [network.up.p10, network.up.p50, network.up.p90]
    assert np.percentile(rates, [10, 50, 90]) == pytest.approx(expected, rel=0.05)


def test_a_line_with_a_fast_downlink_has_a_fast_uplink() -> None:
    profiles = draw_fleet(500, ONE_DEVICE, ONE_NETWORK, seed=1).profiles
    assert np.array_equal(np.argsort(profiles["down_bps"]), np.argsort(profiles["up_bps"]))


def test_if_only_the_median_is_known_every_household_has_it() -> None:
    profiles = draw_fleet(100, ONE_DEVICE, {"us-cable-cox": 1.0}, seed=1).profiles
    assert profiles["down_bps"] == pytest.approx(load_network("us-cable-cox").down.p50)


def test_latency_is_half_a_round_trip_and_memory_is_what_the_owner_lends() -> None:
    profile = draw_fleet(1, ONE_DEVICE, ONE_NETWORK, seed=1).profiles[0]
    assert profile["latency_s"] == load_network("uk-ftth").rtt_s / 2
    assert profile["memory_bytes"] == load_device("pixel-8").budget_bytes


@pytest.mark.parametrize("shares", [{}, {"pixel-8": 0.0}, {"pixel-8": float("nan")}, {"pixel-88": 1.0}])
def test_invalid_shares_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"share|unknown device"):
        draw_fleet(10, shares, ONE_NETWORK, seed=1)


def test_an_empty_fleet_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 device"):
        draw_fleet(0, ONE_DEVICE, ONE_NETWORK, seed=1)


@settings(deadline=None)
@given(st.sampled_from(sorted(UNIFORM)), st.integers(1, 300), st.integers(0, 2**63 - 1), st.floats(0.001, 1.0))
def test_any_uniform_fleet_lies_within_its_ranges(name: str, count: int, seed: int, share: float) -> None:
    profiles = uniform_fleet(name, count, seed, share)
    check_profiles(profiles)
    assert len(profiles) == count
    units = {"flops": 1e12, "down_bps": 8e6 * share, "up_bps": 8e6 * share}
    for column, key in (("flops", "flops"), ("down_bps", "down"), ("up_bps", "up")):
        low, high = UNIFORM[name][key]
        assert (profiles[column] >= low * units[column] * (1 - 1e-9)).all()
        assert (profiles[column] <= high * units[column] * (1 + 1e-9)).all()


def test_the_same_seed_gives_the_same_uniform_fleet_and_another_seed_another() -> None:
    first, again, other = (uniform_fleet("paper", 50, seed) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_share_of_the_line_slows_a_uniform_fleet_in_both_directions_and_changes_nothing_else() -> None:
    whole, part = uniform_fleet("extreme", 50, seed=1), uniform_fleet("extreme", 50, seed=1, line_share=0.1)
    for column in PROFILE.names or ():
        factor = 0.1 if column in ("down_bps", "up_bps") else 1.0
        assert part[column] == pytest.approx(factor * whole[column])


def test_a_uniform_fleet_without_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 device"):
        uniform_fleet("paper", 0, seed=1)


def test_four_thousand_devices_are_drawn_quickly() -> None:
    mix = dict.fromkeys(device_names(), 1.0), dict.fromkeys(network_names(), 1.0)
    draw_fleet(1, *mix, seed=1)  # reads the files
    seconds = []
    for _ in range(3):  # best of three: the machine may be busy
        start = time.perf_counter()
        draw_fleet(4000, *mix, seed=1)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1
