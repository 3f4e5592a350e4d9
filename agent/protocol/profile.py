"""A device's profile, sent when it joins: speed, link, memory, credit.

The same record describes a phone and an emulated device; the server cannot tell them apart.
A fleet's profiles are sent and stored as one structured array, so that planning stays vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

MAX_RATE = 1e15  # bit/s or FLOP/s, above any real device; means "no limit" in a profile


@dataclass(frozen=True, slots=True)
class Profile:
    flops: float  # sustained float32 FLOP/s of a large product
    overhead_s: float  # fixed cost of one block
    down_bps: float  # server -> device, bit/s
    up_bps: float  # device -> server, bit/s
    latency_s: float  # one way
    memory_bytes: int  # limit on operands and outputs in flight
    credit_blocks: int  # limit on blocks in flight

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                raise ValueError(f"{name} is {value!r}; it must lie between {low:g} and {high:g}")


_BOUNDS = (
    ("flops", 1.0, MAX_RATE),
    ("overhead_s", 0.0, 3600.0),
    ("down_bps", 1.0, MAX_RATE),
    ("up_bps", 1.0, MAX_RATE),
    ("latency_s", 0.0, 60.0),  # a geostationary satellite needs 0.3
    ("memory_bytes", 0, 2**50),
    ("credit_blocks", 1, 2**20),
)

PROFILE = np.dtype([(f.name, "<i8" if f.name in ("memory_bytes", "credit_blocks") else "<f8") for f in fields(Profile)])


def pack_profiles(profiles: Sequence[Profile]) -> NDArray[np.void]:
    return np.array([astuple(p) for p in profiles], dtype=PROFILE)


def check_profiles(table: NDArray[np.void]) -> None:
    """Raise ValueError at the first figure out of bounds."""
    for name, low, high in _BOUNDS:
        bad = np.flatnonzero(~((table[name] >= low) & (table[name] <= high)))
        if bad.size:
            value = table[name][bad[0]]
            raise ValueError(f"device {bad[0]}: {name} is {value!r}; it must lie between {low:g} and {high:g}")
