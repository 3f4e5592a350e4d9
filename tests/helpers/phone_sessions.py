"""A trace of phones with the properties of published ones: 2,831 phones over 48 hours, sessions of lognormal length
(median 37 min, e-fold 1.36, as FLASH's), three per phone. Generated from a seed, so that a test knows every number in
it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PHONES, SESSIONS = 2831, 3
HOUR_S, SPAN_H = 3600, 48
MEAN_LOG_H, SPREAD_LOG_H = -0.484, 1.363


@dataclass(frozen=True)
class Sessions:
    phone: NDArray[np.int64]
    start_s: NDArray[np.int64]
    end_s: NDArray[np.int64]

    @property
    def lengths_s(self) -> NDArray[np.int64]:
        return self.end_s - self.start_s

    def write(self, path: Path) -> Path:
        rows = zip(self.phone.tolist(), self.start_s.tolist(), self.end_s.tolist(), strict=True)
        lines = ["device,start_s,end_s", *(f"{phone},{start},{end}" for phone, start, end in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def sessions(seed: int = 1) -> Sessions:
    """Each session in its own third of the time, so that none touches another."""
    rng, part_s = np.random.default_rng(seed), SPAN_H * HOUR_S // SESSIONS
    lengths_h = np.exp(rng.normal(MEAN_LOG_H, SPREAD_LOG_H, (PHONES, SESSIONS)))
    lengths_s = np.clip(np.rint(lengths_h * HOUR_S), 1, part_s - 2).astype(np.int64)
    into_s = 1 + np.floor(rng.random((PHONES, SESSIONS)) * (part_s - 1 - lengths_s)).astype(np.int64)
    start_s = part_s * np.arange(SESSIONS) + into_s
    start_s[0, 0], lengths_s[0, 0] = 0, 600  # the trace covers the whole time
    start_s[-1, -1] = SPAN_H * HOUR_S - lengths_s[-1, -1]
    end_s = start_s + lengths_s
    return Sessions(np.repeat(np.arange(PHONES), SESSIONS), start_s.ravel(), end_s.ravel())
