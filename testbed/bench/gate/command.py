"""`python -m testbed.bench gate`: measure all rows, compare them with the baseline, say what to do."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.table import Table

from agent.protocol.errors import UserError
from testbed.bench.gate.judge import BASELINE, WORSE, Judged, Measured, baseline_of, better, judge, read_baseline
from testbed.bench.gate.rows import PARTS, Part
from testbed.bench.tables.where import where
from testbed.runs.display import Display

BUSY = 0.25  # of the machine: above this share, other programs may be the reason of a bad figure
AGAIN = 2  # at most this often a row is measured again before it fails: one busy moment is no regression
PASSES = 3  # measurements of each row for a new baseline; the median counts


class Others:
    """How much of this machine's processors programs outside this one have used since then."""

    def __init__(self) -> None:
        self._begun = self._spent()

    @staticmethod
    def _spent() -> tuple[float, float, float]:
        """Seconds of all processors, busy seconds, and those of this process and its ended children."""
        of, mine = psutil.cpu_times(), os.times()
        return sum(of[:8]), sum(of[:8]) - of.idle - getattr(of, "iowait", 0.0), sum(mine[:4])

    def share(self) -> float:
        every, busy, mine = (now - begun for now, begun in zip(self._spent(), self._begun, strict=True))
        return max(0.0, busy - mine) / max(every, 1e-9)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench gate", description=__doc__)
    parser.add_argument("--rows", help=f"only these, comma-separated: {', '.join(_names(PARTS))}")
    parser.add_argument("--write-baseline", action="store_true", help="measure several times and keep the medians")
    parser.add_argument("--passes", type=int, default=PASSES, help="measurements for a new baseline (%(default)s)")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="compare with this file, or write it")
    options = parser.parse_args(arguments)
    display = Display()
    try:
        parts = _chosen(options.rows)
        if options.write_baseline:
            if options.rows:
                raise UserError("a baseline has all rows: leave out --rows")
            return _write(parts, options.baseline, max(1, options.passes), display)
        return _compare(parts, options.baseline, display)
    except UserError as error:
        display.print(str(error))
        return 2


def _names(parts: Sequence[Part]) -> list[str]:
    return [row for part in parts for row in part.rows]


def _chosen(rows: str | None) -> list[Part]:
    if rows is None:
        return list(PARTS)
    wanted = [row.strip() for row in rows.split(",")]
    if unknown := set(wanted) - set(_names(PARTS)):
        raise UserError(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join(_names(PARTS))}")
    return [part for part in PARTS if set(part.rows) & set(wanted)]


def _measured(parts: Sequence[Part], display: Display) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    left_s = sum(part.takes_s for part in parts)
    for part in parts:
        display.say(f"{', '.join(part.rows)}: in turn with {part.yardstick}; about {left_s} s left")
        try:
            found |= part.measure()
        except RuntimeError as error:  # for example, a product that did not end on an overloaded machine
            display.say(f"{', '.join(part.rows)}: not measured, {error}")
            found |= dict.fromkeys(part.rows, Measured(math.inf, 1.0, remark="not measured"))
        left_s -= part.takes_s
    return found


def _compare(parts: Sequence[Part], path: Path, display: Display) -> int:
    baseline, others = read_baseline(path), Others()
    judged = judge(_measured(parts, display), baseline)
    for _ in range(AGAIN):
        failed = [part for part in parts if any(one.fails and one.baseline is not None for one in _of(judged, part))]
        if not failed:
            break
        display.say("measured again before it counts: " + ", ".join(_names(failed)))
        again = _measured(failed, display)
        judged = [better(one, again[one.row]) if one.row in again else one for one in judged]
    _print(judged, display)
    failed_at_last = any(one.fails for one in judged)
    if failed_at_last and (share := others.share()) > BUSY:
        display.print(f"Other programs used {share:.0%} of this machine meanwhile: measure again when it is quieter.")
    return int(failed_at_last)


def _of(judged: Sequence[Judged], part: Part) -> list[Judged]:
    return [one for one in judged if one.row in part.rows]


def _write(parts: Sequence[Part], path: Path, count: int, display: Display) -> int:
    passes = []
    for number in range(1, count + 1):
        display.say(f"baseline, pass {number} of {count}")
        passes.append(_measured(parts, display))
    if not all(math.isfinite(of.ratio) for found in passes for of in found.values()):
        raise UserError("a row could not be measured, so there is no new baseline; see above")
    try:
        path.write_text(json.dumps(baseline_of(passes, where()), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the baseline {path}: {error.strerror}") from None
    display.print(f"{path.name} is written. Commit it alone, with the reason in the message.")
    return 0


def _print(judged: Sequence[Judged], display: Display) -> None:
    table = Table(title="make bench-gate: ours as a multiple of the yardstick; less is better", title_justify="left")
    for heading in ("row", "ours", "yardstick", "ratio", "baseline", "worse by", f"at most {WORSE:.0%}"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for one in judged:
        of = one.measured
        table.add_row(
            f"{one.row}, {of.remark}" if of.remark else one.row,
            of.text(of.ours),
            of.text(of.yardstick),
            f"{of.ratio:.3g}",
            "none" if one.baseline is None else f"{one.baseline:.3g}",
            f"{one.change:+.0%}",
            "[red]no[/red]" if one.fails else "[green]yes[/green]",
        )
    display.print(table)
    for one in judged:
        if one.advice:
            display.print(one.advice)
