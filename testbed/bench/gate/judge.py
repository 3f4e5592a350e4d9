"""Compares measured ratios with the baseline: pure, no measuring.

A figure is what we take divided by what the yardstick took in the same run, so smaller is better, and a slower machine
changes both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.protocol.errors import UserError

FORMAT = 1
WORSE = 0.30  # a row may be this much worse: three runs in a row on a busy machine differed by less than half of it
BASELINE = Path(__file__).resolve().parents[1] / "baseline.json"
WRITE = "python -m testbed.bench gate --write-baseline"


@dataclass(frozen=True, slots=True)
class Measured:
    ours: float
    yardstick: float
    unit: str = "s"
    remark: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.yardstick

    def text(self, figure: float) -> str:
        return f"{figure:.3g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Judged:
    row: str
    measured: Measured
    baseline: float | None  # None: the baseline has no such row
    times: int = 1  # how often it was measured; the best counts

    @property
    def change(self) -> float:
        """By how much of the baseline it is worse; negative: better."""
        return 0.0 if self.baseline is None else self.measured.ratio / self.baseline - 1.0

    @property
    def fails(self) -> bool:
        return self.baseline is None or self.change > WORSE

    @property
    def advice(self) -> str:
        """What to do; empty if nothing."""
        if self.baseline is None:
            return f"{self.row}: the baseline has no such row. Write it: {WRITE}"
        if self.fails:
            return (
                f"{self.row}: {self.change:.0%} worse than the baseline, {WORSE:.0%} are allowed; measured "
                f"{self.times} times, the best counts. Mend it. If it is the price of something better, write the "
                f"baseline in a commit of its own that says why: {WRITE}"
            )
        if self.measured.ratio * (1.0 + WORSE) < self.baseline:
            return f"{self.row}: {-self.change:.0%} better than the baseline. To keep that, write the baseline: {WRITE}"
        return ""


def judge(measured: Mapping[str, Measured], baseline: Mapping[str, float]) -> list[Judged]:
    return [Judged(row, of, baseline.get(row)) for row, of in measured.items()]


def better(first: Judged, again: Measured) -> Judged:
    """A row after a second measurement."""
    best = min(first.measured, again, key=lambda of: of.ratio)
    return Judged(first.row, best, first.baseline, first.times + 1)


def read_baseline(path: Path = BASELINE) -> dict[str, float]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the baseline {path.name}: {error.strerror}. Write it: {WRITE}") from None
    except ValueError:
        raise UserError(f"the baseline {path.name} is not JSON. Write it again: {WRITE}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise UserError(f"the baseline {path.name} has another format than this program's. Write it again: {WRITE}")
    return {row: float(of["ratio"]) for row, of in told["rows"].items()}


def baseline_of(passes: Sequence[Mapping[str, Measured]], where: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline's text: per row the median of the passes, which it keeps too."""
    rows = {}
    for row in passes[0]:
        ratios = sorted(of[row].ratio for of in passes)
        rows[row] = {"ratio": _short(ratios[len(ratios) // 2]), "passes": [_short(ratio) for ratio in ratios]}
    return {"format": FORMAT, **where, "rows": rows}


def _short(ratio: float) -> float:
    """Four digits say more than any pass repeats."""
    return float(f"{ratio:.4g}")
