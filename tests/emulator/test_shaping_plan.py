"""Promises of emulator.links.shaping_plan: the kernel's settings for the requested links. No kernel is needed."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from ipaddress import IPv4Address

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.links.follow import WINDOW_S, rate_bps
from emulator.links.rate_trace import RateTrace
from emulator.links.shaping_plan import (
    BURST_S,
    FIRST_CLASS,
    FRAME_BYTES,
    HEADER_SHARE,
    LAST_CLASS,
    LEAST_BPS,
    LUMP_S,
    MOST_SEGMENTS,
    PodLinks,
    ShapingPlanError,
    Way,
    addresses,
    classifier,
    commands,
    make_plan,
)
from emulator.model.link import LinkSpec

PLAIN = LinkSpec(20e6, 1e6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
FULL = LinkSpec(20e6, 1e6, 0.03, 0.02, 0.005, 0.002, 0.01, 0.002, 250e3, 12e3)


@st.composite
def specs(draw: st.DrawFn) -> LinkSpec:
    rates = st.floats(LEAST_BPS, 1e10)
    delays = draw(st.tuples(st.floats(0, 10), st.floats(0, 10)))
    jitters = [delay * draw(st.floats(0, 1)) for delay in delays]
    losses, buffers = st.floats(0, 0.5), st.floats(0, 1e7)
    figures = [draw(rates), draw(rates), *delays, *jitters, draw(losses), draw(losses), draw(buffers), draw(buffers)]
    return LinkSpec(*figures)


@st.composite
def pods(draw: st.DrawFn) -> PodLinks:
    fleet = draw(st.lists(specs(), min_size=1, max_size=8))
    numbers = draw(
        st.lists(st.integers(FIRST_CLASS, LAST_CLASS), min_size=len(fleet), max_size=len(fleet), unique=True)
    )
    devices = tuple((str(IPv4Address((10 << 24 | 9 << 16) + n)), spec) for n, spec in zip(numbers, fleet, strict=True))
    return PodLinks("eth0", devices, 4711, "10.9.0.0/16")


# ---- classes and leaves


@given(pods(), st.booleans())
def test_every_device_has_its_own_class_per_direction_whose_rate_leaves_the_requested_goodput(
    pod: PodLinks, netem: bool
) -> None:
    plan = make_plan(pod, netem)
    for way, side in (("up", plan.up), ("down", plan.down)):
        by_minor = {one.minor: one for one in side.classes}
        assert len(by_minor) == len(pod.devices)
        for address, spec in pod.devices:
            one = by_minor[int(IPv4Address(address)) & 0xFFFF]
            asked_bps = getattr(spec, f"rate_{way}_bps")
            assert abs(8 * one.rate_bytes_s * HEADER_SHARE - asked_bps) <= 8  # whole bytes per second
            assert one.burst_bytes >= FRAME_BYTES  # the least that can send a full frame
            assert one.burst_bytes - FRAME_BYTES <= BURST_S * one.rate_bytes_s


@given(pods())
def test_netem_gets_delay_jitter_loss_and_room_for_all_packets_in_flight(pod: PodLinks) -> None:
    plan = make_plan(pod, netem=True)
    assert plan.in_user_space == ()
    for way, side in (("up", plan.up), ("down", plan.down)):
        leaves = {one.minor: one for one in side.classes}
        for address, spec in pod.devices:
            one = leaves[int(IPv4Address(address)) & 0xFFFF]
            asked = tuple(getattr(spec, f"{name}_{way}{unit}") for name, unit in (("delay", "_s"), ("jitter", "_s")))
            loss = getattr(spec, f"loss_{way}")
            if one.leaf is None:
                assert (*asked, loss) == (0.0, 0.0, 0.0)
                continue
            assert (one.leaf.delay_s, one.leaf.jitter_s, one.leaf.loss) == (*asked, loss)
            assert one.leaf.limit_packets * FRAME_BYTES >= one.rate_bytes_s * sum(asked)
            assert bool(one.leaf.rate_bytes_s) == bool(asked[1])  # no packet overtakes another
            assert not one.queue_bytes


@given(pods())
def test_without_netem_everything_but_the_rate_is_named_as_left_to_user_space(pod: PodLinks) -> None:
    plan = make_plan(pod, netem=False)
    assert all(one.leaf is None for side in (plan.up, plan.down) for one in side.classes)
    for name, keys in {
        "latency": ("delay_down_s", "delay_up_s"),
        "jitter": ("jitter_down_s", "jitter_up_s"),
        "loss": ("loss_down", "loss_up"),
    }.items():
        asked = any(getattr(spec, key) for _, spec in pod.devices for key in keys)
        assert (name in plan.in_user_space) == asked


@given(pods(), st.booleans())
def test_no_segment_takes_long_on_the_slowest_link(pod: PodLinks, netem: bool) -> None:
    plan = make_plan(pod, netem)
    for side in (plan.up, plan.down):
        slowest = min(one.rate_bytes_s for one in side.classes)
        assert 1 <= side.segments <= MOST_SEGMENTS
        assert side.segments == 1 or side.segments * FRAME_BYTES / slowest <= LUMP_S
        if any(one.leaf and one.leaf.loss for one in side.classes):
            assert side.segments == 1  # loss is a share of packets, not of segments


@given(pods())
def test_a_full_queue_takes_acknowledgements_and_tcp_waits_for_the_slowest_line(pod: PodLinks) -> None:
    plan = make_plan(pod, netem=False)
    assert all(one.queue_bytes % FRAME_BYTES == FRAME_BYTES - 1 for one in plan.down.classes)
    slowest = min(one.rate_bytes_s for one in plan.up.classes)
    assert plan.patience_s >= min(30.0, 10 * FRAME_BYTES / slowest)


# ---- the classifier


def run_classifier(program: list[tuple[int, int, int, int]], packet: bytes) -> int:
    """The part of classic BPF that is used; offsets count from the IP header."""
    a = x = at = 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        match code:
            case 0x20 | 0x28 | 0x30:
                size = {0x20: 4, 0x28: 2, 0x30: 1}[code]
                begin = k - 0xFFF00000
                if begin + size > len(packet):
                    return 0  # the kernel ends the program there
                a = int.from_bytes(packet[begin : begin + size], "big")
            case 0x54:
                a &= k
            case 0x44:
                a |= k
            case 0x64:
                a = a << k & 0xFFFFFFFF
            case 0x74:
                a >>= k
            case 0x04:
                a = a + k & 0xFFFFFFFF
            case 0x1C:
                a = a - x & 0xFFFFFFFF
            case 0x15:
                at += yes if a == k else no
            case 0x07:
                x = a
            case 0x16:
                return a
            case 0x06:
                return k
            case _:
                raise AssertionError(f"operation {code:#x} is not known here")


def packet(
    source: int, destination: int, protocol: int, payload: int, flags: int = 0x10, options: int = 12, ip_words: int = 5
) -> bytes:
    transport = 20 + options if protocol == 6 else 8
    length = 4 * ip_words + transport + payload
    ip = struct.pack("!BBHHHBBHII", 0x40 | ip_words, 0, length, 1, 0, 64, protocol, 0, source, destination)
    ip += bytes(4 * (ip_words - 5))
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 3, 4, (20 + options) // 4 << 4, flags, 100, 0, 0) + bytes(options)
    return ip + (tcp if protocol == 6 else bytes(8)) + bytes(payload)


HERE = 10 << 24 | 9 << 16
hosts = st.integers(0, 2**32 - 1)


@given(
    st.sampled_from(["up", "down"]),
    st.integers(FIRST_CLASS, LAST_CLASS),
    hosts,
    st.sampled_from([1, 6, 17]),
    st.integers(0, 1400),
    st.integers(0, 255),
    st.sampled_from([0, 12, 20, 40]),
)
def test_a_devices_packets_find_its_class_and_only_bare_acknowledgements_bypass_it(
    way: Way, minor: int, other: int, protocol: int, payload: int, flags: int, options: int
) -> None:
    mine = HERE | minor
    source, destination = (mine, other) if way == "up" else (other, mine)
    found = run_classifier(classifier(way, HERE >> 16), packet(source, destination, protocol, payload, flags, options))
    bare = protocol == 6 and payload == 0 and not flags & 0x07
    assert found == (0 if bare and way == "up" else 0x10000 | minor)


@given(st.sampled_from(["up", "down"]), hosts, hosts, st.integers(1, 1400))
def test_packets_of_no_device_have_no_class(way: Way, source: int, destination: int, payload: int) -> None:
    mine = source if way == "up" else destination
    found = run_classifier(classifier(way, HERE >> 16), packet(source, destination, 6, payload))
    assert found == (0x10000 | mine & 0xFFFF if mine >> 16 == HERE >> 16 else 0)


def test_a_packet_with_ip_options_is_never_taken_for_an_acknowledgement() -> None:
    odd = packet(HERE | 5, 1, 6, 0, ip_words=6)
    assert run_classifier(classifier("up", HERE >> 16), odd) == 0x10005


# ---- addresses and refusals


def test_devices_get_the_first_addresses_that_can_be_classes() -> None:
    assert addresses("10.9.0.0/16", 3) == ["10.9.0.2", "10.9.0.3", "10.9.0.4"]
    assert addresses("10.9.32.0/20", 1) == ["10.9.32.2"]
    assert len(addresses("10.9.0.0/16", 65_533)) == 65_533
    plan = make_plan(PodLinks("eth0", tuple((a, PLAIN) for a in addresses("10.9.0.0/16", 3000))), netem=False)
    assert len({one.minor for one in plan.up.classes}) == 3000


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        (PodLinks("eth0", ()), "no device"),
        (PodLinks("eth0", (("10.9.0.2", PLAIN), ("10.9.0.2", PLAIN))), "two devices"),
        (PodLinks("eth0", (("10.9.0.2", PLAIN), ("10.10.0.3", PLAIN))), "take more pods"),
        (PodLinks("eth0", (("10.9.0.1", PLAIN),)), "cannot be a device's"),
        (PodLinks("eth0", (("10.9.0.2", PLAIN),), prefix="10.8.0.0/16"), "not in 10.8.0.0/16"),
        (PodLinks("eth0", (("10.9.0.2", PLAIN),), prefix="10.0.0.0/8"), "65,533 classes"),
        (PodLinks("eth0", (("fe80::2", PLAIN),)), "no IPv4 address"),
        (PodLinks("eth0", (("10.9.0.2", replace(PLAIN, rate_up_bps=10.0)),)), 'links.kind = "model"'),
        (PodLinks("eth0", (("10.9.0.2", replace(PLAIN, jitter_up_s=0.1)),)), "jitter may not be more"),
        (PodLinks("eth0", (("10.9.0.2", replace(PLAIN, loss_down=1.0)),)), "it must be a share"),
        (PodLinks("eth0", (("10.9.0.2", replace(PLAIN, rate_down_bps=float("nan"))),)), "below what the kernel"),
    ],
)
def test_settings_that_a_kernel_cannot_provide_are_refused_in_one_line(pod: PodLinks, says: str) -> None:
    with pytest.raises(ShapingPlanError, match=re.escape(says)) as caught:
        make_plan(pod, netem=True)
    assert "\n" not in str(caught.value)


def test_more_devices_than_classes_are_refused_with_advice() -> None:
    with pytest.raises(ShapingPlanError, match=r"65,533 devices, 70,000 are asked for; take more pods .* links.kind"):
        addresses("10.9.0.0/16", 70_000)


# ---- traces


@pytest.mark.slow
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.floats(0, 100), st.floats(1e5, 1e8))
def test_over_a_whole_trace_the_followed_rate_equals_the_lines_own(
    gaps_ms: list[int], offset_s: float, mean_bps: float
) -> None:
    """The trace is repeated until it fits into a whole number of windows."""
    trace = RateTrace(np.cumsum(gaps_ms))
    windows = 2 * int(trace.at_ms[-1])  # of half a second: as many seconds as the trace has milliseconds
    followed = [rate_bps(trace, mean_bps, offset_s + WINDOW_S * i) for i in range(min(windows, 2000))]
    if windows <= 2000:
        assert np.mean(followed) == pytest.approx(mean_bps, rel=0.02, abs=LEAST_BPS)
    assert min(followed) >= LEAST_BPS


# ---- text


@pytest.mark.slow
@given(pods())
def test_a_pods_links_survive_json(pod: PodLinks) -> None:
    assert PodLinks.from_json(json.loads(json.dumps(pod.to_json()))) == pod


@pytest.mark.parametrize("told", [{}, {"interface": "eth0"}, {"interface": "eth0", "devices": [], "speed": 1}])
def test_inconsistent_json_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(ShapingPlanError):
        PodLinks.from_json(told)


def test_a_dry_run_prints_every_command_with_its_figures() -> None:
    pod = PodLinks("eth0", (("10.9.0.2", FULL),), 4711, "10.9.0.0/16", None, "veth7", "172.18.0.2")
    lines = commands(make_plan(pod, netem=True))
    assert lines[:4] == [
        "nsenter -t 4711 -n ip route add local 10.9.0.0/16 dev lo",
        "ip route add 10.9.0.0/16 via 172.18.0.2 rto_min 200ms congctl cubic",
        "nsenter -t 4711 -n sysctl -w net.ipv4.tcp_limit_output_bytes=4096",
        "nsenter -t 4711 -n sysctl -w net.ipv4.tcp_congestion_control=cubic",
    ]
    rate = 8 * round(1e6 / 8 / HEADER_SHARE)
    assert any(f"-n tc class add dev eth0 parent 1: classid 1:2 htb rate {rate}bit burst " in line for line in lines)
    assert any(
        line.startswith("tc qdisc add dev veth7 parent 1:2 handle 2: netem delay 30ms 5ms loss 1%") for line in lines
    )


def test_a_device_with_its_interfaces_address_has_its_own_route() -> None:
    pod = PodLinks("eth0", (("10.9.0.2", FULL),), 4711, None, None, "veth7")
    assert commands(make_plan(pod, netem=False))[0] == (
        "ip route add 10.9.0.2 dev $(bridge of veth7) rto_min 200ms congctl cubic"
    )
