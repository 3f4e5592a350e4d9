"""Asked against achieved: may this run's times be believed?

Every emulated block has a moment at which its answer had to be back at the server, and a moment at which it was.
The stretch is how much longer blocks really took than the model asked for, on average, weighted by their time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STRETCH_ALLOWED = 1.05

VALID, DEGRADED = "VALID", "DEGRADED"


@dataclass(frozen=True, slots=True)
class Fidelity:
    verdict: str
    reason: str
    blocks: int  # emulated blocks that were looked at
    stretch: float
    late_p50_s: float
    late_p99_s: float


def judge(sent_s: NDArray[np.float64], due_s: NDArray[np.float64], received_s: NDArray[np.float64]) -> Fidelity:
    """`due_s` is NaN where a real device answered: nothing is modelled there."""
    modelled = ~np.isnan(due_s) & (due_s > sent_s)
    if not modelled.any():
        return Fidelity(VALID, "no modelled time in this run", 0, 1.0, 0.0, 0.0)
    sent_s, due_s, received_s = sent_s[modelled], due_s[modelled], received_s[modelled]
    late_s = received_s - due_s
    stretch = float((received_s - sent_s).sum() / (due_s - sent_s).sum())
    p50, p99 = (float(x) for x in np.percentile(late_s, [50, 99]))
    if stretch <= STRETCH_ALLOWED:
        return Fidelity(VALID, "the host kept up with the model", len(sent_s), stretch, p50, p99)
    return Fidelity(
        DEGRADED,
        f"the host was too slow: blocks took {100 * (stretch - 1):.0f}% longer than modelled (p99 {1000 * p99:.1f} ms "
        "late). Losses are exact all the same; for true times use fewer devices, a smaller model or a faster host",
        len(sent_s),
        stretch,
        p50,
        p99,
    )
