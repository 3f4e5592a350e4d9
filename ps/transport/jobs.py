"""A product from its submission to its end, as the server sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.protocol.wire import WireError
from ps.planning.plans import Plan, Request, Shape
from ps.scheduling.events import Box
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
    """What the server keeps of a job in progress."""

    product: Product
    boxes: dict[int, Box] = field(default_factory=dict)  # of the blocks that were sent, by number
    glance: Glance | None = None  # for the check, once it is computed
    expected: Expectation | None = None  # the same in patches, where needed
    drawn: bool | None = None  # whether to sketch it: drawn at random when it begins
    checked: bool = False  # its blocks were checked, and some were wrong
    holders: set[bytes] = field(default_factory=set)  # connections that have pieces of it
    _sent_ns: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def box(self, block: int) -> Box:
        if (box := self.boxes.get(block)) is None:
            raise WireError(f"an answer names block {block}, which no device was given")
        return box

    def sent(self, blocks: NDArray[np.uint32], stamp_ns: int) -> None:
        if len(blocks):
            self.stamps(int(blocks.max()) + 1)[blocks] = stamp_ns

    def stamps(self, blocks: int) -> NDArray[np.uint64]:
        """When each of the first `blocks` blocks was sent; 0 for those that never were."""
        if (missing := blocks - len(self._sent_ns)) > 0:
            self._sent_ns = np.concatenate([self._sent_ns, np.zeros(max(missing, len(self._sent_ns)), np.uint64)])
        return self._sent_ns[:blocks]


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
    check_background_s: float = 0.0  # the same outside its thread
    busy_s: float = 0.0  # all its time but waiting
    longest_turn_s: float = 0.0  # of its loop: an answer may wait this long
    dropped_messages: int = 0
