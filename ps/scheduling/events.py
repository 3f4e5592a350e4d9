"""The dispatcher's events and instructions: plain records, no logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers
from ps.planning.plans import Level, Plan, Request

Box = Sequence[int]  # batch, batches, row, rows, column, columns


@dataclass(frozen=True, slots=True)
class DevicesJoined:
    first: int  # ids are first, first + 1, ...; none was ever used
    profiles: NDArray[np.void]
    again: Sequence[int] = ()  # but the first of them reuse these ids, of departed devices that never returned a block
    newcomers: bool = False  # known only by their claims: they start small

    @property
    def devices(self) -> list[int]:
        return [*self.again, *range(self.first, self.first + len(self.profiles) - len(self.again))]


@dataclass(frozen=True, slots=True)
class DevicesLeft:
    devices: list[int]


@dataclass(frozen=True, slots=True)
class Submission:
    job: int
    request: Request
    critical: bool  # critical: other products wait for it; deferred products queue behind it
    plan: Plan | None = None  # if given, used as it is
    kept: tuple[int | None, int | None] = (None, None)  # left and right operand, if devices may keep its slabs


@dataclass(frozen=True, slots=True)
class JobsSubmitted:
    """Products that are ready at the same moment; they are planned together. `ahead`: the levels still to be submitted
    before the pass ends. No product waits for the deferred ones before that. `more`: others of them, also with their
    plans, follow in another event."""

    jobs: list[Submission]
    ahead: tuple[Level, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class OperandsForgotten:
    """These operands have changed: devices do not keep their slabs."""

    operands: list[int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which block of which job on which device: three parallel lists."""

    devices: list[int] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlocksReturned(Blocks):
    """The devices answered these blocks."""

    unheard_s: float = field(default=0.0, compare=False)  # they may have lain unread for this long, at most


@dataclass(frozen=True, slots=True)
class BlocksFailed(Blocks):
    """The devices could not compute these blocks."""


@dataclass(frozen=True, slots=True)
class JobChecked:
    """All blocks of the job had been returned and were checked; these were wrong."""

    job: int
    wrong: list[int]
    why: Mapping[int, str] = field(default_factory=dict)  # device -> the evidence against it


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A clock tick: look for overdue blocks."""


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class Work:
    """How a job's output came about: all its boxes, by block, and which of them count."""

    boxes: Integers  # [blocks, 6], those that were cut or never sent included
    done: Integers  # numbers of the blocks that count
    devices: Integers  # [len(done)]: which device computed each


NO_WORK = Work(np.empty((0, 6), np.int64), np.empty(0, np.int64), np.empty(0, np.int64))

Event = (
    DevicesJoined
    | DevicesLeft
    | JobsSubmitted
    | BlocksReturned
    | BlocksFailed
    | OperandsForgotten
    | JobChecked
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class SendBlocks(Blocks):
    """These blocks leave now: parallel lists with all that is needed to bring each to its device."""

    boxes: list[Box] = field(default_factory=list, compare=False)
    inner: list[int] = field(default_factory=list, compare=False)  # length of the job's inner dimension
    chunk: list[int] = field(default_factory=list, compare=False)  # inner values per chunk; `inner`: sent whole
    down_bytes: list[int] = field(default_factory=list, compare=False)  # operands that the device does not hold yet
    kept: list[int] = field(default_factory=list, compare=False)  # 1: it keeps its left slab; 2: its right one; 3: both

    def drop(self, device: int, job: int, block: int) -> bool:
        """Take a block out again. False if it is not among them."""
        for at in range(len(self.devices) - 1, -1, -1):
            if (self.devices[at], self.jobs[at], self.blocks[at]) == (device, job, block):
                for column in self.columns:
                    del column[at]
                return True
        return False

    @property
    def columns(self) -> tuple[list[Any], ...]:
        return tuple(getattr(self, column.name) for column in fields(self))


@dataclass(frozen=True, slots=True)
class CancelBlocks(Blocks):
    """Another device was faster: stop these blocks."""


@dataclass(frozen=True, slots=True)
class AcceptBlocks:
    """Positions, in the BlocksReturned event, of the answers that count. Discard all others."""

    positions: list[int]


@dataclass(frozen=True, slots=True)
class JobFinished:
    job: int
    work: Work = field(default=NO_WORK, compare=False)


@dataclass(frozen=True, slots=True)
class JobWaits:
    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class SuspendDevice:
    device: int
    reason: str
    wrong: bool = field(default=True, compare=False)  # a wrong result; False: it only failed


@dataclass(frozen=True, slots=True)
class NameStragglers:
    """These devices are alive and do not answer. Per device: how long its first block has been out, and how long was
    expected. Other devices compute that block too. For people; reported once per device."""

    devices: list[int]
    waited_s: list[float]
    expected_s: list[float]
    alone: bool = False  # no other device can compute it yet


@dataclass(frozen=True, slots=True)
class CheckJob:
    """All blocks of the job have arrived: check them, and reply with JobChecked."""

    job: int
    work: Work = field(default=NO_WORK, compare=False)


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """Devices left with this many blocks; what remains of those has been given to others."""

    loss: int
    devices: list[int]
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksRecovered:
    """Everything from that loss has been recomputed."""

    loss: int


Instruction = (
    SendBlocks
    | CancelBlocks
    | AcceptBlocks
    | JobFinished
    | JobWaits
    | SuspendDevice
    | NameStragglers
    | CheckJob
    | BlocksLost
    | BlocksRecovered
)
