"""The compute model: a fixed overhead a block and a rate. Figures come with the device's profile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def compute_seconds(profiles: NDArray[np.void], flops: NDArray[np.float64]) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = profiles["overhead_s"] + flops / profiles["flops"]
    return seconds
