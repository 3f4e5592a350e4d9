"""Promises of churn: a trace is read or refused with a reason, and a schedule follows its trace exactly."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import phone_sessions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.protocol.errors import UserError
from emulator.availability.churn import (
    AvailabilityTrace,
    Event,
    Schedule,
    TraceError,
    audit,
    flash_sessions,
    poisson_churn,
    read_trace,
    seti_sessions,
    trace_of,
)
from emulator.availability.sessions import Durations, exponential, lognormal, weibull

HOUR = 3600.0


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def intervals(trace: AvailabilityTrace) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trace.names}
    for of, start, end in zip(trace.device.tolist(), trace.start_s.tolist(), trace.end_s.tolist(), strict=True):
        found[trace.names[of]].append((start, end))
    return found


# ------------------------------------------------------------------------------------------------------- reading

SAME = {"a": [(0.0, 10.0), (20.0, 30.0)], "b": [(5.0, 15.0)]}
SAME_CSV = "device,start_s,end_s\na,100,110\nb,105,115\na,120,130\n"
SAME_OBJECT = '{"a": [[100, 110], [120, 130]], "b": [[105, 115]]}'
SAME_LIST = json.dumps(
    [
        {"device": "a", "start_s": 100, "end_s": 110},
        {"device": "b", "start_s": 105, "end_s": 115},
        {"device": "a", "start_s": 120, "end_s": 130},
    ]
)
SAME_EVENTS = """# event_id component_id node_id event_type event_start_time event_stop_time
0 0 a 1 100 110
1 0 a 0 110 120
2 0 a 1 120 130
0 0 b 1 105 115
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", SAME_CSV),
        ("x.csv", "\ufeff" + SAME_CSV.replace("\n", "\r\n\r\n")),
        ("x.csv", "end_s, colour ,device,start_s\n110,red,a,100\n115,,b,105\n130,,a,120\n"),
        ("x.json", SAME_OBJECT),
        ("x.json", SAME_LIST),
        ("x.tab", SAME_EVENTS),
        ("x.txt", SAME_CSV),
        ("x.txt", SAME_OBJECT),
        ("x", SAME_LIST),
        ("x", SAME_EVENTS),
    ],
)
def test_every_format_gives_the_same_trace_counted_from_its_first_moment(tmp_path: Path, name: str, text: str) -> None:
    trace = read_trace(written(tmp_path, name, text))
    assert intervals(trace) == SAME
    assert (trace.duration_s, trace.origin_s) == (30.0, 100.0)
    assert trace.start_s.tolist() == [0.0, 5.0, 20.0]
    assert trace.repairs.told() == []


def test_an_event_trace_starts_at_its_first_event_and_leaves_out_nodes_without_availability(
    tmp_path: Path,
) -> None:
    text = SAME_EVENTS + "0 0 c 0 50 60\n"
    trace = read_trace(written(tmp_path, "x.tab", text))
    assert trace.names == ("a", "b")
    assert (trace.origin_s, trace.duration_s) == (50.0, 80.0)
    assert trace.repairs.told() == ["1 devices without any row of availability, left out"]


def test_nodes_of_two_platforms_are_different_devices(tmp_path: Path) -> None:
    text = "platform_id node_id event_type event_start_time event_stop_time\n1 7 1 0 10\n2 7 1 5 15\n"
    assert intervals(read_trace(written(tmp_path, "x.tab", text))) == {"1/7": [(0.0, 10.0)], "2/7": [(5.0, 15.0)]}


CSV = "device,start_s,end_s\na,0,10\n"
TAB = "node_id component_id event_type event_start_time event_stop_time\n"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.csv", "", "x.csv: the file is empty"),
        ("x.csv", " \n\n", "the file is empty"),
        ("x.csv", "device,start_s,end_s\n", "no interval"),
        ("x.csv", "a,0,10\nb,0,10\n", "line 1: missing column device, start_s, end_s"),
        ("x.csv", "device;start_s;end_s\na;0;10\n", "line 1: missing column"),
        ("x.csv", "device,start_s\na,0\n", "line 1: missing column end_s"),
        ("x.csv", CSV + "b,soon,20\n", "line 3: start_s is 'soon', not a finite number; write seconds"),
        ("x.csv", CSV + "b,1,\n", "line 3: end_s is ''"),
        ("x.csv", CSV + "b,nan,20\n", "line 3: start_s is 'nan', not a finite number"),
        ("x.csv", CSV + "b,0,inf\n", "line 3: end_s is 'inf'"),
        ("x.csv", CSV + "b,-5,20\n", "line 3: start_s is -5, before 0"),
        ("x.csv", CSV + "\nb,9,5\n", "line 4: end_s 5 is before start_s 9"),
        ("x.csv", CSV + "b,0,1.7e12\n", "milliseconds"),
        ("x.csv", CSV + ",0,5\n", "line 3: the device is ''"),
        ("x.csv", CSV + "b,0\n", "line 3: 2 cells where the header has 3"),
        ("x.csv", CSV + "b,0,5,7\n", "line 3: 4 cells"),
        ("x.csv", "device,start_s,end_s\na,5,5\n", "no interval with a length"),
        ("x.json", '{"a": [[0, 10],\n [5]}', "line 2: not JSON"),
        ("x.json", '{"a": [[0, 10], [5]]}', "device 'a', interval 2: .* is not a pair"),
        ("x.json", '{"a": [[0, NaN]]}', "device 'a', interval 1: end_s is nan"),
        ("x.json", '{"a": [[0, true]]}', "end_s is True, not a finite number"),
        ("x.json", '{"a": [[0, 1' + 400 * "0" + "]]}", "not a finite number"),
        ("x.json", '{"a": [[0, 1' + 5000 * "0" + "]]}", "JSON without intervals"),
        ("x.json", 5000 * "[", "JSON without intervals|not JSON"),
        ("x.json", '{"a": 5}', "device 'a': its value must be a list"),
        ("x.json", '{"a": [[0, 1]], "a": [[2, 3]]}', "'a' appears twice"),
        ("x.json", '[{"device": "a", "start_s": 0}]', "entry 1: missing end_s"),
        ("x.json", "[1, 2]", "entry 1: missing device"),
        ("x.json", '[{"device": null, "start_s": 0, "end_s": 1}]', "entry 1: the device is None"),
        ("x.json", '"text"', "neither"),
        ("x.json", "{}", "no interval"),
        ("x.json", '{"a": []}', "no interval"),
        ("x.tab", "node_id event_type\n1 1\n", "missing column event_start_time, event_stop_time"),
        ("x.tab", TAB + "1 0 2 0 10\n", "line 2: event_type is '2'"),
        ("x.tab", TAB + "1 0 1 0 NULL\n", "line 2: event_stop_time is 'NULL'"),
        ("x.tab", TAB + "1 0 1 9 5\n", "line 2: event_stop_time 5 is before event_start_time 9"),
        ("x.tab", TAB + "1 0 0 0 10\n", "no row has event_type 1"),
        ("x.tab", TAB + "1 0 1 0 10\n1 3 1 0 10\n", "line 3: node 1 has components 0 and 3; keep the rows of one"),
        ("x.txt", "hello\n", "not a known kind of trace"),
    ],
)
def test_bad_input_is_refused_with_file_line_and_remedy(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(TraceError, match=told) as caught:
        read_trace(path)
    assert isinstance(caught.value, UserError)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


WORDS = ("device", "start_s", "end_s", "node_id", "event_type", "event_start_time", "event_stop_time", "a", "nan")
NUMBERS = ("0", "1", "7", "1e9", "-1", "9" * 400)
PIECES = st.sampled_from([*WORDS, *NUMBERS, *',"{}[]:# \n\0\u2028'])
HEADERS = st.sampled_from(["", "device,start_s,end_s\n", TAB, '{"a": [[', '[{"device": '])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["x.csv", "x.json", "x.tab", "x"]), HEADERS, st.lists(PIECES, max_size=30).map("".join))
def test_any_text_is_read_as_a_trace_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, header: str, text: str
) -> None:
    path = written(tmp_path_factory.getbasetemp(), name, header + text)
    try:
        found: AvailabilityTrace | str = read_trace(path)
    except TraceError as error:
        found = str(error)
    assert "\n" not in found if isinstance(found, str) else len(found.device)


def test_a_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(TraceError, match="not text; unpack it first"):
        read_trace(tmp_path / "x.csv")
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "y.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_unambiguous_mistakes_are_repaired_counted_and_reported(tmp_path: Path) -> None:
    text = "device,start_s,end_s\na,50,60\na,0,10\na,5,20\na,20,30\nb,7,7\nb,8,9\n"
    trace = read_trace(written(tmp_path, "x.csv", text))
    assert intervals(trace) == {"a": [(0.0, 30.0), (50.0, 60.0)], "b": [(8.0, 9.0)]}
    assert (trace.repairs.unsorted, trace.repairs.merged, trace.repairs.empty) == (1, 2, 1)
    assert trace.repairs.told() == [
        "1 rows out of order, sorted",
        "2 intervals that overlapped or touched the one before, merged",
        "1 intervals of no length, dropped",
    ]


def test_an_interval_inside_another_does_not_shorten_it() -> None:
    assert intervals(trace_of(["a"], [0, 0, 0], [0, 10, 50], [100, 20, 60])) == {"a": [(0.0, 100.0)]}


@pytest.mark.parametrize(
    ("device", "start_s", "end_s"),
    [([0], [5], [4]), ([0], [math.nan], [4]), ([0], [-1], [4]), ([1], [0], [4]), ([0], [0], [99]), ([0, 0], [0], [4])],
)
def test_an_inconsistent_trace_cannot_be_made(device: list[int], start_s: list[float], end_s: list[float]) -> None:
    with pytest.raises(TraceError):
        AvailabilityTrace(("a",), np.array(device), np.array(start_s, float), np.array(end_s, float), duration_s=10.0)


def test_a_trace_tells_which_devices_are_present_and_how_many_on_average() -> None:
    trace = trace_of(["a", "b"], [0, 1, 0], [0, 5, 20], [10, 15, 30])
    assert trace.present_at(0).tolist() == [True, False]
    assert trace.present_at(10).tolist() == [False, True]  # half open
    assert trace.device_seconds([0, 10, 30]).tolist() == [0, 15, 30]
    assert trace.availability(3) == pytest.approx([0.75, 0.25, 0.5])
    assert trace.gaps_s().tolist() == [10]


# -------------------------------------------------------------------------------------- traces as large as real ones


def test_sessions_of_thousands_of_phones_are_read_as_in_the_file(tmp_path: Path) -> None:
    made = phone_sessions.sessions(seed=1)
    trace = read_trace(made.write(tmp_path / "phones.csv"))
    lengths = trace.end_s - trace.start_s
    assert len(trace) == phone_sessions.PHONES
    assert sorted(lengths.tolist()) == sorted(made.lengths_s.tolist())
    assert np.percentile(lengths, [10, 50, 90]) == pytest.approx(np.percentile(made.lengths_s, [10, 50, 90]))
    assert np.log(lengths / HOUR).mean() == pytest.approx(-0.484, abs=0.05)
    assert np.log(lengths / HOUR).std() == pytest.approx(1.363, abs=0.05)
    assert trace.repairs.told() == []


def test_a_schedule_of_thousands_of_phones_is_made_quickly() -> None:
    made = phone_sessions.sessions(seed=1)
    trace = trace_of([str(n) for n in range(phone_sessions.PHONES)], made.phone, made.start_s, made.end_s)
    seconds = []
    for _ in range(3):  # best of three: the machine may be busy
        start = time.perf_counter()
        schedule = Schedule.from_trace(trace, 4000, speed_up=60, offset_s=20 * HOUR, seed=1)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    there = int(trace.present_at(20 * HOUR).sum())
    assert schedule.present[: len(trace)].sum() == there


def test_the_failure_trace_archive_is_read(tmp_path: Path) -> None:
    """Its columns, its white space, nodes that are never available, and rows that touch."""
    header = "event_id  component_id node_id  platform_id   node_name     event_type   event_start_time     "
    lines, nodes, available, begin = [header + "event_stop_time  event_end_reason"], 560, 0, 1_099_755_300
    rng = np.random.default_rng(2)
    for node in range(nodes):
        at = begin + int(rng.integers(0, 10_000_000))
        for event in range(int(rng.integers(1, 9))):
            kind, until = int(node % 7 > 0 and rng.random() < 0.5), at + int(rng.integers(60, 900_000))
            available += kind
            cells = [event, 0, 23 * node, 3, "10.000", kind, at, until, 8000]
            lines.append("    " + "\t       ".join(map(str, cells)))
            at = until
    trace = read_trace(written(tmp_path, "events.tab", "\n".join(lines) + "\n"))
    assert len(trace) + trace.repairs.silent == nodes
    assert trace.repairs.silent >= nodes // 7
    assert len(trace.device) + trace.repairs.merged == available
    assert trace.repairs.merged > 0


# ---------------------------------------------------------------------------------------------------- generators


@pytest.mark.parametrize(
    ("durations", "mean", "biased_mean"),
    [  # the mean of a length-biased draw is E[x^2] / E[x]
        (exponential(5.0), 5.0, 10.0),
        (weibull(1.5, 3.0), 3.0 * math.gamma(1 + 1 / 1.5), 3.0 * math.gamma(1 + 2 / 1.5) / math.gamma(1 + 1 / 1.5)),
        (lognormal(0.3, 0.5), math.exp(0.3 + 0.125), math.exp(0.3 + 1.5 * 0.25)),
    ],
)
def test_durations_have_their_analytic_means(durations: Durations, mean: float, biased_mean: float) -> None:
    rng = np.random.default_rng(1)
    assert durations.mean_s == pytest.approx(mean)
    assert durations.draw(rng, 200_000).mean() == pytest.approx(mean, rel=0.01)
    assert durations.draw_biased(rng, 200_000).mean() == pytest.approx(biased_mean, rel=0.01)


def test_a_truncated_lognormal_has_its_stated_mean() -> None:
    cut = lognormal(0.0, 1.0, unit_s=2.0, longest=3.0)
    drawn = cut.draw(np.random.default_rng(1), 200_000)
    assert drawn.max() <= 6.0
    assert drawn.mean() == pytest.approx(cut.mean_s, rel=0.01)


def whole_sessions_s(trace: AvailabilityTrace) -> np.ndarray:
    whole = (trace.start_s > 0) & (trace.end_s < trace.duration_s)
    return (trace.end_s - trace.start_s)[whole]


def rate_per_available_hour(trace: AvailabilityTrace) -> float:
    departures = int((trace.end_s < trace.duration_s).sum())
    return departures / float(trace.device_seconds(trace.duration_s) / HOUR)


def test_poisson_churn_has_its_rate_its_absences_and_is_in_equilibrium_from_the_start() -> None:
    trace = poisson_churn(4000, leave_per_s=1 / 300, mean_away_s=100, duration_s=6000, seed=3)
    assert rate_per_available_hour(trace) == pytest.approx(12, rel=0.02)
    assert trace.gaps_s().mean() == pytest.approx(100, rel=0.04)  # the end of the trace cuts long ones
    assert np.median(trace.gaps_s()) == pytest.approx(100 * math.log(2), rel=0.04)
    assert trace.availability(10) == pytest.approx(0.75, abs=0.02)
    assert trace.present_at(0).mean() == pytest.approx(0.75, abs=0.02)


def test_with_a_rate_of_zero_every_device_stays() -> None:
    trace = poisson_churn(5, 0.0, 100, 50, seed=3)
    assert trace.availability(3) == pytest.approx(1.0)
    assert Schedule.from_trace(trace, 5).events == ()
    assert Schedule.from_trace(trace, 5).present.all()


def test_flash_sessions_have_the_median_rate_and_daily_hours_of_the_publication() -> None:
    trace = flash_sessions(300, duration_s=2000 * HOUR, seed=5)
    assert np.median(whole_sessions_s(trace)) == pytest.approx(math.exp(-0.484) * HOUR, rel=0.03)
    assert rate_per_available_hour(trace) == pytest.approx(0.69, rel=0.02)
    assert 24 * trace.availability(1)[0] == pytest.approx(2.3, rel=0.03)


def test_flash_sessions_are_in_equilibrium_from_the_start() -> None:
    trace = flash_sessions(4000, duration_s=48 * HOUR, seed=5)
    assert 24 * trace.availability(4) == pytest.approx(2.3, rel=0.15)


def test_seti_sessions_have_the_medians_and_the_share_of_their_distributions() -> None:
    trace = seti_sessions(300, duration_s=10_000 * HOUR, seed=5)
    assert np.median(whole_sessions_s(trace)) == pytest.approx(2.964 * math.log(2) ** (1 / 0.393) * HOUR, rel=0.03)
    assert np.median(trace.gaps_s()) == pytest.approx(math.exp(-0.586) * HOUR, rel=0.05)
    many = seti_sessions(4000, duration_s=48 * HOUR, seed=5)
    mean_up, mean_down = 2.964 * math.gamma(1 + 1 / 0.393), math.exp(-0.586 + 2.844**2 / 2)
    assert many.availability(4) == pytest.approx(mean_up / (mean_up + mean_down), abs=0.03)


def test_the_same_seed_gives_the_same_trace_and_a_larger_fleet_begins_with_the_smaller_one() -> None:
    small, again, large, other = (
        flash_sessions(n, 48 * HOUR, seed) for n, seed in ((20, 7), (20, 7), (60, 7), (20, 8))
    )
    assert intervals(small) == intervals(again)
    assert intervals(small).items() <= intervals(large).items()
    assert intervals(small) != intervals(other)


@pytest.mark.parametrize(
    ("devices", "rate", "away_s", "duration_s", "told"),
    [
        (0, 0.1, 10, 100, "at least 1 device"),
        (5, -0.1, 10, 100, "departures per second"),
        (5, math.nan, 10, 100, "departures per second"),
        (5, 0.1, 0, 100, "mean absence"),
        (5, 0.1, 10, 0, "would last"),
        (5, 0.1, 10, math.inf, "would last"),
        (5000, 1e3, 1e-3, 1e6, "about 2.5e.12 sessions"),
    ],
)
def test_impossible_parameters_of_a_generator_are_refused(
    devices: int, rate: float, away_s: float, duration_s: float, told: str
) -> None:
    with pytest.raises(TraceError, match=told):
        poisson_churn(devices, rate, away_s, duration_s, seed=1)


# ------------------------------------------------------------------------------------------------------ schedule


@st.composite
def traces(draw: st.DrawFn) -> AvailabilityTrace:
    """Up to 5 devices; whole seconds, so that edges often coincide, also with those of the trace."""
    duration = draw(st.integers(1, 60))
    edges = [draw(st.lists(st.integers(0, duration), unique=True, max_size=10)) for _ in range(draw(st.integers(1, 5)))]
    rows = [
        (device, *pair)
        for device, times in enumerate(edges)
        for pair in zip(sorted(times)[::2], sorted(times)[1::2], strict=False)
    ]
    device, start, end = zip(*rows, strict=True) if rows else ((), (), ())
    names = [f"d{i}" for i in range(len(edges))]
    return trace_of(names, device, start, end, window_s=(0.0, float(duration)))


FLEETS = st.integers(1, 12)
OFFSETS = st.sampled_from([0.0, 0.5, 0.25]) | st.floats(0, 0.999)
SPEEDS = st.sampled_from([0.25, 1.0, 3.0, 60.0, 0.7])


@settings(deadline=None)
@given(traces(), FLEETS, SPEEDS, OFFSETS, st.integers(0, 99), st.lists(st.floats(0, 2.5), max_size=20))
def test_at_any_time_the_devices_present_are_those_of_the_trace(
    trace: AvailabilityTrace, devices: int, speed_up: float, begin: float, seed: int, moments: list[float]
) -> None:
    offset_s = begin * trace.duration_s
    schedule = Schedule.from_trace(trace, devices, speed_up=speed_up, offset_s=offset_s, seed=seed)
    edges = {0.0, *trace.start_s.tolist(), *trace.end_s.tolist()}
    for at_s in [0.0, *(m * schedule.period_s for m in moments)]:
        present = schedule.present_at(at_s)
        for i in range(devices):
            looked_at = (offset_s + schedule.shift_s[i] + at_s * speed_up) % trace.duration_s
            nearest = min(abs(looked_at - edge) for edge in (*edges, trace.duration_s))
            if nearest > 1e-6 or (at_s == 0 and schedule.shift_s[i] == 0):  # at an edge, rounding decides
                assert present[i] == trace.present_at(looked_at)[schedule.trace_device[i]]


@settings(deadline=None)
@given(traces(), FLEETS, SPEEDS, OFFSETS, st.integers(0, 99))
def test_leaving_and_joining_alternate_for_every_device_also_when_the_trace_repeats(
    trace: AvailabilityTrace, devices: int, speed_up: float, begin: float, seed: int
) -> None:
    schedule = Schedule.from_trace(trace, devices, speed_up=speed_up, offset_s=begin * trace.duration_s, seed=seed)
    there = schedule.present.copy()
    events = schedule.until(3.5 * schedule.period_s)
    assert events == sorted(events, key=lambda event: event.at_s)
    for event in events:
        assert event.at_s > 0
        assert (event.what == "leave") == there[event.device], event
        there[event.device] = event.what == "join"


@settings(deadline=None)
@given(traces(), FLEETS, SPEEDS, st.integers(0, 99))
def test_a_speed_up_divides_every_time_and_changes_nothing_else(
    trace: AvailabilityTrace, devices: int, speed_up: float, seed: int
) -> None:
    slow, fast = (Schedule.from_trace(trace, devices, speed_up=s, seed=seed) for s in (1.0, speed_up))
    assert [event[1:] for event in slow.events] == [event[1:] for event in fast.events]
    assert [e.at_s / speed_up for e in slow.events] == pytest.approx([e.at_s for e in fast.events])
    assert fast.period_s == pytest.approx(slow.period_s / speed_up)
    assert np.array_equal(slow.present, fast.present)


@settings(deadline=None)
@given(traces(), FLEETS, st.integers(0, 99))
def test_the_same_seed_gives_the_same_schedule(trace: AvailabilityTrace, devices: int, seed: int) -> None:
    one, two = (Schedule.from_trace(trace, devices, seed=seed) for _ in range(2))
    assert one.events == two.events
    assert np.array_equal(one.present, two.present)


def test_a_session_across_the_end_of_the_trace_continues() -> None:
    trace = trace_of(["a"], [0, 0], [0, 80], [10, 100])
    schedule = Schedule.from_trace(trace, 1, offset_s=50)
    assert not schedule.present[0]
    assert schedule.events == ((30.0, 0, "join"), (60.0, 0, "leave"))
    assert schedule.until(140) == [(30.0, 0, "join"), (60.0, 0, "leave"), (130.0, 0, "join")]


def test_events_at_the_first_moment_have_already_happened() -> None:
    trace = trace_of(["a", "b"], [0, 1], [0, 20], [20, 40])
    schedule = Schedule.from_trace(trace, 2, offset_s=20)
    assert schedule.present.tolist() == [False, True]
    assert schedule.events == ((20.0, 0, "join"), (20.0, 1, "leave"), (40.0, 0, "leave"), (40.0, 1, "join"))


def test_a_fleet_as_large_as_the_trace_follows_it_in_order() -> None:
    schedule = Schedule.from_trace(poisson_churn(30, 0.1, 10, 100, seed=1), 30, seed=5)
    assert schedule.trace_device.tolist() == list(range(30))
    assert schedule.notes == ("after 100 s of the run the trace begins again",)


def test_a_smaller_fleet_takes_a_seeded_choice_of_different_devices_and_says_so() -> None:
    trace = poisson_churn(100, 0.1, 10, 100, seed=1)
    few, more, other = (Schedule.from_trace(trace, n, seed=s) for n, s in ((10, 5), (20, 5), (10, 6)))
    assert len(set(few.trace_device.tolist())) == 10
    assert more.trace_device[:10].tolist() == few.trace_device.tolist() != other.trace_device.tolist()
    assert few.notes[0] == "100 devices in the trace, 10 in the fleet: 10 of them chosen by seed 5"


def test_a_larger_fleet_uses_devices_again_shifted_in_time_and_says_so() -> None:
    trace = poisson_churn(4, 0.1, 10, 100, seed=1)
    schedule = Schedule.from_trace(trace, 10, seed=5)
    assert schedule.trace_device.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert not schedule.shift_s[:4].any()
    assert len(set(schedule.shift_s[4:].tolist())) == 6
    assert schedule.notes[0] == (
        "4 devices in the trace, 10 in the fleet: used up to 3 times each, the copies shifted by up to 100 s by seed 5"
    )


@pytest.mark.parametrize(
    ("devices", "speed_up", "offset_s", "told"),
    [
        (0, 1, 0, "at least 1"),
        (1, 0, 0, "speed-up"),
        (1, math.nan, 0, "speed-up"),
        (1, 1, 10, "into a trace of 10 s"),
        (1, 1, -1, "0 or more"),
        (1, 1, math.nan, "0 or more"),
    ],
)
def test_an_impossible_schedule_is_refused(devices: int, speed_up: float, offset_s: float, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        Schedule.from_trace(trace_of(["a"], [0], [0], [10]), devices, speed_up=speed_up, offset_s=offset_s)


# --------------------------------------------------------------------------------------------------------- audit


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return Schedule.from_trace(poisson_churn(50, 0.05, 10, 100, seed=1), 50)


def test_events_injected_in_time_pass_the_audit(schedule: Schedule) -> None:
    done = [(event.at_s + 0.01, event.device, event.what) for event in schedule.events]
    found = audit(reversed(done), schedule, until_s=schedule.period_s)
    assert found.complete
    assert found.scheduled == found.injected == len(done) == found.leaves + found.joins
    assert found.worst_delay_s == pytest.approx(0.01)
    assert found.mean_delay_s == pytest.approx(0.01)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_missing_and_unexpected_events_are_named_and_the_rest_does_not_look_late(data: st.DataObject) -> None:
    asked = Schedule.from_trace(poisson_churn(5, 0.2, 2, 50, seed=data.draw(st.integers(0, 50))), 5)
    if not asked.events:
        return
    left_out = data.draw(st.sampled_from(asked.events))
    invented = Event(1e-9, 77, "leave")
    found = audit([invented, *(event for event in asked.events if event != left_out)], asked)
    assert found.missing == (left_out,)
    assert found.extra == (invented,)
    assert found.worst_delay_s == 0.0
    assert not found.complete


def test_the_latest_event_is_named_with_its_delay(schedule: Schedule) -> None:
    late = schedule.events[7]
    done = [(e.at_s + (0.5 if e == late else 0.0), e.device, e.what) for e in schedule.events]
    found = audit(done, schedule, until_s=schedule.period_s)
    assert found.worst == late
    assert found.worst_delay_s == pytest.approx(0.5)


def test_an_event_due_after_the_run_is_not_missing_and_one_that_came_too_early_is_wrong(schedule: Schedule) -> None:
    assert audit([], schedule, until_s=0.0).complete
    first = schedule.events[0]
    early = audit([(first.at_s - 0.5, first.device, first.what)], schedule, until_s=first.at_s)
    assert len(early.missing) == len(early.extra) == 1


def test_an_audit_is_written_as_json(schedule: Schedule) -> None:
    done = schedule.events[1:]
    found = json.loads(json.dumps(audit(done, schedule).as_dict()))
    assert found["missing"] == [schedule.events[0]._asdict()]
    assert found["complete"] is False
    assert found["worst"]["what"] in ("leave", "join")
