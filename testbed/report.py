"""A finished run to look at: trace.json for a timeline, report.html for everything else.

Reads the results folder (blocks.parquet, steps.csv, summary.json) and nothing else; starts nothing, asks no network.
The trace opens in ui.perfetto.dev and chrome://tracing. It is bounded, and says what it leaves out.
The page is one file without scripts. Names in it may come from a stranger's device, so everything is escaped.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from agent.errors import UserError
from agent.units import format_duration, format_size

TRACE_EVENTS = 40_000  # at most; the limits below add up to less
TRACE_DEVICES = 60
TRACE_BLOCKS = 26_000
TRACE_PRODUCTS = 4_000
TRACE_STEPS = 2_000
TRACE_COUNTER = 4_000
TRACE_LANES = 16  # tracks a device may need for blocks that overlap
SLOWEST_DEVICES = 15
CURVE_POINTS = 500
STEPS_LISTED = 200
BARS = 40

Array = NDArray[Any]
Span = tuple[int, int, float, float]  # key, first row, begin, end

_NAMES = ("product", "device_name")
_COUNTS = ("step", "job", "block", "device", "batches", "rows", "columns", "inner")
_TIMES = ("sent_s", "due_s", "received_s", "compute_s")


class ReportError(UserError):
    """The folder does not hold a finished run; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A run as it was written. `blocks` are columns in the order of sending; names are indices into `names`."""

    blocks: dict[str, Array]
    names: dict[str, list[str]]
    steps: list[dict[str, float]]
    summary: dict[str, Any]

    def name(self, column: str, row: int) -> str:
        return self.names[column][int(self.blocks[column][row])]


def read_run(folder: Path) -> Finished:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        with (folder / "steps.csv").open(newline="", encoding="utf-8") as file:
            steps = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
        blocks, names = _read_blocks(folder / "blocks.parquet")
    except FileNotFoundError as error:
        raise ReportError(
            f"{folder} does not hold a finished run: it has no {Path(error.filename).name}. "
            "Give a folder that `cleave run` made"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, pyarrow.ArrowException) as error:
        raise ReportError(f"the results in {folder} cannot be read: {error}. Run the scenario again") from None
    return Finished(blocks, names, steps, summary)


def _read_blocks(path: Path) -> tuple[dict[str, Array], dict[str, list[str]]]:
    path.stat()  # a missing file is told by its name
    table = pyarrow.parquet.read_table(path)
    if not table.num_columns:  # a run in which no block was answered
        whole = {name: np.empty(0, np.int64) for name in (*_NAMES, *_COUNTS)}
        return {**whole, **{name: np.empty(0) for name in _TIMES}}, {name: [] for name in _NAMES}
    order = np.argsort(table["sent_s"].to_numpy(), kind="stable")
    columns: dict[str, Array] = {}
    names: dict[str, list[str]] = {}
    for name in (*_NAMES, *_COUNTS, *_TIMES):
        values = table[name].combine_chunks()
        if name in _NAMES:
            values = values if pyarrow.types.is_dictionary(values.type) else values.dictionary_encode()
            names[name] = values.dictionary.to_pylist()
            values = values.indices
        columns[name] = values.to_numpy(zero_copy_only=False)[order]
    return columns, names


def _spans(key: Array, blocks: dict[str, Array]) -> list[Span]:
    """From the first block sent to the last one received, for each value of `key`; earliest first."""
    keys, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    end = np.full(len(keys), -np.inf)
    np.maximum.at(end, inverse, blocks["received_s"])
    order = np.argsort(first)
    table = keys[order], first[order], blocks["sent_s"][first[order]], end[order]
    return list(zip(*(column.tolist() for column in table), strict=True))


# ---------------------------------------------------------------------------------------------------- trace.json


def write_trace(folder: Path) -> Path:
    """trace.json in the trace-event format: steps, products and blocks as slices, blocks in flight as a counter."""
    run = read_run(folder)
    events, left_out = trace_events(run)
    about = {key: run.summary.get(key, "") for key in ("name", "model", "devices", "verdict")}
    document = {"displayTimeUnit": "ms", "otherData": {**about, **left_out}, "traceEvents": events}
    path = folder / "trace.json"
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def trace_events(run: Finished) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events, and what is not among them."""
    blocks, training, devices = run.blocks, 1, 2
    events = _label("process", training, 0, "training", 0) + _label("process", devices, 0, "devices, busiest first", 1)

    steps = _spans(blocks["step"], blocks)
    events += _label("thread", training, 1, "steps", 1)
    events += [_slice(training, 1, f"step {step}", begin, end) for step, _, begin, end in steps[:TRACE_STEPS]]

    jobs = _spans(blocks["job"], blocks)
    lanes = _lanes([(begin, end) for _, _, begin, end in jobs[:TRACE_PRODUCTS]])
    for lane in range(_used(lanes)):
        events += _label("thread", training, 2 + lane, "products", 2 + lane)
    products_shown = 0
    for (job, row, begin, end), place in zip(jobs, lanes, strict=False):
        if place is not None:
            products_shown += 1
            about = {"step": int(blocks["step"][row]), "job": job}
            events.append(_slice(training, 2 + place, run.name("product", row), begin, end, about))

    events += _counter(training, blocks)

    busy_s = np.bincount(blocks["device"], weights=blocks["received_s"] - blocks["sent_s"])
    busiest = np.argsort(-busy_s, kind="stable")[: min(TRACE_DEVICES, len(np.unique(blocks["device"])))]
    rows_shown = np.flatnonzero(np.isin(blocks["device"], busiest))[:TRACE_BLOCKS]
    blocks_shown, track = 0, 1
    for device in busiest.tolist():
        rows = rows_shown[blocks["device"][rows_shown] == device]
        spans = list(zip(blocks["sent_s"][rows].tolist(), blocks["received_s"][rows].tolist(), strict=True))
        lanes = _lanes(spans)
        for lane in range(_used(lanes)):
            name = run.name("device_name", int(rows[0])) + (f", overlapping {lane + 1}" if lane else "")
            events += _label("thread", devices, track + lane, name, track + lane)
        for row, (begin, end), place in zip(rows.tolist(), spans, lanes, strict=True):
            if place is not None:
                blocks_shown += 1
                name = run.name("product", row)
                events.append(_slice(devices, track + place, name, begin, end, _about(blocks, row)))
        track += _used(lanes)
    left_out = {
        "blocks": len(blocks["sent_s"]) - blocks_shown,
        "devices": int(np.count_nonzero(busy_s)) - len(busiest),
        "products": len(jobs) - products_shown,
        "steps": max(0, len(steps) - TRACE_STEPS),
    }
    return events, {
        "blocks_shown": blocks_shown,
        "devices_shown": len(busiest),
        "left_out": left_out,
        "note": f"Slices: at most the {TRACE_DEVICES} busiest devices, and of those the first {TRACE_BLOCKS:,} blocks, at "
        f"most {TRACE_LANES} at a time. The counter has the blocks of all devices. Everything is in blocks.parquet.",
    }


def _about(blocks: dict[str, Array], row: int) -> dict[str, Any]:
    batches, rows, inner, columns = (int(blocks[name][row]) for name in ("batches", "rows", "inner", "columns"))
    about = {
        "step": int(blocks["step"][row]),
        "job": int(blocks["job"][row]),
        "block": int(blocks["block"][row]),
        "size": f"{batches} x [{rows} x {inner}] [{inner} x {columns}]",
        "compute_ms": round(1e3 * float(blocks["compute_s"][row]), 3),
    }
    late_s = float(blocks["received_s"][row] - blocks["due_s"][row])
    return about if math.isnan(late_s) else about | {"late_ms": round(1e3 * late_s, 3)}


def _counter(group: int, blocks: dict[str, Array]) -> list[dict[str, Any]]:
    """Blocks in flight: at every change, or at evenly spaced moments if there are too many of those."""
    sent, received = blocks["sent_s"], np.sort(blocks["received_s"])
    moments = np.unique(np.concatenate([sent, received]))
    if len(moments) > TRACE_COUNTER:
        moments = np.linspace(moments[0], moments[-1], TRACE_COUNTER)
    count = np.searchsorted(sent, moments, "right") - np.searchsorted(received, moments, "right")
    return [
        {"ph": "C", "pid": group, "tid": 0, "name": "blocks in flight", "ts": _us(at_s), "args": {"blocks": value}}
        for at_s, value in zip(moments.tolist(), count.tolist(), strict=True)
    ]


def _lanes(spans: Sequence[tuple[float, float]]) -> list[int | None]:
    """For spans sorted by their begin, a lane each such that none overlap in a lane; None beyond the last lane.
    Slices of one track may not overlap: viewers would draw them as calls within calls, or drop them."""
    free = list(range(TRACE_LANES))  # a sorted list is a heap
    busy: list[tuple[float, int]] = []
    lanes: list[int | None] = []
    for begin, end in spans:
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else None
        if lane is not None:
            heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def _used(lanes: Iterable[int | None]) -> int:
    return 1 + max((lane for lane in lanes if lane is not None), default=-1)


def _slice(
    group: int, track: int, name: str, begin_s: float, end_s: float, about: dict[str, Any] | None = None
) -> dict[str, Any]:
    begin_us = _us(begin_s)
    event = {
        "ph": "X",
        "pid": group,
        "tid": track,
        "name": name,
        "ts": begin_us,
        "dur": round(_us(end_s) - begin_us, 3),
    }
    return event | {"args": about} if about else event


def _label(what: str, group: int, track: int, name: str, order: int) -> list[dict[str, Any]]:
    head = {"ph": "M", "pid": group, "tid": track}
    return [
        head | {"name": f"{what}_name", "args": {"name": name}},
        head | {"name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


# ---------------------------------------------------------------------------------------------------- report.html


class Markup(str):
    """Text that is HTML already; everything else is escaped before it reaches the page."""

    __slots__ = ()


def element(tag: str, *children: str | Iterable[str], **attributes: object) -> Markup:
    """<tag ...>children</tag>; `class_` and the like lose their underscore, `stroke_width` becomes stroke-width."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    inside = "".join(_markup(child) for child in children)
    return Markup(f"<{tag}{given}>{inside}</{tag}>")


def _markup(child: str | Iterable[str]) -> str:
    if isinstance(child, Markup):
        return child
    return escape(child) if isinstance(child, str) else "".join(_markup(c) for c in child)


def write_report(folder: Path) -> Path:
    """report.html: verdict, losses, times, the summary and the slowest devices on one page."""
    run = read_run(folder)
    path = folder / "report.html"
    path.write_text(page(run), encoding="utf-8")
    return path


def page(run: Finished) -> str:
    s, blocks = run.summary, run.blocks
    title = f"{s.get('name', 'run')}: {s.get('model', '?')} on {s.get('devices', 0):,} devices"
    took_s = blocks["received_s"] - blocks["sent_s"]
    late_s = blocks["received_s"] - blocks["due_s"]
    late_s = late_s[~np.isnan(late_s)]
    numbers = [row["step"] for row in run.steps]
    losses = [
        ("devices", "one", numbers, [row["loss"] for row in run.steps]),
        ("plain PyTorch", "two", numbers, [row.get("reference_loss", math.nan) for row in run.steps]),
    ]
    seconds = [("seconds", "one", numbers, [row["seconds"] for row in run.steps])]
    body = [
        element("h1", title),
        _verdict(s),
        element(
            "div",
            _figure("Loss", f"largest difference {s.get('loss_max_abs_diff', math.nan):.1e}", line_chart(losses)),
            _figure("Seconds a step", _percentiles(s), line_chart(seconds, from_zero=True)),
            _figure("Time of a block", "from sent to received", histogram(took_s)),
            _figure("Lateness of a block", "received after the moment the model asked for", histogram(late_s)),
            class_="charts",
        ),
        element("h2", "Slowest devices"),
        element("p", "By their mean time from a block's sending to its return.", class_="note"),
        _slowest(run),
        element("h2", "Summary"),
        _table(("", ""), [(label, value) for label, value in _flat(s)], "key"),
        element("details", element("summary", "Every step"), _step_table(run.steps)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', title)}<style>{_STYLE}</style></head>\n{element('body', element('main', body))}\n</html>\n"
    )


def _verdict(s: dict[str, Any]) -> Markup:
    verdict = str(s.get("verdict", "unknown"))
    kind = {"VALID": "good", "DEGRADED": "fair"}.get(verdict, "bad")
    same = s.get("flops_done") == s.get("flops_reference")
    lines = [
        *(str(reason) for reason in s.get("reasons", [])),
        f"Devices did {'all' if same else 'NOT all'} of the FLOPs of the steps' products "
        f"({s.get('flops_done', 0):,} of {s.get('flops_reference', 0):,}).",
    ]
    return element(
        "div",
        element("strong", verdict),
        element("ul", (element("li", line) for line in lines)),
        class_=f"verdict {kind}",
    )


def _percentiles(s: dict[str, Any]) -> str:
    return ", ".join(f"{name} {format_duration(value)}" for name, value in s.get("step_s", {}).items())


def _figure(title: str, note: str, chart: Markup) -> Markup:
    return element("figure", element("figcaption", element("strong", title), " ", element("span", note)), chart)


def _slowest(run: Finished) -> Markup:
    blocks = run.blocks
    ids, first, inverse, count = np.unique(blocks["device"], return_index=True, return_inverse=True, return_counts=True)
    took_s = blocks["received_s"] - blocks["sent_s"]
    late_s = blocks["received_s"] - blocks["due_s"]
    mean_s = np.bincount(inverse, took_s, len(ids)) / count
    late_mean_s = np.bincount(inverse, late_s, len(ids)) / count  # NaN for a real device
    compute_mean_s = np.bincount(inverse, blocks["compute_s"], len(ids)) / count
    longest_s = np.zeros(len(ids))
    np.maximum.at(longest_s, inverse, took_s)
    rows = [
        (
            run.name("device_name", int(first[i])),
            f"{count[i]:,}",
            format_duration(float(mean_s[i])),
            format_duration(float(longest_s[i])),
            format_duration(float(compute_mean_s[i])),
            "real device" if math.isnan(late_mean_s[i]) else format_duration(float(late_mean_s[i])),
        )
        for i in np.argsort(-mean_s, kind="stable")[:SLOWEST_DEVICES].tolist()
    ]
    return _table(("device", "blocks", "mean time", "longest", "mean computing", "mean lateness"), rows)


def _step_table(steps: list[dict[str, float]]) -> Markup:
    rows = [
        (
            f"{row['step']:.0f}",
            f"{row['loss']:.6f}",
            f"{row.get('reference_loss', math.nan):.6f}",
            f"{abs(row['loss'] - row.get('reference_loss', math.nan)):.1e}",
            format_duration(row["seconds"]),
            f"{row.get('blocks', 0):,.0f}",
            format_size(row.get("bytes_down", 0)),
        )
        for row in (steps[i] for i in _some(len(steps), STEPS_LISTED))
    ]
    return _table(("step", "loss", "plain PyTorch", "difference", "time", "blocks", "bytes down"), rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "numbers") -> Markup:
    head = element("tr", (element("th", heading) for heading in headings)) if any(headings) else Markup()
    body = [element("tr", (element("td", cell) for cell in row)) for row in rows]
    return element("div", element("table", head, body, class_=class_), class_="wide")


def _flat(value: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Every key of the summary as people read it; lists of numbers stand in the charts and the table of steps."""
    for key, item in value.items():
        label = f"{prefix}{key}".replace("_", " ")
        unit = f"{prefix}{key}"
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key} ")
        elif isinstance(item, list):
            if not all(isinstance(entry, (int, float)) for entry in item):
                yield label, "; ".join(str(entry) for entry in item)
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            yield label.removesuffix(" s"), _human(unit, item)
        else:
            yield label, str(item)


def _human(key: str, value: float) -> str:
    words = key.replace("_", " ").split()
    if "bytes" in words:
        return format_size(value)
    if "s" in words:
        return format_duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------- charts

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 260, 58, 14, 26, 34
Series = tuple[str, str, Sequence[float], Sequence[float]]  # name, class, x, y


@dataclass(frozen=True, slots=True)
class Axes:
    """Values to places in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> list[Markup]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        drawn = [
            element("line", x1=_LEFT, x2=right, y1=self.y(tick), y2=self.y(tick), class_="grid")
            for tick in ticks(self.y0, self.y1)
        ]
        drawn += [
            element("text", y_text(tick), x=_LEFT - 6, y=self.y(tick) + 4, text_anchor="end")
            for tick in ticks(self.y0, self.y1)
        ]
        drawn += [
            element("text", x_text(tick), x=self.x(tick), y=bottom + 18, text_anchor="middle")
            for tick in ticks(self.x0, self.x1)
        ]
        return [*drawn, element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis")]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values."""
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = magnitude * next(m for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], from_zero: bool = False) -> Markup:
    """Curves over the step. Curves that agree hide each other, hence the last one is drawn wide and underneath."""
    points = [[(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)] for _, _, xs, ys in series]
    together = [point for curve in points for point in curve]
    if not together:
        return element("p", "nothing to draw", class_="note")
    xs, ys = [x for x, _ in together], [y for _, y in together]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    margin = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    axes = Axes(min(xs) - 0.5, max(xs) + 0.5, low if from_zero else low - margin, high + margin)
    drawn = axes.grid(lambda tick: f"{tick:g}" if tick == int(tick) else "", lambda tick: f"{tick:g}")
    for (name, class_, _, _), curve in reversed(list(zip(series, points, strict=True))):
        shown = [curve[i] for i in _some(len(curve), CURVE_POINTS)]
        path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in shown)
        drawn.append(element("polyline", points=path, class_=f"curve {class_}"))
        if len(shown) <= 60:
            drawn += [
                element(
                    "circle",
                    element("title", f"step {x:g}, {name}: {y:.6g}"),
                    cx=axes.x(x),
                    cy=axes.y(y),
                    r=3,
                    class_=class_,
                )
                for x, y in shown
            ]
    if len(series) > 1:
        for place, (name, class_, _, _) in enumerate(series):
            left = _LEFT + 8 + 110 * place
            drawn.append(element("line", x1=left, x2=left + 20, y1=12, y2=12, class_=f"curve {class_}"))
            drawn.append(element("text", name, x=left + 26, y=16))
    return _drawing(drawn)


def histogram(seconds: Array) -> Markup:
    """How many blocks took how long; what lies above the 99th percentile stands in the last bar."""
    seconds = seconds[np.isfinite(seconds)]
    if not len(seconds):
        return element("p", "no block has such a time in this run", class_="note")
    low, high = min(0.0, float(seconds.min())), float(np.percentile(seconds, 99))
    high = high if high > low else low + 1e-3
    counts, edges = np.histogram(np.minimum(seconds, high), BARS, (low, high))
    over = int((seconds > high).sum())
    factor, unit = (1.0, "s") if high >= 2 else (1e3, "ms") if high >= 2e-3 else (1e6, "us")
    axes = Axes(low * factor, high * factor, 0.0, 1.08 * float(counts.max()))
    drawn = axes.grid(lambda tick: f"{tick:g} {unit}", lambda tick: f"{tick:,g}" if tick == int(tick) else "")
    for i, count in enumerate(counts.tolist()):
        if count:
            left, right = axes.x(edges[i] * factor), axes.x(edges[i + 1] * factor)
            span = f"{edges[i] * factor:.3g} to {edges[i + 1] * factor:.3g} {unit}: {count:,} blocks"
            last = i == BARS - 1 and over > 0
            text = f"{span}, {over:,} of them longer, up to {seconds.max() * factor:.4g} {unit}" if last else span
            top = axes.y(count)
            drawn.append(
                element(
                    "rect",
                    element("title", text),
                    x=left,
                    y=top,
                    width=max(1.0, round(right - left - 1, 1)),
                    height=round(_HEIGHT - _BOTTOM - top, 1),
                    class_="two" if last else "one",
                )
            )
    p50, p99 = (format_duration(float(x)) for x in np.percentile(seconds, [50, 99]))
    told = f"p50 {p50}, p99 {p99}, longest {format_duration(float(seconds.max()))} (last bar: and above)"
    return _drawing([*drawn, element("text", told, x=_LEFT, y=16)])


def _drawing(children: Iterable[Markup]) -> Markup:
    return element("svg", children, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img")


def _some(count: int, most: int) -> list[int]:
    """All of 0..count-1, or an even choice that has the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most)).tolist()}) if count else []


_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbf9; --ink: #1c1d1f; --soft: #62666d; --line: #dddfe2; --card: #ffffff;
  --one: #1f6fd0; --two: #e2862d; --good: #18794e; --fair: #9a6200; --bad: #c22f26; }
@media (prefers-color-scheme: dark) { :root { --ground: #17181a; --ink: #e9e9e7; --soft: #a0a4ab; --line: #34373b;
  --card: #1f2124; --one: #6aaef7; --two: #f0a04f; --good: #4cc38a; --fair: #e5b24b; --bad: #ff7b70; } }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 14px; } h2 { font-size: 18px; margin: 32px 0 8px; }
.verdict { border-left: 5px solid; padding: 8px 14px; background: var(--card); }
.verdict strong { font-size: 18px; letter-spacing: .03em; }
.verdict ul { margin: 4px 0 0; padding-left: 18px; color: var(--ink); }
.good { border-color: var(--good); } .good strong { color: var(--good); }
.fair { border-color: var(--fair); } .fair strong { color: var(--fair); }
.bad { border-color: var(--bad); } .bad strong { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px;
  margin-top: 18px; }
figure { margin: 0; padding: 12px 14px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figcaption span, .note { color: var(--soft); } .note { margin: 0 0 8px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.curve { fill: none; stroke-linejoin: round; } .curve.one { stroke: var(--one); stroke-width: 2; }
.curve.two { stroke: var(--two); stroke-width: 6; }
circle.one, rect.one { fill: var(--one); } circle.two, rect.two { fill: var(--two); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right; white-space: nowrap; }
.key td:first-child { color: var(--soft); white-space: nowrap; }
details { margin-top: 28px; } details summary { cursor: pointer; font-size: 18px; font-weight: 600; }
"""
