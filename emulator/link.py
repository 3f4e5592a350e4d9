"""The link model: a rate and a latency in each direction, one transfer after the other.

Pure and vectorised: many devices' links at once, each used at most once a call.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


def transfer(ready_s: Seconds, free_s: Seconds, size_bytes: NDArray[np.int64], rate_bps: Seconds) -> Seconds:
    """When the last bit leaves the sender: it starts when the data is ready and the link is free."""
    return np.maximum(ready_s, free_s) + 8 * size_bytes / rate_bps
