"""Chooses the clock of a run: "auto" is real time if this host keeps up, and slower if it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emulator.model.fidelity import VALID, Fidelity
from testbed.runs.scenario import ClockSection


@dataclass(frozen=True, slots=True)
class Chosen:
    kind: str  # wall, scaled or virtual
    scale: float
    arithmetic: bool
    why: str


def choose(asked: ClockSection, probe: Callable[[float], Fidelity]) -> Chosen:
    """`probe` runs one step at a scale; it is called only for "auto"."""
    if asked.kind != "auto":
        return Chosen(asked.kind, asked.scale, asked.arithmetic, "as asked")
    seen = probe(1.0)
    late = f"one step in real time: blocks {100 * (seen.stretch - 1):.1f}% too long"
    if seen.step_stretch is not None:
        late += f", the step {100 * (seen.step_stretch - 1):.1f}%"
    if seen.verdict == VALID:
        return Chosen("wall", 1.0, True, f"this host keeps up ({late})")
    causes = "; ".join(seen.causes)
    return Chosen("scaled", seen.scale_needed, True, f"this host does not keep up ({late}; {causes})")
