"""Questions the check itself before many devices are suspended at once: a pure state machine.

    trusting   the usual state: an accusation needs cells that the server has recomputed, and all the server's own
               float32 kernels must pass the same check on some of these cells
    doubting   several devices are accused in one product, or more than a small share of the fleet recently. No other
               effect: own kernels run for every accusation, once per product, which is cheap
    blown      the server's own kernels failed the check in more than one recent product: only cells that no float32
               kernel can give count, until those failures are LATELY products old

Time is counted in products.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

SEVERAL = 3  # devices accused in one product
SHARE = 0.02  # of the fleet, accused within ...
LATELY = 200  # ... this many products: about two steps of a small model
BLOWS_AT = 2  # recent products in which an own kernel failed


class State(Enum):
    TRUSTING = "trusting"
    DOUBTING = "doubting"
    BLOWN = "blown"


class Fuse:
    def __init__(self) -> None:
        self.product = 0
        self._accused: deque[tuple[int, int]] = deque()  # product, device
        self._failed: deque[int] = deque()  # products in which the check was at fault

    def next_product(self) -> None:
        self.product += 1
        while self._accused and self._accused[0][0] <= self.product - LATELY:
            self._accused.popleft()
        while self._failed and self._failed[0] <= self.product - LATELY:
            self._failed.popleft()

    def accuse(self, devices: list[int], fleet: int) -> State:
        """Record that these devices are accused in the present product; returns how carefully to judge them."""
        lately = {device for _, device in self._accused} | set(devices)
        self._accused += [(self.product, device) for device in devices]
        if len(self._failed) >= BLOWS_AT:
            return State.BLOWN
        several = len(devices) >= SEVERAL or len(lately) > max(1.0, SHARE * fleet)
        return State.DOUBTING if several else State.TRUSTING

    def at_fault(self) -> None:
        """An own kernel failed the check of the present product."""
        if not self._failed or self._failed[-1] != self.product:
            self._failed.append(self.product)
