"""The dispatcher's events and instructions: plain records, no logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ps.planning.planner import Level, Plan, Request


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
    before the pass ends. No product waits for the deferred ones before that."""

    jobs: list[Submission]
    ahead: tuple[Level, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandsForgotten:
    """These operands have changed: devices do not keep their slabs."""

    operands: list[int]


@dataclass(frozen=True, slots=True)
class BlocksReturned:
    """Which device answered which block of which job: three parallel lists."""

    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class BlocksFailed:
    """The devices could not compute these blocks."""

    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class JobChecked:
    """All blocks of the job had been returned and were checked; these were wrong."""

    job: int
    wrong: list[int]
    why: Mapping[int, str] = field(default_factory=dict)  # device -> the evidence against it


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A clock tick: look for overdue blocks."""


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
class SendBlocks:
    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class CancelBlocks:
    """Another device was faster: stop these blocks."""

    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class AcceptBlocks:
    """Positions, in the BlocksReturned event, of the answers that count. Discard all others."""

    positions: list[int]


@dataclass(frozen=True, slots=True)
class JobFinished:
    job: int


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
