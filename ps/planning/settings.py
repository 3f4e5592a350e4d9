"""Every number that steers planning, with its unit, its reason and the measurement behind it.

Modules read them as `settings.NOW.slack`. `using` replaces some of them for a while: `python -m testbed.bench ablation`
switches each heuristic off in this way. What a number without a heuristic is for (a limit of iterations, a tolerance of
Newton's method) stands where it is used. docs/decisions/0017 has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    # ---- precision and slack
    precision: float = 1e-3  # of a time, wherever one is found by bisection: below what whole rows and columns cost
    # Plans within this factor of each other count as equal. Among teams that end within it, the smallest is taken
    # (more devices cost messages), and a tiling within it of the bound is not improved further.
    slack: float = 1.02
    # What a product may end later for another good: its lost blocks return sooner (0011), or no device gets more than
    # its share. A team for deferred products aims to end this much before the pass, since a late gradient delays it.
    later: float = 1.05
    # ---- how a device works through its rectangle
    least_chunk: int = 32  # inner values; a call takes 39 us on a CPU, about what 32 values of a 64 x 64 block take
    strip_s: float = 0.05  # a shorter strip saves less than its message costs; 0005
    # For a product over fewer devices than this, the server has time for more messages each: strips may be shorter in
    # proportion. With 1,000, steps under churn took 8 to 17% longer; 0005.
    crowd: int = 25
    most_strips: int = 4  # for the overlap of download, compute and upload; more hardly end sooner; 0005
    steepest: float = 4.0  # limit of how much larger or smaller the next strip is: beyond it nothing is gained; 0005
    # A strip is lost with its device, and delays a block that was lost elsewhere. So a strip that takes longer than
    # this is cut further, and a device has at most about this much work ahead of its answers; 0011.
    long_s: float = 0.5
    # Strips of a rectangle that takes long (0011), rectangles of a device with little memory, and devices per overdue
    # box: with 64 of these, steps with 10% slow devices take 6% longer (0017).
    most_pieces: int = 16
    # ---- tilings
    # Numbers of columns around the ideal one, and tilings that are rounded to whole numbers; 0003
    arrangements: int = 3
    # ---- deferred products
    most_taken: float = 0.5  # of the devices that are left, for the deferred products of one level; 0004
    # ---- the plan cache
    # Approximate cost to the server of a new plan, per product: with 465 devices one took 17 ms, three together 49, 16
    # together 380. A plan that was repaired after a loss is replaced once its uses have lost as much.
    solving_s: float = 0.025
    most_cached: int = 4096  # plans; a model of 80 layers asks about 500 questions per step
    # ---- shared blocks
    shared_over: int = 64  # devices, at most, per lost box: those that would finish it soonest; 0011
    # ---- trial blocks; tests/attacks/test_attack_claims.py
    # Devices that get a trial block in one product, the others get theirs in the next; each of 1 / trials of the
    # product's time, by the model of a typical device, which is also what a new device is believed at first.
    trials: int = 16
    trial_patience: float = 0.5  # of the product's time; then others compute the trial block too, at no cost
    # ---- the share cap; tests/attacks/test_attack_claims.py
    most_share: float = 0.5  # of the products that are ready together, where that costs at most `later`


NOW = Settings()


@contextmanager
def using(room: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Other values, in this module or that of scheduling, for a while. For measurements; not for several threads."""
    before, room.NOW = room.NOW, replace(room.NOW, **changes)
    try:
        yield
    finally:
        room.NOW = before
