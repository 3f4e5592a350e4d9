"""Fits a performance model to measured samples and reports its error on held-out shapes. Pure; needs SciPy.

The typical time of a shape is the median over rounds of the median single call. Under a CPU quota a short call either
meets a pause or does not, so there the typical time is processor time multiplied by the stretch of all rounds together.
Slowdowns that hit all shapes for a while (other work on a shared machine) are divided out first.

The formula's terms are fitted as non-negative (every additional cell costs time), on relative error, so that short and
long products count alike; outliers have little weight. A Gaussian process fitted by maximum likelihood interpolates the
residual. The kernel's tile is the most likely one under formula and residual together, among the few tiles for which
the formula alone fits best. The formula alone often cannot tell a wrong tile from the right one, and a wrong tile
leaves steps in the residual that cannot be interpolated.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import curve_fit, minimize, nnls

from emulator.model.performance import COORDINATES, SPREAD_AT, TERMS, Performance, closeness, coordinates, terms
from emulator.model.samples import AGAIN, ProfileError, Samples

Floats = NDArray[np.float64]
TILES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CANDIDATES = 8  # tiles tried with the interpolation
ROBUST = 0.05  # a relative error beyond this counts linearly, not squared
FOLDS = 5
LEAST_SHAPES = 20
WAYS = ("down", "up")
DRIFT = 15  # window in samples; a shorter slowdown is noise
PAUSES_MATTER = 0.02  # share of the running time
WARMTH_MATTERS = 0.03
NOT_RESTED = (1.0, 1.0)  # rest makes no difference


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    model: Performance
    kernel: str
    shapes: NDArray[np.int64]
    measured_s: Floats  # typical, per shape
    predicted_s: Floats  # by a model fitted without this shape
    median_error: float
    p95_error: float
    drift: tuple[float, float]  # p5 and p95 of the machine's slowdown while it was measured

    @property
    def error(self) -> Floats:
        """Per held-out shape: predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def large_flops(self) -> float:
        """The rate of a large product, for planners, which know one rate and one overhead per device."""
        shape = np.array([[1, 512, 512, 512]])
        return float(2 * 512**3 / (self.model.seconds(shape)[0] - self.model.overhead_s))


def calibrate(samples: Samples, kernel: str | None = None) -> Calibration:
    """Fit the given kernel, or the one the agent would choose: the fastest on large products."""
    number = _kernel(samples, kernel)
    times, slower = _times(samples, number)
    shapes, measured_s = samples.shapes[sorted(times)], np.array([np.median(times[shape]) for shape in sorted(times)])
    if len(shapes) < LEAST_SHAPES:
        raise ProfileError(
            f"{samples.path} has samples of {len(shapes)} shapes, at least {LEAST_SHAPES} are needed; "
            "measure again, and longer"
        )
    predicted_s = np.empty(len(shapes))
    fold = np.random.default_rng(0).permutation(len(shapes)) % FOLDS
    for held_out in range(FOLDS):
        out = fold == held_out
        predicted_s[out] = fit(shapes[~out], measured_s[~out]).seconds(shapes[out])
    error = np.abs(predicted_s / measured_s - 1)
    model = fit(shapes, measured_s)
    run_s, pause_s = _pauses(samples)
    down_s, up_s = _transfers(samples)
    rested, warm_up_s = warmth(samples.sustained)
    model = replace(
        model,
        spread=spread(samples, number, times),
        down_s=down_s,
        up_s=up_s,
        run_s=run_s,
        pause_s=pause_s,
        rested=rested,
        warm_up_s=warm_up_s,
    )
    median, p95 = np.quantile(error, [0.5, 0.95]).tolist()
    low, high = np.expm1(np.quantile(slower, [0.05, 0.95])).tolist()
    kernel = samples.kernels[number]
    return Calibration(model, kernel, shapes, measured_s, predicted_s, median, p95, (low, high))


def _times(samples: Samples, kernel: int) -> tuple[dict[int, Floats], Floats]:
    """Per shape: seconds per call in each round, without the slowdown common to all shapes; and that slowdown per
    sample."""
    stretch = stretched(samples)
    mine = [s for s in samples.samples if s.kernel == kernel]
    shape = np.array([s.shape for s in mine])
    seconds = np.array([s.typical_s if stretch is None else stretch * s.typical_processor_s for s in mine])
    slower = drift(shape, np.log(seconds))
    seconds /= np.exp(slower)
    return {number: seconds[shape == number] for number in np.unique(shape).tolist()}, slower


def drift(shape: NDArray[np.int64], logs: Floats) -> Floats:
    """Log slowdown of the machine at each sample relative to its median. Samples are in order of time, and neighbours
    have different shapes. Zero if any shape was seen fewer than three times."""
    slower: Floats = np.zeros(len(logs))
    members = [np.flatnonzero(shape == number) for number in np.unique(shape)]
    if min((len(m) for m in members), default=0) < 3:
        return slower
    for _ in range(3):
        left = logs - slower
        for at in members:
            left[at] = logs[at] - np.median(left[at])
        padded = np.pad(left, DRIFT // 2, mode="reflect")
        slower = np.median(np.lib.stride_tricks.sliding_window_view(padded, DRIFT), axis=1)
    return slower - float(np.median(slower))


def stretched(samples: Samples) -> float | None:
    """Wall time / processor time under a CPU quota; None without one."""
    return None if samples.quota is None else max(1.0, samples.stretch)


def fit(shapes: NDArray[np.int64], measured_s: Floats) -> Performance:
    """The formula and its efficiency over shape, without spread, pauses or warmth."""
    fits = []
    for tile in itertools.product(TILES, TILES):
        table = terms(shapes, *tile)
        factors = _formula(table, measured_s)
        fits.append((_loss(measured_s, table @ factors), tile, factors))
    likeliest = np.inf
    for _, tile, factors in sorted(fits, key=lambda found: found[0])[:CANDIDATES]:
        left = np.log(measured_s / (terms(shapes, *tile) @ factors))
        unlikely, lengths, weights = _interpolation(coordinates(shapes, *tile), left)
        if unlikely < likeliest:
            likeliest, best = unlikely, (tile, factors, lengths, weights)
    (tile_rows, tile_columns), factors, lengths, weights = best
    return Performance(
        **dict(zip(TERMS, factors.tolist(), strict=True)),
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        shapes=tuple(tuple(shape) for shape in shapes.tolist()),
        weights=tuple(weights.tolist()),
        lengths=tuple(lengths.tolist()),
    )


def _formula(table: Floats, measured_s: Floats) -> Floats:
    weight = 1 / measured_s
    scale = table.max(axis=0)  # columns of similar size: the solver's tolerance is absolute
    factors: Floats = np.zeros(table.shape[1])
    for _ in range(5):
        try:
            solved, _ = nnls(table / scale * weight[:, None], measured_s * weight)
        except RuntimeError:  # no convergence: keep the last factors
            break
        factors = solved / scale
        factors[-1] = max(factors[-1], 1e-18)  # a multiplication always takes time
        weight = 1 / measured_s / np.sqrt(1 + (_off(measured_s, table @ factors) / ROBUST) ** 2)
    return factors


def _off(measured_s: Floats, predicted_s: Floats) -> Floats:
    result: Floats = np.log(measured_s / np.maximum(predicted_s, 1e-12))
    return result


def _loss(measured_s: Floats, predicted_s: Floats) -> float:
    return float(np.mean(np.sqrt(1 + (_off(measured_s, predicted_s) / ROBUST) ** 2)))


def _interpolation(places: Floats, values: Floats) -> tuple[float, Floats, Floats]:
    """Fit a Gaussian process with noise to the values: its negative log likelihood, lengths and weights."""

    apart = (places[:, None, :] - places[None, :, :]) ** 2
    everywhere = np.eye(len(values))

    def covariance(guess: Floats) -> Floats:
        lengths, scale, noise = np.exp(guess[:COORDINATES]), np.exp(guess[-2]), np.exp(guess[-1])
        result: Floats = scale * closeness(places, places, lengths.tolist()) + (noise + 1e-9) * everywhere
        return result

    def unlikely(guess: Floats) -> tuple[float, Floats]:
        """Negative log likelihood and its gradient."""
        near = covariance(guess)
        factor = cho_factor(near, lower=True)
        weights = cho_solve(factor, values)
        slope = 0.5 * (cho_solve(factor, everywhere) - np.outer(weights, weights))  # d/d each covariance entry
        squared = apart / np.exp(2 * guess[:COORDINATES])
        stretch = slope * 3 * np.exp(guess[-2] - np.sqrt(3 * squared.sum(axis=2)))  # Matern 3/2, by its distances
        noise = np.exp(guess[-1])
        of_scale = float((slope * near).sum() - (noise + 1e-9) * np.trace(slope))
        changes = [*np.einsum("ij,ijk->k", stretch, squared), of_scale, noise * np.trace(slope)]
        return float(0.5 * values @ weights + np.log(np.diag(factor[0])).sum()), np.array(changes)

    begin = np.array([0.7] * 4 + [0.0, 0.0, 0.7, np.log(0.03), np.log(0.001)])
    bounds = [(-1.0, 4.0)] * 4 + [(-2.0, 4.0)] * 3 + [(-9.0, 2.0), (-11.0, -2.0)]
    found = minimize(unlikely, begin, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60})
    at = found.x
    weights = np.exp(at[-2]) * np.linalg.solve(covariance(at), values)
    return float(found.fun), np.exp(at[:COORDINATES]), weights


def spread(samples: Samples, kernel: int, times: dict[int, Floats]) -> tuple[float, ...]:
    """How calls of one shape vary: quantiles of call time / typical time. Only the longer half of the shapes counts,
    because one preemption by another process is a hundred times as long as a short call. Under a quota the spread
    is that of processor time: single calls differ in wall time by the pauses, which are modelled separately."""
    if samples.quota is None:
        each: dict[int, list[float]] = {}
        for s in samples.samples:
            if s.kernel == kernel:
                each.setdefault(s.shape, []).extend(s.each_s)
        times = {shape: np.array(seconds) for shape, seconds in each.items()}
    typical_s = {shape: float(np.median(seconds)) for shape, seconds in times.items()}
    long_s = np.median(list(typical_s.values()))
    factors = np.concatenate([times[i] / t for i, t in typical_s.items() if t >= long_s])
    quantiles = np.quantile(factors, SPREAD_AT)
    return tuple(np.maximum.accumulate(quantiles).tolist())


def _pauses(samples: Samples) -> tuple[float, float]:
    """Mean time running and mean pause after it; zero unless a CPU quota causes the pauses."""
    ran_s, away_s = samples.pauses.sum(axis=0) if len(samples.pauses) else (0.0, 0.0)
    if samples.quota is None or away_s <= PAUSES_MATTER * ran_s or ran_s <= 0:
        return 0.0, 0.0
    return float(ran_s / len(samples.pauses)), float(away_s / len(samples.pauses))


def message_seconds(samples: Samples) -> tuple[float, float] | None:
    """Processor seconds per byte of a message, down and up; None if the link was not measured."""
    if samples.link is None:
        return None
    down_s, up_s = (float(np.median([running_s / size for size, _, running_s in samples.link[way]])) for way in WAYS)
    return down_s, up_s


def _transfers(samples: Samples) -> tuple[float, float]:
    """Seconds per byte, down and up, during which the processor handles the link and does not compute. Only under a CPU
    quota: elsewhere another core does this work."""
    stretch, seconds = stretched(samples), message_seconds(samples)
    if stretch is None or seconds is None:
        return 0.0, 0.0
    return stretch * seconds[0], stretch * seconds[1]


def warmth(sustained: Floats) -> tuple[float, float]:
    """How a device slows down as it warms up: time of a product when rested as a share of the time when hot, and the
    time constant in seconds."""
    if len(sustained) < 8:
        return NOT_RESTED
    at_s, seconds = sustained.T
    end_s = float(at_s[-1])

    def warming(at: Floats, hot: float, rested: float, tau: float) -> Floats:
        result: Floats = hot * (1 - (1 - rested) * np.exp(-at / tau))
        return result

    low = end_s / len(at_s)
    try:
        found, _ = curve_fit(
            warming,
            at_s,
            seconds,
            p0=(float(np.median(seconds[-4:])), 0.9, end_s / 4),
            bounds=([0, 0.05, low], [np.inf, 1.0, 2 * end_s]),
            loss="soft_l1",
            f_scale=0.02 * float(np.median(seconds)),
        )
    except RuntimeError:  # the data has no such curve
        return NOT_RESTED
    _, rested, tau = found
    unexplained = np.abs(seconds - warming(at_s, *found)).sum() > 0.5 * np.abs(seconds - np.median(seconds)).sum()
    if 1 - rested < WARMTH_MATTERS or unexplained:  # unexplained: the times vary for another reason
        return NOT_RESTED
    return float(rested), float(tau)


def _kernel(samples: Samples, wanted: str | None) -> int:
    if wanted is not None:
        if wanted not in samples.kernels:
            raise ProfileError(f"{samples.path} has no kernel {wanted!r}; it has {', '.join(samples.kernels)}")
        return samples.kernels.index(wanted)
    if not samples.samples:
        raise ProfileError(f"{samples.path} has no samples; {AGAIN}")
    flops = 2.0 * samples.shapes.prod(axis=1)
    large = flops >= np.quantile(flops, 0.8)
    rates: dict[int, list[float]] = {}
    for s in samples.samples:
        if large[s.shape]:
            rates.setdefault(s.kernel, []).append(s.calls * flops[s.shape] / s.seconds)
    if not rates:
        return samples.samples[0].kernel
    return max(rates, key=lambda kernel: float(np.median(rates[kernel])))
