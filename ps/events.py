"""What the dispatcher is told, and what it tells the server to do: plain records, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planner import Level, Plan, Request


@dataclass(frozen=True, slots=True)
class DevicesJoined:
    first: int  # ids are first, first + 1, ...; none of them was ever used
    profiles: NDArray[np.void]
    again: Sequence[int] = ()  # but the first of them get these, of devices that have left and never returned a block

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
    urgent: bool  # somebody waits for it; otherwise it goes behind what is urgent
    plan: Plan | None = None  # given: used as it is
    kept: tuple[int | None, int | None] = (None, None)  # left and right operand, if devices may keep slabs of it


@dataclass(frozen=True, slots=True)
class JobsSubmitted:
    """Products that are ready at the same moment: planned together. `ahead`: what will be submitted before the pass
    ends; until then nobody waits for those that are not urgent."""

    jobs: list[Submission]
    ahead: tuple[Level, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandsForgotten:
    """These operands have changed: nobody keeps their slabs any longer."""

    operands: list[int]


@dataclass(frozen=True, slots=True)
class BlocksReturned:
    """Three lists side by side: which device answered which block of which job."""

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


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Is anything overdue?"""


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
    """Somebody else was faster: these need not go on."""

    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class AcceptBlocks:
    """Positions, in the BlocksReturned event, of the answers that count. Everything else is to be thrown away."""

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


@dataclass(frozen=True, slots=True)
class CheckJob:
    """All its blocks are there: are they right? To be answered with JobChecked."""

    job: int


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """Devices are gone and had these many blocks; what is left of them has been given to others."""

    loss: int
    devices: list[int]
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksRecovered:
    """All that was lost at that time has been done again."""

    loss: int


Instruction = (
    SendBlocks
    | CancelBlocks
    | AcceptBlocks
    | JobFinished
    | JobWaits
    | SuspendDevice
    | CheckJob
    | BlocksLost
    | BlocksRecovered
)
