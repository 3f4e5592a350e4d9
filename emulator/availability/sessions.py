"""Traces generated from published distributions: alternating sessions and absences, device by device.

Pure and seeded. Every device has its own random stream and durations are drawn in chunks of fixed size, so that
the first devices of a larger fleet equal a smaller fleet. A trace starts in equilibrium, not with all devices arriving
at once: a device is present with probability mean session / (mean session + mean absence), and its first interval is a
length-biased draw (long sessions are more likely to be met), of which a uniform share is left. Assumes independent
devices and no daily rhythm; where that rhythm matters, use a recorded trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from emulator.availability.availability import AvailabilityTrace, Floats, Indices, TraceError, trace_of

HOUR_S = 3600.0
MOST_SESSIONS = 20_000_000
_CHUNK = 32

FLASH_MU, FLASH_SIGMA = -0.484, 1.363  # log hours
FLASH_LONGEST_H = 28.5
FLASH_HOURS_PER_DAY = 2.3
SETI_UP_SHAPE, SETI_UP_SCALE_H = 0.393, 2.964
SETI_DOWN_MU, SETI_DOWN_SIGMA = -0.586, 2.844  # log hours

Draw = Callable[[np.random.Generator, int], Floats]


@dataclass(frozen=True, slots=True)
class Durations:
    """A distribution of durations: its mean, draws, and length-biased draws (density x f(x) / mean)."""

    mean_s: float
    draw: Draw
    draw_biased: Draw


def exponential(mean_s: float) -> Durations:
    return Durations(
        mean_s,
        lambda rng, count: rng.exponential(mean_s, count),
        lambda rng, count: rng.gamma(2.0, mean_s, count),
    )


def weibull(shape: float, scale_s: float) -> Durations:
    """x f(x) is a gamma of shape 1 + 1/shape in (x / scale) ** shape."""
    return Durations(
        scale_s * math.gamma(1 + 1 / shape),
        lambda rng, count: scale_s * rng.weibull(shape, count),
        lambda rng, count: scale_s * rng.gamma(1 + 1 / shape, 1.0, count) ** (1 / shape),
    )


def lognormal(mu: float, sigma: float, unit_s: float = 1.0, longest: float = math.inf) -> Durations:
    """exp(mu + sigma z) units; values above `longest` are redrawn. Length bias adds sigma ** 2 to mu."""

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    cut = (math.log(longest) - mu) / sigma
    mean = math.exp(mu + sigma**2 / 2) * below(cut - sigma) / below(cut)

    def draws(around: float) -> Draw:
        def draw(rng: np.random.Generator, count: int) -> Floats:
            drawn = rng.lognormal(around, sigma, count)
            while (over := drawn > longest).any():
                drawn[over] = rng.lognormal(around, sigma, int(over.sum()))
            return unit_s * drawn

        return draw

    return Durations(unit_s * mean, draws(mu), draws(mu + sigma**2))


def poisson_churn(
    devices: int, leave_per_s: float, mean_away_s: float, duration_s: float, seed: int
) -> AvailabilityTrace:
    """Each present device leaves at a constant rate and stays away for an exponential time: memoryless both ways, so
    that departures are a Poisson process. With a rate of 0 all devices stay."""
    if not (leave_per_s >= 0 and math.isfinite(leave_per_s)):
        raise TraceError(f"departures per second are {leave_per_s}; give 0 or more, e.g. 0.0002 (one in 83 minutes)")
    if not (mean_away_s > 0 and math.isfinite(mean_away_s)):
        raise TraceError(f"the mean absence is {mean_away_s} s; it must be more than 0, e.g. 600")
    if leave_per_s == 0:
        _check(devices, duration_s, math.inf)
        every_device = np.arange(devices)
        return _trace(every_device, np.zeros(devices), np.full(devices, duration_s), devices, duration_s, "poisson")
    return renewal(exponential(1 / leave_per_s), exponential(mean_away_s), devices, duration_s, seed, "poisson")


def flash_sessions(devices: int, duration_s: float, seed: int) -> AvailabilityTrace:
    """Phones that are locked, charging and on Wi-Fi, as in FLASH (Yang et al., WWW'21; 2,831 phones over 48 h, gaps up
    to 120 s merged, sessions under 60 s dropped).

    Session hours are lognormal, mu -0.484, sigma 1.363. That fit alone has a mean of 1.56 h, hence 0.64 departures per
    available hour, where the trace has 0.69: the fit's tail is longer than any session of the trace (22.7 h). Sessions
    above 28.5 h are redrawn, which gives a mean of 1.449 h = 1 / 0.69 and moves the median by 0.4%. A phone is present
    2.3 h per day, so the mean absence is 1.449 h (24 / 2.3 - 1) = 13.7 h. Only this mean is supported by data; the
    shape is assumed exponential, which adds no further figure. In the trace many absences are shorter (median 0.9 h
    between sessions of one night) and others longer (until the next night).
    """
    up = lognormal(FLASH_MU, FLASH_SIGMA, HOUR_S, FLASH_LONGEST_H)
    away = exponential(up.mean_s * (24 / FLASH_HOURS_PER_DAY - 1))
    return renewal(up, away, devices, duration_s, seed, "flash")


def seti_sessions(devices: int, duration_s: float, seed: int) -> AvailabilityTrace:
    """Volunteers' computers as in SETI@home. Sessions: Weibull, shape 0.393, scale 2.964 h (median 1.2 h, mean 10.3 h);
    absences: lognormal, mu -0.586, sigma 2.844 of hours (median 0.6 h, mean 31.8 h), hence present 24.6% of the time.

    The figures are attributed to the ComBoS simulator (Alonso-Monsalve et al., Simulation Modelling Practice and
    Theory, 2017); they have not been checked against the paper. Both tails are very long: most computers that are away
    at a given time stay away for weeks, so a short trace shows few of them returning.
    """
    up = weibull(SETI_UP_SHAPE, HOUR_S * SETI_UP_SCALE_H)
    return renewal(up, lognormal(SETI_DOWN_MU, SETI_DOWN_SIGMA, HOUR_S), devices, duration_s, seed, "seti")


def renewal(
    up: Durations, away: Durations, devices: int, duration_s: float, seed: int, source: str
) -> AvailabilityTrace:
    """Alternating sessions and absences, in equilibrium from the start."""
    _check(devices, duration_s, up.mean_s + away.mean_s)
    share_up = up.mean_s / (up.mean_s + away.mean_s)
    owners, starts, ends = [], [], []
    for device in range(devices):
        start_s, end_s = _sessions(np.random.default_rng([seed, device]), up, away, share_up, duration_s)
        owners.append(np.full(len(start_s), device))
        starts.append(start_s)
        ends.append(end_s)
    return _trace(
        np.concatenate(owners), np.concatenate(starts), np.concatenate(ends), devices, duration_s, source, seed
    )


def _sessions(
    rng: np.random.Generator, up: Durations, away: Durations, share_up: float, duration_s: float
) -> tuple[Floats, Floats]:
    """Starts and ends of one device's sessions, cut to the trace."""
    there, part = rng.random(2).tolist()
    first = up if there < share_up else away
    left_s = part * float(first.draw_biased(rng, 1)[0])
    starts, ends = ([np.zeros(1)], [np.array([left_s])]) if first is up else ([], [])
    at_s = left_s + (float(away.draw(rng, 1)[0]) if first is up else 0.0)
    while at_s < duration_s:
        up_s, away_s = up.draw(rng, _CHUNK), away.draw(rng, _CHUNK)
        cycle_ends = at_s + np.cumsum(up_s + away_s)
        start_s = np.concatenate(([at_s], cycle_ends[:-1]))
        starts.append(start_s)
        ends.append(start_s + up_s)
        at_s = float(cycle_ends[-1])
    if not starts:
        return np.zeros(0), np.zeros(0)
    start_s, end_s = np.concatenate(starts), np.minimum(np.concatenate(ends), duration_s)
    inside = start_s < duration_s
    return start_s[inside], end_s[inside]


def _trace(
    owner: Indices, start_s: Floats, end_s: Floats, devices: int, duration_s: float, kind: str, seed: int = 0
) -> AvailabilityTrace:
    names = tuple(f"{kind}-{device}" for device in range(devices))
    return trace_of(names, owner, start_s, end_s, window_s=(0.0, duration_s), source=f"{kind}, seed {seed}")


def _check(devices: int, duration_s: float, cycle_s: float) -> None:
    if devices < 1:
        raise TraceError(f"a trace needs at least 1 device, not {devices}")
    if not (duration_s > 0 and math.isfinite(duration_s)):
        raise TraceError(f"the trace would last {duration_s} s; it must be more than 0")
    if devices * duration_s / cycle_s > MOST_SESSIONS:
        raise TraceError(
            f"that is about {devices * duration_s / cycle_s:.2g} sessions, more than {MOST_SESSIONS:.0e}; "
            "take fewer devices, a shorter trace or a lower rate"
        )
