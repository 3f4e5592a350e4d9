"""Promises of emulator.links.rate_trace: throughput follows the trace, in the model and through a real pod; a bad file
gets one clear line."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    BLOCK,
    OUTER_MAJOR,
    PIECE,
    Heartbeat,
    Join,
    Message,
    Result,
    Welcome,
    Work,
    decode,
    encode,
)
from emulator.links.rate_trace import (
    PACKET_BYTES,
    LinkTrace,
    LinkTraceError,
    RateTrace,
    read_link_trace,
    read_rate_trace,
)
from emulator.model.fleet import Fleet, draw_fleet
from emulator.model.link import LINK, MOST_REPETITIONS, Lines, Links, device_keys, plain_links
from testbed.launch.processes import Pods

WINDOW_S = 10.0
LIMIT_S = 30.0


def made(rates_mbps: list[float], each_ms: int, seed: int = 1) -> RateTrace:
    """Periods of these mean rates, with packets at random milliseconds."""
    rng, at_ms = np.random.default_rng(seed), []
    for number, rate in enumerate(rates_mbps):
        packets = round(rate * 1e3 * each_ms / 8 / PACKET_BYTES)
        at_ms.append(np.sort(rng.integers(each_ms * number, each_ms * (number + 1), packets)))
    return RateTrace(np.append(np.concatenate(at_ms), each_ms * len(rates_mbps)))


MADE = {
    "steps": made([1, 20, 5, 0.5, 12], 10_000),
    "outage": made([8, 0.3, 8], 15_000),
    "short": made([3, 30], 500),
    "steady": RateTrace(np.arange(1, 1001)),
}
traces = st.lists(st.integers(0, 400), min_size=1, max_size=40).map(
    lambda gaps: RateTrace(np.append(np.cumsum(gaps), sum(gaps) + 1))
)


# ---- the function and its inverse


@given(traces, st.lists(st.floats(0, 1e4), min_size=1, max_size=20))
def test_passed_counts_the_opportunities_one_by_one(trace: RateTrace, moments: list[float]) -> None:
    times = trace.at_ms.tolist()
    length = times[-1]
    found = trace.passed(np.array(moments) / 1e3)
    for at_ms, count in zip((1e3 * (np.array(moments) / 1e3)).tolist(), found.tolist(), strict=True):
        rounds, rest = divmod(at_ms, length)
        assert count == rounds * len(times) + sum(t < rest for t in times)


@given(traces, st.integers(1, 500))
def test_packets_have_passed_just_after_their_moment_and_not_before(trace: RateTrace, packets: int) -> None:
    moment_s = trace.moment(np.array([float(packets)]))
    assert trace.passed(moment_s + 1e-6)[0] >= packets
    assert trace.passed(np.maximum(moment_s - 1e-6, 0.0))[0] < packets


@given(traces, st.floats(0.01, 100), st.floats(0.01, 100))
def test_parts_of_a_packet_end_with_it_and_more_bytes_never_end_earlier(
    trace: RateTrace, one: float, two: float
) -> None:
    first, both = trace.moment(np.array([one, one + two]))
    assert first <= both
    assert first == trace.moment(np.ceil(np.array([one - 1e-6])))[0]


def test_the_mean_and_the_windows_match_a_hand_calculation() -> None:
    trace = RateTrace(np.array([0, 0, 500, 1000, 1500, 2000]))
    assert trace.length_s == 2.0
    assert trace.mean_bps == 6 * 12_000 / 2
    assert trace.rates_bps(1.0).tolist() == [4 * 12_000, 2 * 12_000]
    assert trace.rates_bps(60.0).tolist() == [trace.mean_bps]


# ---- throughput follows the trace


def achieved_bps(
    trace: RateTrace, share: float, offset_s: float, sizes: NDArray[np.int64], way: str = "down"
) -> NDArray[np.float64]:
    """Throughput of one device that is never idle, per window of its time."""
    table = np.zeros(1, LINK)
    table["offset_s"], table["key"] = offset_s, device_keys(1, np.arange(1))
    lines, one, rate = Lines(Links(table, (LinkTrace(trace, trace),))), np.array([0]), share * trace.mean_bps
    arrived = [
        float(getattr(lines, way).send(one, np.zeros(1), np.array([size]), np.array([rate]), np.zeros(1))[0])
        for size in sizes
    ]
    assert arrived == sorted(arrived)
    edges = np.arange(0.0, arrived[-1], WINDOW_S)
    done = np.concatenate([[0], np.cumsum(sizes)])[np.searchsorted(arrived, edges, side="right")]
    return 8 * np.diff(done) / WINDOW_S


def check_windows(trace: RateTrace, share: float, offset_s: float, way: str = "down") -> int:
    """Throughput is within 5% in every window; returns the number of windows. Messages are small enough to count in
    their window."""
    rng = np.random.default_rng(3)
    slowest_bps = share * trace.rates_bps(WINDOW_S).min()
    largest = int(0.02 * slowest_bps * WINDOW_S / 8)
    span_s = max(1.3 * trace.length_s, 4.5 * WINDOW_S)
    count = int(share * trace.mean_bps * span_s / 8 / (largest / 2))
    found = achieved_bps(trace, share, offset_s, rng.integers(1, largest, count), way)
    edges = np.array([offset_s + WINDOW_S * number for number in range(len(found) + 1)])
    asked = share * 8 * PACKET_BYTES * np.diff(trace.passed(edges)) / WINDOW_S
    packet_bps = share * 8 * PACKET_BYTES / WINDOW_S  # one packet may fall on either side of an edge
    assert (np.abs(found - asked) <= 0.05 * asked + packet_bps).all(), (found / asked).round(3)
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.02])
@pytest.mark.parametrize("name", sorted(MADE))
def test_throughput_follows_a_made_trace_within_5_percent_in_every_10_seconds(name: str, share: float) -> None:
    assert check_windows(MADE[name], share, offset_s=3.21) >= 3


# Megabit per second: median of the seconds and e-fold, as of a phone in a car on LTE; the slow direction has outages.
DRIVING = {"down": (3.74, 0.9), "up": (1.57, 1.0)}
SECONDS = 130


def second_rates(way: str, seed: int) -> NDArray[np.int64]:
    """Packets per second: a rate that wanders, like that of a moving phone."""
    median, spread = DRIVING[way]
    rng, wander = np.random.default_rng([seed, len(way)]), np.zeros(SECONDS)
    for second in range(1, SECONDS):
        wander[second] = 0.9 * wander[second - 1] + np.sqrt(1 - 0.9**2) * rng.normal()
    rates_bps = 1e6 * median * np.exp(spread * wander)
    return np.maximum(1, np.rint(rates_bps / 8 / PACKET_BYTES)).astype(np.int64)


def written_link(folder: Path, seed: int) -> Path:
    """Both directions as files, packets in bursts within their second."""
    rng = np.random.default_rng(seed)
    for way in DRIVING:
        bursts = [np.sort(rng.integers(0, 200, n) * 5 + 1000 * s) for s, n in enumerate(second_rates(way, seed))]
        at_ms = np.append(np.concatenate(bursts), 1000 * SECONDS)
        (folder / f"phone.{way}.gz").write_bytes(gzip.compress("\n".join(map(str, at_ms.tolist())).encode()))
    return folder / "phone"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("seed", [1, 2])
def test_throughput_follows_a_trace_from_files_within_5_percent_in_every_10_seconds(
    tmp_path: Path, seed: int, way: str
) -> None:
    trace: RateTrace = getattr(read_link_trace(str(written_link(tmp_path, seed))), way)
    assert check_windows(trace, 1.0, offset_s=17.0, way=way) >= 12  # the whole trace, and its beginning again


def test_a_trace_read_from_files_has_the_percentiles_that_were_written(tmp_path: Path) -> None:
    link = read_link_trace(str(written_link(tmp_path, seed=1)))
    for way, trace in (("down", link.down), ("up", link.up)):
        written_bps = 8 * PACKET_BYTES * second_rates(way, seed=1)
        found = np.percentile(trace.rates_bps(1.0), [10, 50, 90])
        assert found == pytest.approx(np.percentile(written_bps, [10, 50, 90]), rel=0.01)


def test_devices_of_a_traced_network_report_its_mean_and_begin_at_different_places() -> None:
    trace = LinkTrace(MADE["steps"], MADE["short"])
    networks = {"us-verizon-4g-lte": 1.0, "uk-ftth": 1.0}
    fleet = draw_fleet(40, {"pixel-8": 1}, networks, seed=1, line_share=0.1, traces={"us-verizon-4g-lte": trace})
    assert fleet.links is not None
    traced = np.array([name == "us-verizon-4g-lte" for name in fleet.network_names])
    assert ((fleet.links.table["trace"] == 0) == traced).all()
    assert fleet.profiles["down_bps"][traced] == pytest.approx(0.1 * MADE["steps"].mean_bps)
    assert fleet.profiles["up_bps"][traced] == pytest.approx(0.1 * MADE["short"].mean_bps)
    offsets_s = fleet.links.table["offset_s"]
    assert len(set(offsets_s[traced].tolist())) == traced.sum()
    assert ((offsets_s >= 0) & (offsets_s < 50.0)).all()
    without = draw_fleet(40, {"pixel-8": 1}, networks, seed=1, line_share=0.1)
    assert (fleet.profiles[~traced] == without.profiles[~traced]).all()


# ---- a real pod


@pytest.mark.slow
def test_answers_of_a_pod_are_due_when_its_changing_line_has_carried_them() -> None:
    """Over real sockets. Every block downloads 5 kB over a line of 8, 80 and 16 Mbit/s, half a second each. The test
    compares the due times that the pod reports, so a busy machine changes nothing."""
    window_s, packets = 0.5, (333, 3333, 667)
    at_ms = [np.sort(500 * number + np.arange(count) % 500) for number, count in enumerate(packets)]
    trace = RateTrace(np.append(np.concatenate(at_ms), 1500))
    fast = RateTrace(np.arange(1, 101).repeat(100))
    table = np.zeros(1, LINK)
    profile = Profile(1e12, 0.0, trace.mean_bps, fast.mean_bps, 0.001, 1 << 30, 4)
    fleet = Fleet(pack_profiles([profile]), ["phone"], ["line"], {}, Links(table, (LinkTrace(trace, fast),)))
    size, count = 5_000, 1400
    due_s = talk(fleet, 1, size, count)["phone/line/0"]
    moments_s = trace.moment(size * np.arange(1, count + 1) / PACKET_BYTES)  # by hand: nothing else takes time
    assert np.diff(due_s) == pytest.approx(np.diff(moments_s), abs=0.0011)  # the fast uplink's millisecond
    assert due_s[0] == pytest.approx(moments_s[0] + 0.002, abs=0.0011)
    windows = np.arange(0.0, moments_s[-1], window_s)
    done_bytes = size * np.diff(np.searchsorted(due_s - 0.002, windows, side="right"))
    assert done_bytes == pytest.approx(PACKET_BYTES * np.diff(trace.passed(windows)), rel=0.05)
    assert len(done_bytes) == 3


def test_every_pod_gets_the_links_of_its_own_devices() -> None:
    """Three devices on two pods; the second device loses nearly every packet, and is late by all repetitions."""
    profile, links = Profile(1e12, 0.0, 1e9, 1e9, 0.005, 1 << 30, 4), plain_links(3)
    links.table["loss_down"] = [0.0, 1 - 1e-9, 0.0]
    fleet = Fleet(pack_profiles([profile] * 3), ["phone"] * 3, ["line"] * 3, {}, links)
    due_s = talk(fleet, 2, size=1000, count=1)
    lossy_s = due_s.pop("phone/line/1")
    assert lossy_s[0] == pytest.approx(0.01 + MOST_REPETITIONS * 0.01, abs=0.001)
    assert list(due_s) == ["phone/line/0", "phone/line/2"]
    assert np.concatenate(list(due_s.values())) == pytest.approx([0.01, 0.01], abs=0.001)


def test_a_pod_delays_answers_behind_downloads_that_fill_the_line() -> None:
    """Three blocks arrive one after the other, in 125 ms each: all answers but the last meet a full buffer."""
    profile, links = Profile(1e12, 0.0, 8e6, 1e9, 0.005, 1 << 30, 4), plain_links(1)
    links.table["queue_down_s"] = 0.05
    fleet = Fleet(pack_profiles([profile]), ["phone"], ["line"], {}, links)
    ((_, due_s),) = talk(fleet, 1, size=125_000, count=3).items()
    assert due_s == pytest.approx([0.135 + 0.05, 0.26 + 0.05, 0.385], abs=0.001)


def talk(fleet: Fleet, pods: int, size: int, count: int) -> dict[str, NDArray[np.float64]]:
    """Send each device `count` blocks of `size` bytes at once, from a server that the test plays. Returns, per label,
    how long after that its answers were due, in order."""
    joined: dict[bytes, list[str]] = {}
    stamp_ns: dict[bytes, int] = {}
    due: dict[str, list[float]] = {label: [] for label in fleet.labels}
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def send(to: bytes, message: Message) -> None:
            router.send_multipart([to, *(bytes(frame) for frame in encode(message))])

        with Pods(fleet, pods, f"tcp://127.0.0.1:{port}", "model") as processes:
            deadline = time.monotonic() + LIMIT_S
            while any(len(answers) < count for answers in due.values()):
                assert time.monotonic() < deadline, f"not all answers came: {due}"
                for each in joined:
                    send(each, Heartbeat())
                if not router.poll(20):
                    processes.check()
                    continue
                identity, *frames = router.recv_multipart()
                match decode(frames):
                    case Join(labels=labels):
                        joined[identity], stamp_ns[identity] = labels, time.monotonic_ns()
                        send(identity, Welcome(1.0, "test"))
                        send(identity, _work(stamp_ns[identity], len(labels), size, count))
                    case Result(answers=answers):
                        for device, at_ns in zip(answers["device"].tolist(), answers["due_ns"].tolist(), strict=True):
                            due[joined[identity][device]].append((at_ns - stamp_ns[identity]) / 1e9)
            processes.end()
    return {label: np.sort(answers) for label, answers in due.items()}


def _work(stamp_ns: int, devices: int, size: int, count: int) -> Work:
    cell = np.ones(1, np.float32).tobytes()
    pieces = [(0, OUTER_MAJOR, 1, 1, 1), (1, OUTER_MAJOR, 1, 1, 1)]
    keys = [(device, number) for number in range(count) for device in range(devices)]
    blocks = [(device, 0, block, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1, size) for block, (device, _) in enumerate(keys)]
    return Work(
        stamp_ns, np.empty(0, np.uint32), np.array(pieces, dtype=PIECE), np.array(blocks, dtype=BLOCK), [cell, cell]
    )


# ---- files


def test_plain_and_compressed_files_are_equal_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.down").write_bytes(b"0\r\n5\r\n5\r\n10\r\n")
    (tmp_path / "a.up.gz").write_bytes(gzip.compress(b"0\n5\n5\n10"))
    link = read_link_trace(str(tmp_path / "a"))
    assert link.down.at_ms.tolist() == link.up.at_ms.tolist() == [0, 5, 5, 10]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "x.down: it is empty; write one integer per line"),
        (b"\n", "x.down: it is empty"),
        (b"1\n2\nfast\n", 'x.down, line 3: "fast" is not an integer; write one per line'),
        (b"1\n2.5\n", 'x.down, line 2: "2.5" is not an integer'),
        (b"1\n\n3\n", 'x.down, line 2: "" is not an integer'),
        (b"1\n" + b"9" * 30 + b"\n", "x.down, line 2"),
        (b"1\n" + b"9" * 22 + b"\n", "x.down, line 2"),
        (b"1\n5\n4\n9\n", "x.down, line 3: 4 comes after 5; the milliseconds must not fall"),
        (b"-5\n4\n", "x.down, line 1: -5 is negative"),
        (b"0\n0\n", "x.down, line 2: the trace ends at millisecond 0"),
        (b"1\n99999999999\n", "x.down, line 2: the trace ends at millisecond 99999999999"),
        (b"\xff\xfe1\n", "x.down, line 1"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "x.down").write_bytes(data)
    (tmp_path / "x.up").write_bytes(b"1\n")
    with pytest.raises(LinkTraceError) as raised:
        read_link_trace(str(tmp_path / "x"))
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_files_and_a_missing_direction_have_different_messages(tmp_path: Path) -> None:
    prefix = str(tmp_path / "x")
    with pytest.raises(LinkTraceError, match=r"there is neither .*x\.down nor .*x\.up, nor the same with \.gz"):
        read_link_trace(prefix)
    (tmp_path / "x.up.gz").write_bytes(gzip.compress(b"1\n"))
    with pytest.raises(LinkTraceError, match=r"there is x\.up\.gz but no x\.down; a link needs both directions"):
        read_link_trace(prefix)


def test_a_compressed_file_that_is_not_or_is_cut_short_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.down.gz"
    for data in (b"1\n2\n", gzip.compress(b"1\n2\n" * 100)[:-12]):
        path.write_bytes(data)
        with pytest.raises(LinkTraceError, match="cannot be unpacked"):
            read_rate_trace(path)
