"""Chooses the clock of a run: "auto" is real time if this host keeps up, and as much slower as it must be if not.

The scale is found by trying: short probes with the scenario's own model and fleet, each judged as a run is judged
(emulator/model/scales.py says which scale comes next). What was found is kept for the same scenario on the same host
(testbed/results/known_scales.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from emulator.model.fidelity import STRETCH_ENOUGH, Fidelity
from emulator.model.scales import Trial, guess, least_honest, next_scale, rounded
from testbed.runs.scenario import ClockSection

SEARCH_S = 100.0  # for all probes and capturing; with reference and prediction the first step begins within 3 minutes

Probe = Callable[[float, float], Fidelity]  # the scale, and the seconds that are left


@dataclass(frozen=True, slots=True)
class Chosen:
    kind: str  # wall, scaled or virtual
    scale: float
    arithmetic: bool
    why: str
    trials: tuple[Trial, ...] = ()  # of this choice, or of the one that is kept


def choose(
    asked: ClockSection,
    probe: Probe,
    known: tuple[Trial, ...] = (),
    tell: Callable[[str], None] = lambda text: None,
    limit_s: float = SEARCH_S,
    now_s: Callable[[], float] = time.monotonic,
) -> Chosen:
    """`probe` runs a step at a scale; it is called only for "auto", and not if `known` trials of an earlier search
    suffice."""
    if asked.kind != "auto":
        return Chosen(asked.kind, asked.scale, asked.arithmetic, "as asked", known)
    if (scale := least_honest(known, STRETCH_ENOUGH)) is not None:
        return _chosen(scale, f"it was found earlier for this scenario on this host ({_told(known)})", known)
    trials, begun_s, shortest_s = list[Trial](), now_s(), math.inf
    while (scale := next_scale(trials, STRETCH_ENOUGH)) is not None:
        left_s = limit_s - (now_s() - begun_s)
        if len(trials) > 1 and left_s < shortest_s:  # the first one, in real time, tells little by itself
            break
        probed_s = now_s()
        seen = probe(scale, left_s)
        shortest_s = min(shortest_s, now_s() - probed_s)
        trials.append(Trial(scale, max(seen.stretch, seen.step_stretch or 1.0)))
        honest = "honest" if trials[-1].honest(STRETCH_ENOUGH) else "too fast for this host"
        left_s = max(0.0, limit_s - (now_s() - begun_s))
        tell(f"clock: {_at(trials[-1])}: {honest}; at most {left_s:.0f} s left")
    return _found(tuple(trials))


def _found(trials: tuple[Trial, ...]) -> Chosen:
    if (scale := least_honest(trials, STRETCH_ENOUGH)) is None:  # out of time
        last = max(trials, key=lambda trial: trial.scale)
        scale = rounded(guess(last, STRETCH_ENOUGH))
        return _chosen(scale, f"it is an estimate: no scale that was tried is honest ({_told(trials)})", trials)
    if scale == 1.0:
        return _chosen(scale, f"this host keeps up ({_told(trials)})", trials)
    return _chosen(scale, f"it is the least scale that was found honest ({_told(trials)})", trials)


def _chosen(scale: float, why: str, trials: tuple[Trial, ...]) -> Chosen:
    return Chosen("wall" if scale == 1.0 else "scaled", scale, True, why, trials)


def _told(trials: tuple[Trial, ...]) -> str:
    return ", ".join(_at(trial) for trial in sorted(trials, key=lambda trial: trial.scale))


def _at(trial: Trial) -> str:
    return f"at {trial.scale:g}x times {100 * (trial.stretch - 1):.1f}% too long"
