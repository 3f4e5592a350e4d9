"""Traces from files. The three formats are recognised by extension or, failing that, by content:

    .csv    a header with device, start_s and end_s, then one row per interval of availability; other columns are
            ignored
    .json   {"phone-1": [[0, 3600], [7200, 9000]], "phone-2": []}
            or [{"device": "phone-1", "start_s": 0, "end_s": 3600}, ...]
    .tab    an event trace of the Failure Trace Archive (fta.scem.westernsydney.edu.au, "FTAFormat"): a header and
            white-space columns. Reads node_id, event_type (0 unavailable, 1 available), event_start_time and
            event_stop_time, and platform_id and component_id where present

All times are in seconds and may be Unix time. In an event trace a node is available only where a row says so; a node
without such a row is left out and counted, because its availability is unknown. Reads the whole file into memory;
assumes UTF-8.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.protocol.errors import UserError
from emulator.availability.availability import LATEST_S, AvailabilityTrace, TraceError, trace_of

INTERVAL_COLUMNS = ("device", "start_s", "end_s")
EVENT_COLUMNS = ("node_id", "event_type", "event_start_time", "event_stop_time")


def read_trace(path: Path) -> AvailabilityTrace:
    """The trace in a file; TraceError gives the file, the line, what is wrong and what to do."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file; check the path") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: this is not text; unpack it first if it is packed") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise TraceError(f"{path}: the file is empty; it needs a header and at least one interval")
    readers = {"csv": _read_intervals, "json": _read_json, "tab": _read_events}
    return readers[_format(path, text)](path, text)


def _format(path: Path, text: str) -> str:
    known = path.suffix.lower().removeprefix(".")
    if known in ("csv", "json", "tab"):
        return known
    first_line = text.lstrip().partition("\n")[0]
    if first_line[0] in "{[":
        return "json"
    if "event_type" in first_line:
        return "tab"
    if "," in first_line:
        return "csv"
    raise TraceError(
        f"{path}: not a known kind of trace; give a .csv with the header {','.join(INTERVAL_COLUMNS)}, "
        "a .json of intervals, or a .tab event trace of the Failure Trace Archive"
    )


class _Intervals:
    """Intervals as they are read, each checked together with its place in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: dict[str, int] = {}  # name -> index, in order of appearance
        self.device: list[int] = []
        self.start_s: list[float] = []
        self.end_s: list[float] = []

    def wrong(self, place: str, text: str) -> TraceError:
        return TraceError(f"{self.path}, {place}: {text}")

    def name(self, place: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
            raise self.wrong(place, f"the device is {value!r}; give every interval the name or number of its device")
        return self.index.setdefault(str(value).strip(), len(self.index))

    def seconds(self, place: str, column: str, value: object) -> float:
        try:
            seconds = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            seconds = None
        if seconds is None or not math.isfinite(seconds):
            raise self.wrong(place, f"{column} is {value!r}, not a finite number; write seconds such as 3600")
        if seconds < 0:
            raise self.wrong(place, f"{column} is {value}, before 0; count all times from an earlier moment")
        if seconds > LATEST_S:
            raise self.wrong(place, f"{column} is {value}, which is too late; are these milliseconds? write seconds")
        return seconds

    def ordered(self, place: str, columns: tuple[str, str], start: object, end: object) -> tuple[float, float]:
        start_s, end_s = self.seconds(place, columns[0], start), self.seconds(place, columns[1], end)
        if end_s < start_s:
            raise self.wrong(
                place, f"{columns[1]} {end} is before {columns[0]} {start}; are the columns swapped? correct or drop it"
            )
        return start_s, end_s

    def add(self, device: int, start_s: float, end_s: float) -> None:
        self.device.append(device)
        self.start_s.append(start_s)
        self.end_s.append(end_s)

    def trace(self, window_s: tuple[float, float] | None = None, silent: int = 0) -> AvailabilityTrace:
        if all(end_s == start_s for start_s, end_s in zip(self.start_s, self.end_s, strict=True)):
            raise TraceError(
                f"{self.path}: no interval with a length, so no device is ever available; give at least one"
            )
        return trace_of(
            tuple(self.index),
            self.device,
            self.start_s,
            self.end_s,
            window_s=window_s,
            silent=silent,
            source=str(self.path),
        )


def _read_intervals(path: Path, text: str) -> AvailabilityTrace:
    intervals = _Intervals(path)
    for place, row in _rows(path, _csv_rows(path, text), INTERVAL_COLUMNS, f"a header {','.join(INTERVAL_COLUMNS)}"):
        device = intervals.name(place, row["device"])
        intervals.add(device, *intervals.ordered(place, ("start_s", "end_s"), row["start_s"], row["end_s"]))
    return intervals.trace()


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield reader.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise TraceError(f"{path}, line {reader.line_num}: not CSV ({error}); quote cells that hold commas") from None


def _read_events(path: Path, text: str) -> AvailabilityTrace:
    lines = enumerate(text.split("\n"), start=1)
    cells = ((number, (line.lstrip().removeprefix("#") if number == 1 else line).split()) for number, line in lines)
    intervals = _Intervals(path)
    first_s, last_s = math.inf, -math.inf
    platforms: set[str] = set()
    nodes: dict[tuple[str, str], str] = {}  # (platform, node) -> component
    available: list[tuple[tuple[str, str], float, float]] = []
    for place, row in _rows(path, cells, EVENT_COLUMNS, f"a header with {', '.join(EVENT_COLUMNS)}"):
        start_s, stop_s = intervals.ordered(
            place, ("event_start_time", "event_stop_time"), row["event_start_time"], row["event_stop_time"]
        )
        node = row.get("platform_id", ""), row["node_id"]
        component = row.get("component_id", "")
        if nodes.setdefault(node, component) != component:
            raise intervals.wrong(
                place, f"node {node[1]} has components {nodes[node]} and {component}; keep the rows of one component"
            )
        if row["event_type"] not in ("0", "1"):
            raise intervals.wrong(place, f"event_type is {row['event_type']!r}; it must be 0 (unavailable) or 1")
        platforms.add(node[0])
        first_s, last_s = min(first_s, start_s), max(last_s, stop_s)
        if row["event_type"] == "1":
            available.append((node, start_s, stop_s))
    for node, start_s, stop_s in available:
        name = node[1] if len(platforms) == 1 else "/".join(node)
        intervals.add(intervals.index.setdefault(name, len(intervals.index)), start_s, stop_s)
    if not available:
        raise TraceError(f"{path}: no row has event_type 1 (available); give at least one")
    return intervals.trace((first_s, last_s), silent=len(nodes) - len(intervals.index))


def _rows(
    path: Path, lines: Iterator[tuple[int, list[str]]], needed: tuple[str, ...], wanted: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row after the header as column -> cell, with its place in the file; empty lines are skipped."""
    header: list[str] | None = None
    for number, cells in lines:
        if not any(cells):
            continue
        if header is None:
            header = cells
            missing = [column for column in needed if column not in header]
            if missing:
                found = ", ".join(repr(cell) for cell in header[:10])
                raise TraceError(
                    f"{path}, line {number}: missing column {', '.join(missing)}; the first line must be {wanted}, "
                    f"and is {found}"
                )
        elif len(cells) != len(header):
            raise TraceError(
                f"{path}, line {number}: {len(cells)} cells where the header has {len(header)}; complete or drop it"
            )
        else:
            yield f"line {number}", dict(zip(header, cells, strict=True))


def _read_json(path: Path, text: str) -> AvailabilityTrace:
    try:
        document = json.loads(text, object_pairs_hook=_no_name_twice)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}: not JSON ({error.msg}); correct it there") from None
    except UserError as error:
        raise TraceError(f"{path}: {error}") from None
    except (ValueError, RecursionError):  # numbers with thousands of digits, thousands of brackets
        raise TraceError(f"{path}: JSON without intervals; see `cleave trace inspect --help`") from None
    intervals = _Intervals(path)
    if isinstance(document, dict):
        for name, listed in document.items():
            device = intervals.name(f"device {name!r}", name)
            if not isinstance(listed, list):
                raise intervals.wrong(f"device {name!r}", "its value must be a list such as [[0, 3600], [7200, 9000]]")
            for number, pair in enumerate(listed, start=1):
                place = f"device {name!r}, interval {number}"
                if not isinstance(pair, list) or len(pair) != 2:
                    raise intervals.wrong(place, f"{_short(pair)} is not a pair such as [0, 3600]")
                intervals.add(device, *intervals.ordered(place, ("start_s", "end_s"), *pair))
    elif isinstance(document, list):
        for number, entry in enumerate(document, start=1):
            place = f"entry {number}"
            missing = [key for key in INTERVAL_COLUMNS if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise intervals.wrong(
                    place, f'missing {", ".join(missing)}; write {{"device": "phone-1", "start_s": 0, "end_s": 3600}}'
                )
            device = intervals.name(place, entry["device"])
            intervals.add(device, *intervals.ordered(place, ("start_s", "end_s"), entry["start_s"], entry["end_s"]))
    else:
        raise TraceError(f'{path}: neither {{"phone-1": [[0, 3600], ...], ...}} nor a list of intervals; write one')
    return intervals.trace()


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{twice!r} appears twice in one object; put its intervals into one list")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
