"""Visualizes a finished run: trace.json for a timeline, report.html for everything else.

Reads only the results folder (blocks.parquet, steps.csv, summary.json); starts nothing, uses no network. The trace
opens in ui.perfetto.dev and chrome://tracing. Its size is bounded, and it states what it leaves out. The page is one
file without scripts. Names in it may come from untrusted devices, so everything is escaped.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from agent.protocol.errors import UserError
from agent.protocol.units import format_duration, format_size
from testbed.results.charts import Markup, element, histogram, line_chart, some

TRACE_EVENTS = 40_000  # limit; the limits below add up to less
TRACE_DEVICES = 60
TRACE_BLOCKS = 26_000
TRACE_PRODUCTS = 4_000
TRACE_STEPS = 2_000
TRACE_COUNTER = 4_000
TRACE_LANES = 16  # tracks per device for overlapping blocks
SLOWEST_DEVICES = 15
STEPS_LISTED = 200

Array = NDArray[Any]
Span = tuple[int, int, float, float]  # key, first row, begin, end

_NAMES = ("product", "device_name")
_COUNTS = ("step", "job", "block", "device", "batches", "rows", "columns", "inner")
_TIMES = ("sent_s", "due_s", "received_s", "compute_s")


class ReportError(UserError):
    """The folder does not hold a finished run; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run. `blocks` are columns in the order of sending; names are indices into `names`."""

    blocks: dict[str, Array]
    names: dict[str, list[str]]
    steps: list[dict[str, float]]
    summary: dict[str, Any]

    def name(self, column: str, row: int) -> str:
        name = self.names[column][int(self.blocks[column][row])]
        return f"{name} (real)" if column == "device_name" and self.blocks["real"][row] else name


def read_run(folder: Path) -> Finished:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        with (folder / "steps.csv").open(newline="", encoding="utf-8") as file:
            steps = [{key: float(value or "nan") for key, value in row.items()} for row in csv.DictReader(file)]
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
    path.stat()  # a missing file is reported by its name
    table = pyarrow.parquet.read_table(path)
    if not table.num_columns:  # no block was answered in this run
        whole = {name: np.empty(0, np.int64) for name in (*_NAMES, *_COUNTS)}
        return {**whole, "real": np.empty(0, bool), **{name: np.empty(0) for name in _TIMES}}, {n: [] for n in _NAMES}
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
    marked = "real" in table.column_names  # runs of earlier releases do not have this column
    columns["real"] = table["real"].to_numpy()[order] if marked else np.isnan(columns["due_s"])
    return columns, names


def _spans(key: Array, blocks: dict[str, Array]) -> list[Span]:
    """From the first block sent to the last block received, for each value of `key`; earliest first."""
    keys, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    end = np.full(len(keys), -np.inf)
    np.maximum.at(end, inverse, blocks["received_s"])
    order = np.argsort(first)
    table = keys[order], first[order], blocks["sent_s"][first[order]], end[order]
    return list(zip(*(column.tolist() for column in table), strict=True))


# ---------------------------------------------------------------------------------------------------- trace.json


def write_trace(folder: Path, path: Path | None = None) -> Path:
    """trace.json of the run in this folder, in the trace-event format: steps, products and blocks as slices, blocks
    in flight as a counter."""
    run = read_run(folder)
    events, left_out = trace_events(run)
    about = {key: run.summary.get(key, "") for key in ("name", "model", "devices", "verdict")}
    document = {"displayTimeUnit": "ms", "otherData": {**about, **left_out}, "traceEvents": events}
    path = path or folder / "trace.json"
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def trace_events(run: Finished) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events, and a record of what was left out."""
    blocks, tracks = run.blocks, Tracks()
    tracks.begin_group("training")
    steps, jobs = _spans(blocks["step"], blocks), _spans(blocks["job"], blocks)
    steps_shown = tracks.add("steps", [(f"step {k}", begin, end, {}) for k, _, begin, end in steps[:TRACE_STEPS]])
    products_shown = tracks.add(
        "products",
        [
            (run.name("product", row), begin, end, {"step": int(blocks["step"][row]), "job": job})
            for job, row, begin, end in jobs[:TRACE_PRODUCTS]
        ],
    )
    tracks.events += _counter(tracks.group, blocks)

    tracks.begin_group("devices, busiest first")
    busy_s = np.bincount(blocks["device"], weights=blocks["received_s"] - blocks["sent_s"])
    used = len(np.unique(blocks["device"]))
    busiest = np.argsort(-busy_s, kind="stable")[: min(TRACE_DEVICES, used)]
    shown = np.flatnonzero(np.isin(blocks["device"], busiest))[:TRACE_BLOCKS]
    blocks_shown = 0
    for device in busiest.tolist():
        rows = shown[blocks["device"][shown] == device].tolist()
        if rows:
            begins, ends = blocks["sent_s"][rows].tolist(), blocks["received_s"][rows].tolist()
            blocks_shown += tracks.add(
                run.name("device_name", rows[0]),
                [
                    (run.name("product", row), begin, end, _about(blocks, row))
                    for row, begin, end in zip(rows, begins, ends, strict=True)
                ],
            )
    return tracks.events, {
        "blocks_shown": blocks_shown,
        "devices_shown": len(busiest),
        "left_out": {
            "blocks": len(blocks["sent_s"]) - blocks_shown,
            "devices": used - len(busiest),
            "products": len(jobs) - products_shown,
            "steps": len(steps) - steps_shown,
        },
        "note": f"Slices: at most the {TRACE_DEVICES} busiest devices, of those the first {TRACE_BLOCKS:,} blocks, "
        f"{TRACE_LANES} at a time. The counter has the blocks of all devices. Everything is in blocks.parquet.",
    }


class Tracks:
    """Trace events so far. Slices of one track may not overlap (viewers would draw them as nested calls, or drop them),
    so overlapping slices go to further tracks below the first, up to TRACE_LANES."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.group = 0
        self._tracks = 0

    def begin_group(self, name: str) -> None:
        self.group += 1
        self._label("process", 0, name, self.group)

    def add(self, name: str, slices: Sequence[tuple[str, float, float, dict[str, Any]]]) -> int:
        """Slices sorted by their start; returns how many fit."""
        lanes = _lanes([(begin, end) for _, begin, end, _ in slices])
        used = 1 + max((lane for lane in lanes if lane is not None), default=-1)
        first = self._tracks + 1
        self._tracks += used
        for lane in range(used):
            self._label("thread", first + lane, f"{name}, overlapping {lane + 1}" if lane else name, first + lane)
        for (title, begin, end, about), place in zip(slices, lanes, strict=True):
            if place is not None:
                head = {"ph": "X", "pid": self.group, "tid": first + place, "name": title}
                times = {"ts": _us(begin), "dur": round(_us(end) - _us(begin), 3)}
                self.events.append({**head, **times, "args": about})
        return sum(lane is not None for lane in lanes)

    def _label(self, what: str, track: int, name: str, order: int) -> None:
        head = {"ph": "M", "pid": self.group, "tid": track}
        self.events.append({**head, "name": f"{what}_name", "args": {"name": name}})
        self.events.append({**head, "name": f"{what}_sort_index", "args": {"sort_index": order}})


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
    """Blocks in flight: at every change, or at evenly spaced times if there are too many changes."""
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
    """A lane for each span, such that no two spans overlap in a lane; None if no lane is free. Spans are sorted by
    start."""
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


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


# ---------------------------------------------------------------------------------------------------- report.html


def write_report(folder: Path, path: Path | None = None) -> Path:
    """report.html of the run in this folder: verdict, losses, times, the summary and the slowest devices on one
    page."""
    run = read_run(folder)
    path = path or folder / "report.html"
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
    difference = s.get("loss_max_abs_diff")  # null if a loss is not a number
    body = [
        element("h1", title),
        _verdict(s),
        element(
            "div",
            _figure(
                "Loss", f"largest difference {math.nan if difference is None else difference:.1e}", line_chart(losses)
            ),
            _figure("Seconds per step", _percentiles(s), line_chart(seconds, from_zero=True)),
            _figure("Time of a block", "from sent to received", histogram(took_s)),
            _figure("Lateness of a block", "time received, after the time due by the model", histogram(late_s)),
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
    known = {name: value for name, value in s.get("step_s", {}).items() if value is not None}  # of a run without steps
    return ", ".join(f"{name} {format_duration(value)}" for name, value in known.items()) or "no step was completed"


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
            ("real device" if blocks["real"][first[i]] else "not modelled")
            if math.isnan(late_mean_s[i])
            else format_duration(float(late_mean_s[i])),
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
        for row in (steps[i] for i in some(len(steps), STEPS_LISTED))
    ]
    return _table(("step", "loss", "plain PyTorch", "difference", "time", "blocks", "bytes down"), rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "numbers") -> Markup:
    head = element("tr", (element("th", heading) for heading in headings)) if any(headings) else Markup()
    body = [element("tr", (element("td", cell) for cell in row)) for row in rows]
    return element("div", element("table", head, body, class_=class_), class_="wide")


def _flat(value: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Every key of the summary in readable form; lists of numbers are in the charts and the table of steps."""
    for key, item in value.items():
        words = f"{prefix}{key}".replace("_", " ").split()
        label = " ".join(word for word in words if word != "s")  # the unit is in the value
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key} ")
        elif isinstance(item, list):
            if not all(isinstance(entry, (int, float)) for entry in item):
                yield label, "; ".join(str(entry) for entry in item)
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            yield label, _human(words, item)
        else:
            yield label, str(item)


def _human(words: list[str], value: float) -> str:
    if "bytes" in words:
        return format_size(value)
    if "s" in words:
        return format_duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


_STYLE = """
:root { color-scheme: light dark; --page: #fbfbf9; --ink: #1c1d1f; --soft: #62666d; --line: #dddfe2; --card: #ffffff;
  --one: #1f6fd0; --two: #e2862d; --good: #18794e; --fair: #9a6200; --bad: #c22f26; }
@media (prefers-color-scheme: dark) { :root { --page: #17181a; --ink: #e9e9e7; --soft: #a0a4ab; --line: #34373b;
  --card: #1f2124; --one: #6aaef7; --two: #f0a04f; --good: #4cc38a; --fair: #e5b24b; --bad: #ff7b70; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
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
.curve.two { stroke: var(--two); stroke-width: 7; stroke-opacity: .5; }
circle.one, rect.one { fill: var(--one); } rect.two { fill: var(--two); } circle.two { fill: transparent; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right; white-space: nowrap; }
.key td:first-child { color: var(--soft); white-space: nowrap; }
details { margin-top: 28px; } details summary { cursor: pointer; font-size: 18px; font-weight: 600; }
"""
