"""Promises of emulator.model.link: effects of real lines are seeded, only ever add time, keep the order, and vanish
where a line has none."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from emulator.links.rate_trace import LinkTrace, RateTrace
from emulator.model.device import Devices
from emulator.model.fleet import draw_fleet
from emulator.model.link import (
    LINK,
    MOST_REPETITIONS,
    NO_TRACE,
    Lines,
    Links,
    LinkSpec,
    device_keys,
    link_specs,
    links_from_json,
    links_to_json,
    plain_links,
    repetitions,
    uniforms,
)
from emulator.model.zoo import load_network

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test
Floats = NDArray[np.float64]

PROFILES = pack_profiles(
    [
        Profile(1e9, 1e-3, 8e6, 1e6, 0.02, 1 << 30, 4),
        Profile(1e10, 0.0, 1e8, 2e7, 0.005, 1 << 30, 4),
        Profile(1e8, 1e-2, 1e6, 1e6, 0.0, 1 << 30, 4),
    ]
)
STEADY = RateTrace(np.arange(1, 101))  # 12 Mbit/s
BURSTY = RateTrace(np.array([0, 0, 0, 5, 90, 91, 91, 400]))


def links(**figures: float) -> Links:
    """Links of the three devices, all with these figures; traces 0 and 1 exist."""
    table = np.zeros(len(PROFILES), LINK)
    table["trace"] = NO_TRACE
    table["key"] = device_keys(1, np.arange(len(table)))
    for name, value in figures.items():
        table[name] = value
    return Links(table, (LinkTrace(STEADY, BURSTY), LinkTrace(BURSTY, STEADY)))


figures = st.fixed_dictionaries(
    {
        "jitter_down_s": st.sampled_from([0.0, 0.001, 0.1]),
        "jitter_up_s": st.sampled_from([0.0, 0.002, 0.1]),
        "loss_down": st.sampled_from([0.0, 0.001, 0.3]),
        "loss_up": st.sampled_from([0.0, 0.001, 0.3]),
        "queue_down_s": st.sampled_from([0.0, 0.05, 1.0]),
        "queue_up_s": st.sampled_from([0.0, 0.05, 1.0]),
        "trace": st.sampled_from([NO_TRACE, 0, 1]),
        "offset_s": st.floats(0, 0.4),
    }
)
constant = figures.map(lambda given: given | {"trace": NO_TRACE})
blocks = st.lists(
    st.tuples(st.integers(0, len(PROFILES) - 1), st.integers(1, 200_000), st.floats(1, 1e7), st.integers(0, 100_000)),
    min_size=1,
    max_size=12,
)
calls = st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.3, 50.0]), blocks), min_size=1, max_size=4)
Calls = list[tuple[float, list[tuple[int, int, float, int]]]]


def schedule(
    of: Links | None,
    asked: Calls,
    only: int | None = None,
    most: int = 1000,
    in_time: bool = False,
) -> list[list[float]]:
    """Arrival times of each device's answers; `only` of one device, at most `most` blocks per call. Delays by downloads
    are computed at the end or, with `in_time`, before anything is sent after their due time."""
    devices, now_s = Devices(PROFILES, of), 0.0
    due: list[list[float]] = [[] for _ in PROFILES]
    came: list[list[float]] = [[] for _ in PROFILES]

    def come(until_s: float) -> None:
        for d, moments in enumerate(due):
            while len(came[d]) < len(moments) and moments[len(came[d])] < until_s:
                came[d].append(devices.held_up(d, moments[len(came[d])]))

    for pause_s, batch in asked:
        now_s += pause_s
        if in_time:
            come(now_s)
        mine = [row for row in batch if only is None or row[0] == only]
        for rows in (mine[first : first + most] for first in range(0, len(mine), most)):
            device, down, flops, up = (np.array(column) for column in zip(*rows, strict=True))
            shapes = np.ones((len(rows), 4), np.int64)
            shapes[:, 2] = np.ceil(flops / 2)  # one row and one column
            due_s, _ = devices.schedule(now_s, device, down, shapes, up)
            for d, at, size in zip(device.tolist(), due_s.tolist(), up.tolist(), strict=True):
                if size:  # otherwise there is no answer
                    due[d].append(at)
    come(float("inf"))
    return came


# ---- any link


@settings(calm, max_examples=60)
@given(figures, calls)
def test_no_answer_overtakes_an_earlier_one(given: dict[str, float], asked: Calls) -> None:
    for answers in schedule(links(**given), asked):
        assert answers == sorted(answers)


@settings(calm, max_examples=60)
@given(constant, calls)
def test_nothing_arrives_earlier_than_over_the_ideal_link(given: dict[str, float], asked: Calls) -> None:
    for real, ideal in zip(schedule(links(**given), asked), schedule(None, asked), strict=True):
        assert all(r >= i for r, i in zip(real, ideal, strict=True))


@settings(calm, max_examples=40)
@given(calls)
def test_without_effects_the_model_equals_the_ideal_link_to_the_last_bit(asked: Calls) -> None:
    ideal = schedule(None, asked)
    assert schedule(plain_links(len(PROFILES)), asked) == ideal
    almost = links()
    almost.table["jitter_up_s"][2] = 1e-9  # of another device: so all go through the whole model
    assert schedule(almost, asked)[:2] == ideal[:2]


@settings(calm, max_examples=40)
@given(figures, calls)
def test_a_devices_times_depend_on_its_own_transfers_only(given: dict[str, float], asked: Calls) -> None:
    together = schedule(links(**given), asked)
    assert schedule(links(**given), asked) == together
    for device in range(len(PROFILES)):
        assert schedule(links(**given), asked, only=device)[device] == together[device]


@pytest.mark.slow
@settings(calm, max_examples=100)
@given(figures, calls, st.integers(1, 6), st.booleans())
def test_how_blocks_are_grouped_into_messages_makes_no_difference(
    given: dict[str, float], asked: Calls, most: int, in_time: bool
) -> None:
    assert schedule(links(**given), asked, most=most, in_time=in_time) == schedule(links(**given), asked)


def test_an_answer_is_delayed_by_downloads_sent_after_it_and_before_it_is_due() -> None:
    """1 MB down takes a second, and so does an answer of 125 kB: due at 2.041, during the next download."""
    held = links(queue_down_s=0.05)
    block, download = (0, 1_000_000, 2.0, 125_000), (0, 5_000_000, 2.0, 0)
    alone = schedule(held, [(0.0, [block])])[0][0]
    assert alone == pytest.approx(2.041)
    assert schedule(held, [(0.0, [block, download])])[0][0] == pytest.approx(alone + 0.05)
    assert schedule(held, [(0.0, [block]), (1.5, [download])])[0][0] == pytest.approx(alone + 0.05)
    assert schedule(held, [(0.0, [block]), (2.02, [download])])[0][0] == pytest.approx(
        alone + 0.021
    )  # the buffer is filling
    assert schedule(held, [(0.0, [block]), (2.05, [download])])[0][0] == alone


def test_a_device_has_the_same_times_in_any_place_of_any_pod() -> None:
    fleet = draw_fleet(6, {"pixel-8": 1}, {"uk-adsl2plus": 1}, seed=5, effects="full")
    assert fleet.links is not None
    whole, part = Devices(fleet.profiles, fleet.links), Devices(fleet.profiles[4::-2], fleet.links.take([4, 2, 0]))
    for moment in range(5):
        sizes, shapes = np.full(3, 10_000), np.full((3, 4), [1, 50, 10, 10])
        of_whole, _ = whole.schedule(moment, np.array([4, 2, 0]), sizes, shapes, sizes)
        of_part, _ = part.schedule(moment, np.array([0, 1, 2]), sizes, shapes, sizes)
        assert of_whole.tolist() == of_part.tolist()


def test_another_seed_gives_other_times() -> None:
    asked: Calls = [(0.0, [(0, 1000, 1.0, 1000)])]
    one, other = links(jitter_down_s=0.01), links(jitter_down_s=0.01)
    other.table["key"] = device_keys(2, np.arange(len(other)))
    assert schedule(one, asked) != schedule(other, asked)


@settings(calm, max_examples=80)
@given(figures, st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50_000)), max_size=5), st.data())
def test_more_bytes_never_arrive_sooner(
    given: dict[str, float], before: list[tuple[float, int]], data: st.DataObject
) -> None:
    sizes = sorted(data.draw(st.lists(st.integers(1, 200_000), min_size=2, max_size=2)))
    arrivals = []
    for size in sizes:
        lines, now_s, one = Lines(links(**given)), 0.0, np.array([0])
        for pause_s, earlier in [*before, (0.1, size)]:
            now_s += pause_s
            lines.up.send(one, np.array([now_s]), np.array([20_000]), np.array([1e6]), np.array([0.02]))
            arrived = lines.down.send(one, np.array([now_s]), np.array([earlier]), np.array([8e6]), np.array([0.02]))
        arrivals.append(float(arrived[0]))
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("trace", [NO_TRACE, 0, 1])
def test_long_run_throughput_equals_the_rate(trace: int) -> None:
    lines = Lines(links(jitter_down_s=0.05, loss_down=0.01, queue_down_s=0.5, trace=trace))
    one, rate, size, count = np.array([0]), 8e6, 50_000, 2000
    for _ in range(count):
        arrived = lines.down.send(one, np.zeros(1), np.array([size]), np.array([rate]), np.array([0.02]))
    assert 8 * size * count / float(arrived[0]) == pytest.approx(rate, rel=0.01)


def test_a_device_that_starts_again_does_not_wait_for_earlier_transfers() -> None:
    devices = Devices(PROFILES, links(jitter_down_s=0.1, queue_up_s=1.0, trace=0))
    one, size = np.array([0]), np.array([1_000_000])
    late_s, _ = devices.schedule(
        0.0, np.repeat(one, 9), np.repeat(size, 9), np.full((9, 4), [1, 500, 100, 100]), np.repeat(size, 9)
    )
    devices.forget([0])
    due_s, _ = devices.schedule(1.0, one, size, np.ones((1, 4), np.int64), size)
    assert due_s[0] < late_s[-1]


# ---- jitter, loss, bufferbloat, each alone


def arrivals(of: Links, way: str, count: int, size: int = 1500, pause_s: float = 10.0) -> Floats:
    """Seconds of transfers of device 0, each alone on its line."""
    lines, one = Lines(of), np.array([0])
    took = []
    for moment in pause_s * np.arange(1, count + 1):
        arrived = getattr(lines, way).send(
            one, np.array([moment]), np.array([size]), np.array([1.2e6]), np.array([0.02])
        )
        took.append(arrived[0] - moment)
    return np.array(took)


@pytest.mark.parametrize("way", ["down", "up"])
def test_jitter_is_uniform_from_zero_to_twice_its_figure(way: str) -> None:
    late_s = arrivals(links(**{f"jitter_{way}_s": 0.005}), way, 2000) - 0.03
    assert late_s.min() > -1e-9
    assert late_s.max() < 0.01
    assert late_s.mean() == pytest.approx(0.005, rel=0.05)
    assert np.percentile(late_s, [10, 90]) == pytest.approx([0.001, 0.009], rel=0.15)


def test_the_two_directions_of_a_link_draw_independently() -> None:
    both = {"jitter_down_s": 0.005, "jitter_up_s": 0.005, "loss_down": 0.2, "loss_up": 0.2}
    down, up = (arrivals(links(**both), way, 500) for way in ("down", "up"))
    assert abs(float(np.corrcoef(down, up)[0, 1])) < 0.15


def test_every_device_needs_a_link() -> None:
    with pytest.raises(ValueError, match="2 links for 3 devices"):
        Devices(PROFILES, plain_links(2))


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_lost_packet_costs_a_round_trip(way: str) -> None:
    took = arrivals(links(**{f"loss_{way}": 0.1}), way, 4000)
    rounds = np.round((took - 0.03) / 0.04, 6)
    assert set(rounds.tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    shares = [float((rounds <= r).mean()) for r in range(3)]
    assert shares == pytest.approx([0.9, 0.99, 0.999], abs=0.015)


@settings(calm, max_examples=100)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 10_000), st.floats(1e-6, 0.99))
def test_repetitions_are_the_fewest_after_which_no_packet_is_missing(uniform: float, packets: int, loss: float) -> None:
    def complete(rounds: float) -> float:  # the probability
        return float(np.exp(packets * np.log1p(-(loss ** (rounds + 1)))))

    found = float(repetitions(np.array([uniform]), np.array([float(packets)]), np.array([loss]))[0])
    assert found == round(found)
    assert complete(found) >= uniform - 1e-9 or found == MOST_REPETITIONS
    assert found == 0 or complete(found - 1) <= uniform + 1e-9


def test_only_packets_of_the_last_round_trip_can_delay_an_answer() -> None:
    """1.2 Mbit/s and 40 ms: four packets. A transfer of ten thousand is late as rarely as one of four."""
    took = arrivals(links(loss_down=0.01), "down", 3000, size=15_000_000, pause_s=1000.0)
    assert float((took > 100.03).mean()) == pytest.approx(1 - 0.99**4, abs=0.015)


@pytest.mark.parametrize(("full", "idle"), [("down", "up"), ("up", "down")])
def test_a_full_line_delays_the_other_direction_by_the_loaded_round_trip_and_no_more(full: str, idle: str) -> None:
    lines, one = Lines(links(**{f"queue_{full}_s": 0.3})), np.array([0])

    def send(way: str, at_s: float, size: int) -> float:
        arrived = getattr(lines, way).send(one, np.array([at_s]), np.array([size]), np.array([1.2e6]), np.array([0.02]))
        return float(arrived[0] - at_s)

    def returns(at_s: float) -> float:
        took_s = send(idle, at_s, 150)
        return took_s + float(getattr(lines, full).queued_s(0, at_s + took_s))

    assert returns(1.0) == pytest.approx(0.021)
    send(full, 10.0, 1_500_000)  # busy until 20
    assert returns(10.079) == pytest.approx(0.021 + 0.1)  # the buffer is filling
    assert returns(15.0) == pytest.approx(0.021 + 0.3)
    assert returns(19.879) == pytest.approx(0.021 + 0.1)  # nearly empty
    assert returns(21.0) == pytest.approx(0.021)


def test_packets_lost_on_a_full_line_are_repeated_behind_its_queue() -> None:
    lossy = {"loss_down": 1 - 1e-9}
    empty, full = (arrivals(links(**lossy, queue_down_s=queue), "down", 1, size=300_000)[0] for queue in (0.0, 0.5))
    assert full - empty == pytest.approx(MOST_REPETITIONS * 0.5)


# ---- random numbers


def test_random_numbers_are_uniform_and_those_of_devices_and_seeds_differ() -> None:
    keys = device_keys(7, np.arange(200))
    assert len(set(keys.tolist()) | set(device_keys(8, np.arange(200)).tolist())) == 400
    drawn = uniforms(np.repeat(keys, 500), np.tile(np.arange(500), 200))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert np.abs(counts / len(drawn) - 0.05).max() < 0.005
    by_device = drawn.reshape(200, 500)
    assert abs(float(np.corrcoef(by_device[:100].ravel(), by_device[100:].ravel())[0, 1])) < 0.02
    assert abs(float(np.corrcoef(drawn[:-1], drawn[1:])[0, 1])) < 0.02


# ---- from profiles


def test_a_household_has_the_figures_of_its_network() -> None:
    network = load_network("uk-adsl2plus")
    fleet = draw_fleet(3, {"pixel-8": 1}, {network.name: 1}, seed=1, effects="full")
    assert fleet.links is not None
    row = fleet.links.table[0]
    assert (row["jitter_down_s"], row["jitter_up_s"]) == (0.00048, 0.00101)
    assert (1 - row["loss_down"]) * (1 - row["loss_up"]) == pytest.approx(1 - 0.000479)
    assert row["queue_down_s"] == pytest.approx(0.09525 - 0.02598)
    assert row["queue_up_s"] == pytest.approx(0.60032 - 0.02598)


def test_rates_alone_and_unmeasured_figures_add_nothing() -> None:
    for network, effects in (("uk-adsl2plus", "rates"), ("us-cable-cox", "full")):
        fleet = draw_fleet(3, {"pixel-8": 1}, {network: 1}, seed=1, effects=effects)  # type: ignore[arg-type]
        assert fleet.links is not None
        for name in ("jitter_down_s", "jitter_up_s", "loss_down", "loss_up", "queue_down_s", "queue_up_s"):
            assert not fleet.links.table[name].any()


def test_a_device_with_a_share_of_the_line_does_not_fill_its_buffer() -> None:
    fleet = draw_fleet(3, {"pixel-8": 1}, {"uk-adsl2plus": 1}, seed=1, line_share=0.5, effects="full")
    assert fleet.links is not None
    assert not fleet.links.table["queue_up_s"].any()
    assert fleet.links.table["jitter_up_s"].all()


def test_the_kernel_gets_the_same_figures() -> None:
    fleet = draw_fleet(4, {"pixel-8": 1}, {"uk-adsl2plus": 1}, seed=1, effects="full")
    assert fleet.links is not None
    specs = link_specs(fleet.profiles, fleet.links)
    assert len(specs) == 4
    for spec, profile, row in zip(specs, fleet.profiles, fleet.links.table, strict=True):
        assert (spec.rate_down_bps, spec.rate_up_bps) == (profile["down_bps"], profile["up_bps"])
        assert spec.delay_up_s - spec.jitter_up_s == pytest.approx(profile["latency_s"])  # the least
        assert (spec.jitter_down_s, spec.loss_up) == (row["jitter_down_s"], row["loss_up"])
        assert 8 * spec.buffer_up_bytes / spec.rate_up_bps == pytest.approx(row["queue_up_s"])
    assert all(field.name.endswith(("_bps", "_s", "_bytes")) or "loss" in field.name for field in fields(LinkSpec))


def test_a_pod_gets_all_figures() -> None:
    told = links(jitter_up_s=0.1, loss_down=0.2, trace=1, offset_s=0.3)
    heard = links_from_json(json.loads(json.dumps(links_to_json(told))), len(told))
    assert heard.table.tolist() == told.table.tolist()
    assert [t.up.at_ms.tolist() for t in heard.traces] == [t.up.at_ms.tolist() for t in told.traces]
    assert links_from_json({}, 2).table.tolist() == plain_links(2).table.tolist()


def test_a_real_device_among_emulated_ones_has_a_plain_link() -> None:
    taken = links(jitter_up_s=0.1).take([2, -1, 0])
    assert taken.table["jitter_up_s"].tolist() == [0.1, 0.0, 0.1]
    assert taken.table["trace"][1] == NO_TRACE
