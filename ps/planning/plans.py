"""Products, levels and plans: the types that planning shares with the rest of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers, Numbers


class PlanError(ValueError):
    """No device can take part; the message says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """C[batch, rows, columns] = A[batch, rows, inner] B[batch, inner, columns]"""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def cells(self) -> int:
        return self.batch * self.rows * self.columns

    @property
    def flops(self) -> int:
        return 2 * self.cells * self.inner


def whole(shape: Shape) -> Integers:
    """The box that covers a product's whole output, [1, 6]."""
    return np.array([[0, shape.batch, 0, shape.rows, 0, shape.columns]])


@dataclass(frozen=True, slots=True)
class Request:
    """A product, and how often a slab of each operand will be used while a device keeps it."""

    shape: Shape
    left_uses: int = 1
    right_uses: int = 1


@dataclass(frozen=True, slots=True)
class Level:
    """Products of a pass that become ready at the same moment."""

    critical: tuple[Request, ...]  # the next level waits for them
    deferred: tuple[Request, ...] = ()  # no product waits for them before the pass ends


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class Plan:
    """`fresh` is False where an earlier block of this plan, on the same device, brought exactly this range and the
    device still has it. A block that is streamed in chunks brings all its operands, and leaves none behind."""

    boxes: Integers  # [k, 6]: batch, batches, row, rows, column, columns; blocks of one rectangle follow each other
    device: Integers  # [k] device ids
    fresh: NDArray[np.bool_]  # [k, 2]: whether the block brings its rows (left slab), its columns (right slab)
    makespan_s: float  # modelled for the first use, when no slab is kept and the fleet is idle
    # [k]: when its device has finished all its blocks; empty in plans that are not the planner's
    ends_s: Numbers = field(default_factory=lambda: np.empty(0))
    firm: bool = False  # each block is sent as soon as there is credit, and to no other device while its own lives

    @property
    def waits(self) -> bool:
        """A deferred product that is best computed when the critical ones of the pass are done."""
        return not len(self.boxes)


WAITS = Plan(np.empty((0, 6), np.int64), np.empty(0, np.int64), np.empty((0, 2), np.bool_), 0.0)
