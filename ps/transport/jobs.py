"""A product from its submission to its end, as the server sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.protocol.wire import WireError
from ps.planning.planner import Plan, Request, Shape
from ps.scheduling.state import Job
from ps.transport.operands import Operand
from ps.verification.glance import Glance
from ps.verification.sketch import Expectation


@dataclass(slots=True)
class Product:
    """A job as its submitter sees it. `done` is called in the server's thread when `out` is complete."""

    left: Operand
    right: Operand
    out: NDArray[np.float32]
    done: Callable[[], None]
    name: str = "product"
    step: int = 0
    critical: bool = True
    plan: Plan | None = None
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        batch, rows, inner = self.left.array.shape
        self.shape = Shape(batch, rows, inner, self.right.array.shape[1])

    @property
    def request(self) -> Request:
        return Request(self.shape, self.left.uses, self.right.uses)

    @property
    def operand_bytes(self) -> int:
        return self.left.array.nbytes + self.right.array.nbytes

    @property
    def kept(self) -> tuple[int | None, int | None]:
        """The operands whose slabs are worth keeping on devices."""
        left, right = (operand.id if operand.uses > 1 else None for operand in (self.left, self.right))
        return left, right


@dataclass(slots=True)
class Live:
    """A job in progress."""

    product: Product
    job: Job  # the dispatcher's record of it
    sent_ns: NDArray[np.uint64]
    glance: Glance | None = None  # for the check, once it is computed
    expected: Expectation | None = None  # the same in patches, where needed
    drawn: bool = False  # it was decided at random whether to sketch it
    checked: bool = False  # its blocks were checked, and some were wrong
    holders: set[bytes] = field(default_factory=set)  # connections that have pieces of it
    tiles: list[list[int]] = field(default_factory=list)  # the job's, as plain numbers: faster to read one by one

    def tile(self, block: int) -> list[int]:
        if len(self.tiles) < len(self.job.tiles):  # it was cut again since
            self.tiles = self.job.tiles.tolist()
        if block >= len(self.tiles):
            raise WireError(f"an answer names block {block} of a job that has {len(self.tiles)}")
        return self.tiles[block]

    def sent(self, blocks: NDArray[np.uint32] | int, stamp_ns: int) -> None:
        self.stamps()[blocks] = stamp_ns

    def stamps(self) -> NDArray[np.uint64]:
        """When each block was sent; 0 if it never was: a block may be cut and then not be needed."""
        if grown := len(self.job.tiles) - len(self.sent_ns):
            self.sent_ns = np.concatenate([self.sent_ns, np.zeros(grown, np.uint64)])
        return self.sent_ns


@dataclass(slots=True)
class Totals:
    blocks: int = 0
    flops: int = 0
    operand_bytes: int = 0  # what devices downloaded, each slab charged to every device that needs it
    result_bytes: int = 0
    sent_bytes: int = 0  # what really went through the sockets: a slab once per connection
    lost_devices: int = 0
    checked_blocks: int = 0
    wrong_blocks: int = 0
    check_s: float = 0.0  # time of the server's thread spent on checking
    busy_s: float = 0.0  # all its time but waiting
    longest_turn_s: float = 0.0  # of its loop: an answer may wait this long
    dropped_messages: int = 0
