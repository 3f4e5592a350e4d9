"""`cleave trace inspect`: the contents of an availability trace, as a table, a plot in the terminal, JSON or SVG.

Sessions count as they are in the trace, including those cut by its start or end; a session that lasts until the end is
not a departure. The plot shows means over equal parts of the trace, not samples, so that no change is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.protocol.errors import UserError
from agent.protocol.units import format_count, format_duration
from emulator.availability.availability import AvailabilityTrace, Floats
from testbed.results.charts import area_chart

ROWS = 8  # of the plot in the terminal
POINTS = 96  # of the series in JSON and SVG; half an hour each in a trace of two days
EIGHTHS = " ▁▂▃▄▅▆▇█"
HALVES = " .:"  # for terminals that cannot show block characters


@dataclass(frozen=True, slots=True)
class Percentiles:
    p10: float
    p50: float
    p90: float
    mean: float

    @classmethod
    def of(cls, values: Floats) -> Percentiles | None:
        """None if there are no values."""
        if not len(values):
            return None
        p10, p50, p90 = np.percentile(values, [10, 50, 90]).tolist()
        return cls(p10, p50, p90, float(values.mean()))


@dataclass(frozen=True, slots=True)
class Measures:
    devices: int
    never_there: int  # devices without a session
    sessions: int
    duration_s: float
    session_s: Percentiles | None
    gap_s: Percentiles | None
    departures: int
    departures_per_available_hour: float
    mean_availability: float  # mean share of devices present, over time
    available_hours_a_day: float


def measure(trace: AvailabilityTrace) -> Measures:
    lengths_s = trace.end_s - trace.start_s
    available_s = float(lengths_s.sum())
    departures = int((trace.end_s < trace.duration_s).sum())
    share = available_s / (trace.duration_s * len(trace))
    return Measures(
        devices=len(trace),
        never_there=len(trace) - len(np.unique(trace.device)),
        sessions=len(lengths_s),
        duration_s=trace.duration_s,
        session_s=Percentiles.of(lengths_s),
        gap_s=Percentiles.of(trace.gaps_s()),
        departures=departures,
        departures_per_available_hour=3600 * departures / available_s if available_s else 0.0,
        mean_availability=share,
        available_hours_a_day=24 * share,
    )


def as_json(trace: AvailabilityTrace) -> dict[str, Any]:
    series = {"part_s": trace.duration_s / POINTS, "share": trace.availability(POINTS).tolist()}
    about = {"source": trace.source, "origin_s": trace.origin_s, "repairs": asdict(trace.repairs)}
    return about | asdict(measure(trace)) | {"availability": series}


def print_trace(console: Console, trace: AvailabilityTrace) -> None:
    found = measure(trace)
    table = Table(title=Text(trace.source), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    never = f" ({format_count(found.never_there)} never there)" if found.never_there else ""
    table.add_row("devices", f"{format_count(found.devices)}{never}")
    table.add_row("sessions", format_count(found.sessions))
    table.add_row("duration", format_duration(found.duration_s))
    table.add_row("session p10 / p50 / p90", _spread(found.session_s))
    table.add_row("gap p10 / p50 / p90", _spread(found.gap_s))
    table.add_row("departures per available device-hour", f"{found.departures_per_available_hour:.3g}")
    hours = f"{found.available_hours_a_day:.3g} h per day"
    table.add_row("mean availability", f"{100 * found.mean_availability:.3g}% ({hours})")
    console.print(table)
    for line in trace.repairs.told():
        console.print(f"repaired: {line}", soft_wrap=True)
    console.print("share of devices present, over time")
    glyphs = EIGHTHS if console.encoding.lower().startswith("utf") else HALVES
    for line in plot(trace, console.width, glyphs):
        console.print(Text(line), no_wrap=True, overflow="crop")


def plot(trace: AvailabilityTrace, width: int, glyphs: str = EIGHTHS) -> list[str]:
    """Availability over time as lines of text, each at most `width` characters."""
    margin = len("100.0% ")
    columns = max(10, width - margin - 1)  # leave the last column free: some terminals wrap when it is filled
    shares = trace.availability(columns)
    top = float(shares.max())
    lines = []
    for number, row in enumerate(bars(shares / top, ROWS, glyphs)):
        label = f"{100 * top * (ROWS - number) / ROWS:.1f}%" if number % 2 == 0 else ""
        lines.append(f"{label:>{margin - 1}} {row}".rstrip())
    middle, end = format_duration(trace.duration_s / 2), format_duration(trace.duration_s)
    left = columns // 2 - len(middle) // 2
    roomy = columns >= len(middle) + 2 * len(end) + 6
    axis = "0".ljust(left) + middle if roomy else "0"
    return [*lines, " " * margin + axis + end.rjust(columns - len(axis))]


def bars(heights: Floats, rows: int, glyphs: str) -> list[str]:
    """Columns of heights 0 to 1, from the top row to the bottom row. Any height above 0 is visible."""
    steps = len(glyphs) - 1
    filled = np.ceil(np.round(heights * rows * steps, 6)).astype(int)
    return ["".join(glyphs[min(max(f - row * steps, 0), steps)] for f in filled) for row in reversed(range(rows))]


def _spread(values: Percentiles | None) -> str:
    if values is None:
        return "none"
    return " / ".join(format_duration(value) for value in (values.p10, values.p50, values.p90))


def write_svg(path: Path, trace: AvailabilityTrace) -> None:
    if path.suffix.lower() != ".svg":
        raise UserError(f"--svg is {path}; it draws SVG, which any browser opens: give the file a name in .svg")
    shares: Sequence[float] = (100 * trace.availability(POINTS)).tolist()
    unit_s, unit = next(
        (s, u) for s, u in ((3600.0, "h"), (60.0, "min"), (1.0, "s")) if trace.duration_s >= 2 * s or s == 1
    )
    title = f"{len(trace):,} devices of {Path(trace.source).name}: share present"
    try:
        path.write_text(area_chart(title, trace.duration_s / unit_s, unit, shares, "%"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the drawing to {path}: {error.strerror}") from None
