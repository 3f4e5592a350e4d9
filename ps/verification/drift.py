"""Devices' errors over many products: sums that stay near zero under rounding and grow under steadily wrong answers.

Two cumulative sums (CUSUM, Page 1954) per device. One adds up the energies of its blocks, less the most that honest
rounding gives. The other adds up the signed errors of audited cells, each less an allowance: honest errors have no
sign. A sum that exceeds its limit is not an accusation: the server then recomputes cells of that device. If they are
right, the sums start again and the device's limits double, so that a device just above them cannot keep the server
busy. If a block was loud by itself and found right, the device's energy sum returns to its value before that product.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers
from ps.verification.rounding import Floats

ENERGY_ALLOWED = 1.0  # per patch; honest kernels give 0.6 at most, see ps/verification/rounding.py
ENERGY_LIMIT = 40.0
BIAS_ALLOWED = 0.25  # per audited cell, in honest levels
BIAS_LIMIT = 12.0  # with honest errors of half a level, one alarm in exp(24) cells
MOST_PATIENCE = 64.0


class Drift:
    def __init__(self) -> None:
        self._energy, self._up, self._down, self._patience = (np.zeros(0) for _ in range(4))
        self._before = self._energy

    def blocks(self, devices: Integers, energy: Floats, patches: Floats) -> None:
        """Energies of one product's blocks, in honest levels."""
        self._grow(devices)
        self._before = self._energy.copy()
        change = np.bincount(devices, energy - ENERGY_ALLOWED * patches, len(self._energy))
        np.maximum(self._energy + change, 0.0, out=self._energy)

    def audited(self, devices: Integers, errors: Floats) -> None:
        """Signed errors of cells, in honest levels. NaN is ignored."""
        self._grow(devices)
        known = np.where(np.isfinite(errors), np.clip(errors, -BIAS_LIMIT, BIAS_LIMIT), 0.0)
        count = np.bincount(devices, minlength=len(self._energy))
        total = np.bincount(devices, known, len(self._energy))
        np.maximum(self._up + total - BIAS_ALLOWED * count, 0.0, out=self._up)
        np.maximum(self._down - total - BIAS_ALLOWED * count, 0.0, out=self._down)

    def suspects(self) -> Integers:
        patience = 1 + self._patience
        over: NDArray[np.bool_] = self._energy > ENERGY_LIMIT * patience
        over |= np.maximum(self._up, self._down) > BIAS_LIMIT * patience
        return np.flatnonzero(over)

    def acquit(self, device: int) -> None:
        self._energy[device] = self._up[device] = self._down[device] = 0.0
        self._patience[device] = min(2 * self._patience[device] + 1, MOST_PATIENCE)

    def explained(self, device: int) -> None:
        """Discard what the last product added to this device's energy."""
        if device < len(self._before):
            self._energy[device] = min(self._energy[device], self._before[device])

    def _grow(self, devices: Integers) -> None:
        missing = int(devices.max(initial=-1)) + 1 - len(self._energy)
        if missing > 0:
            room = np.zeros(max(missing, len(self._energy)))
            self._energy, self._up, self._down, self._patience = (
                np.concatenate([old, room]) for old in (self._energy, self._up, self._down, self._patience)
            )
