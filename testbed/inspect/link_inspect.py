"""`cleave trace link`: the contents of link traces, per direction, as a table with a line of bars, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.protocol.units import format_duration, format_rate
from emulator.links.rate_trace import RateTrace, read_link_trace, read_rate_trace
from testbed.inspect.availability import EIGHTHS, HALVES, bars

WINDOW_S = 1.0  # window of the percentiles


def read_directions(files: Sequence[Path]) -> dict[str, RateTrace]:
    """Each file by its name; a prefix stands for both directions."""
    read: dict[str, RateTrace] = {}
    for file in files:
        if file.is_file():
            read[file.name] = read_rate_trace(file)
        else:
            link = read_link_trace(str(file))
            read |= {f"{file.name}, down": link.down, f"{file.name}, up": link.up}
    return read


def as_json(traces: dict[str, RateTrace]) -> list[dict[str, Any]]:
    return [{"trace": name, **_measures(trace)} for name, trace in traces.items()]


def print_directions(console: Console, traces: dict[str, RateTrace]) -> None:
    glyphs = EIGHTHS if console.encoding.lower().startswith("utf") else HALVES
    for name, trace in traces.items():
        found = _measures(trace)
        table = Table(title=Text(name), title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("duration", format_duration(found["duration_s"]))
        table.add_row("mean rate", format_rate(found["mean_bps"]))
        spread = [format_rate(found["second_bps"][p]) for p in ("p10", "p50", "p90")]
        table.add_row("seconds p10 / p50 / p90", " / ".join(spread))
        table.add_row("longest time without a packet", format_duration(found["longest_gap_s"]))
        console.print(table)
        columns = max(10, console.width - 1)
        edges_s = np.linspace(0.0, trace.length_s, columns + 1)
        edges_s[-1] *= 1 - 1e-12  # at its end the trace starts again
        rates = np.diff(trace.passed(edges_s))
        console.print(Text(bars(rates / max(rates.max(), 1.0), 1, glyphs)[0]), no_wrap=True, overflow="crop")


def _measures(trace: RateTrace) -> dict[str, Any]:
    p10, p50, p90 = np.percentile(trace.rates_bps(WINDOW_S), [10, 50, 90]).tolist()
    gaps_ms = np.diff(np.append(trace.at_ms, trace.at_ms[-1] + trace.at_ms[0]))
    return {
        "duration_s": trace.length_s,
        "packets": len(trace.at_ms),
        "mean_bps": trace.mean_bps,
        "second_bps": {"p10": p10, "p50": p50, "p90": p90},
        "longest_gap_s": float(gaps_ms.max()) / 1e3,
    }
