"""How slow the clock must be for this host: the least scale at which its times are honest, from trials at some scales.

A trial says by how much blocks or steps were too long at a scale. Two bounds follow from one that was too long. If the
host was saturated, it needs the time that it took, which is the modelled time at `scale * stretch`. If it was late now
and then, the same delays are within what is allowed at a scale in proportion to the excess. The truth lies between the
two, often an order of magnitude apart; only further trials tell. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

CLOSE = 1.25  # the search ends when an honest scale is at most this multiple of one that is not


@dataclass(frozen=True, slots=True)
class Trial:
    scale: float
    stretch: float  # of blocks or of steps, the larger; 1: exact

    def honest(self, allowed: float) -> bool:
        return self.stretch <= allowed


def bounds(trial: Trial, allowed: float) -> tuple[float, float]:
    """The scales between which the least honest one lies, as far as a trial that was too long can tell."""
    saturated = trial.scale * trial.stretch / allowed
    return saturated, max(saturated, trial.scale * (trial.stretch - 1) / (allowed - 1))


def guess(trial: Trial, allowed: float) -> float:
    """A scale between the bounds: the longer the trial took, the more surely the host was saturated."""
    saturated, delayed = bounds(trial, allowed)
    return float(saturated ** (1 - 1 / trial.stretch) * delayed ** (1 / trial.stretch))


def next_scale(trials: Iterable[Trial], allowed: float) -> float | None:
    """The scale to try next; None once the least honest scale is known closely enough. Without trials, real time."""
    tried = sorted(trials, key=lambda trial: trial.scale)
    if not tried:
        return 1.0
    high = least_honest(tried, allowed)
    failed = [trial for trial in tried if not trial.honest(allowed) and (high is None or trial.scale < high)]
    if not failed:
        return None if high == 1.0 else 1.0
    low = failed[-1].scale
    if high is None:
        most = math.inf if len(failed) == 1 else 2 * low  # near the least scale a guess may be far too high
        return rounded(min(most, max(CLOSE * low, guess(failed[-1], allowed))))
    if high <= CLOSE * low:
        return None
    # Expect the least scale just below the bound for a saturated host. Where trials below it are honest, too, go down
    # in ever larger steps.
    honest = sum(trial.honest(allowed) for trial in tried)
    least = min(bounds(failed[-1], allowed)[0] / CLOSE, high / CLOSE ** (2**honest))
    return between(math.sqrt(max(low, least) * high), low, high)


def least_honest(trials: Iterable[Trial], allowed: float) -> float | None:
    return min((trial.scale for trial in trials if trial.honest(allowed)), default=None)


def between(scale: float, low: float, high: float) -> float:
    """The scale in round numbers, if these lie strictly between the two."""
    near = rounded(scale)
    return near if low < near < high else scale


def rounded(scale: float) -> float:
    """Two digits, upwards: 14, 2.3, 150."""
    digit = 10.0 ** (math.floor(math.log10(scale)) - 1)
    return round(math.ceil(scale / digit - 1e-9) * digit, 6)
