"""The real dispatcher and planner on modelled devices in virtual time, for simulations that lose devices.

`testbed.faults.chaos` and `testbed.virtual.recovery` reach the dispatcher only through this file: they pass device
numbers, shapes and keys, and get back what was sent, accepted and finished. No sockets, no host clock, no randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from emulator.model.device import Devices
from ps.planning.planner import Planner
from ps.planning.plans import Level, Request, Shape
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    BlocksFailed,
    BlocksLost,
    BlocksRecovered,
    BlocksReturned,
    CancelBlocks,
    CheckJob,
    DevicesJoined,
    DevicesLeft,
    Event,
    JobChecked,
    JobFinished,
    JobsSubmitted,
    JobWaits,
    NameStragglers,
    OperandsForgotten,
    SendBlocks,
    Submission,
    SuspendDevice,
    TimePassed,
)
from ps.scheduling.shell import Shell
from testbed.virtual.modelled import schedule

Key = tuple[int, int, int]  # device, job, block
ALL = True  # all that is kept of an answer here: that it arrived
KEPT_USES = 4  # expected number of uses of a kept slab


@dataclass(frozen=True, slots=True)
class Sent:
    key: Key
    box: tuple[int, ...]  # batch, batches, row, rows, column, columns
    due_s: float  # when the answer arrives at the server, unless a fault hits it


@dataclass(slots=True)
class Outcome:
    """The result of one event."""

    sent: list[Sent] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # positions among the answers
    finished: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # jobs that no present device can do
    suspended: list[int] = field(default_factory=list)
    cancelled: list[Key] = field(default_factory=list)  # another device was faster
    to_check: list[int] = field(default_factory=list)  # jobs with all blocks returned, to be verified
    named: list[NameStragglers] = field(default_factory=list)  # devices that are alive but do not answer
    lost: list[BlocksLost] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)  # losses


@dataclass(frozen=True, slots=True)
class Work:
    """One product; `kept`: its left and right operand, each only if devices may keep slabs of it."""

    job: int
    shape: Shape
    critical: bool = True
    kept: tuple[int | None, int | None] = (None, None)


class VirtualFleet(Shell[bool]):
    """`profiles`: every device that will ever join, in order of joining. `verify`: a job ends only once `checked`
    allows it. `history`: times of earlier blocks as multiples of the expected time; without it, the cost model alone
    decides what is overdue until enough blocks have returned. `abilities`: what the devices can really do, if that
    differs from their profiles."""

    def __init__(
        self,
        profiles: NDArray[np.void],
        planner: Planner | None = None,
        verify: bool = False,
        history: Sequence[float] = (),
        abilities: NDArray[np.void] | None = None,
    ) -> None:
        super().__init__(Dispatcher(planner or Planner(), verify, history))
        self.now_s = 0.0
        self.joined = 0
        self._profiles = profiles
        self._outcome = Outcome()
        # actual speeds; the announced profiles do not change
        self._devices = Devices((profiles if abilities is None else abilities).copy())

    def join(self, count: int, newcomers: bool = False) -> Outcome:
        first, self.joined = self.joined, self.joined + count
        return self._tell(DevicesJoined(first, self._profiles[first : self.joined], newcomers=newcomers))

    def leave(self, devices: Sequence[int]) -> Outcome:
        return self._tell(DevicesLeft(list(devices)))

    def submit(self, works: Sequence[Work], more_to_come: bool = False) -> Outcome:
        """`more_to_come`: as many further products, all critical, come before any product waits for the deferred ones
        among these."""
        new = [
            Submission(
                work.job,
                Request(work.shape, *(1 if operand is None else KEPT_USES for operand in work.kept)),
                work.critical,
                kept=work.kept,
            )
            for work in works
        ]
        more = Level(tuple(Request(work.shape) for work in works))
        return self._tell(JobsSubmitted(new, (more,) if more_to_come else ()))

    def forget(self, operands: Sequence[int]) -> Outcome:
        return self._tell(OperandsForgotten(list(operands)))

    def answer(self, keys: Sequence[Key]) -> Outcome:
        return self._tell(BlocksReturned(*_columns(keys)))

    def refuse(self, keys: Sequence[Key]) -> Outcome:
        return self._tell(BlocksFailed(*_columns(keys)))

    def checked(self, job: int, wrong: Sequence[int]) -> Outcome:
        """These blocks of the job are wrong."""
        return self._tell(JobChecked(job, list(wrong)))

    def look(self) -> Outcome:
        """The server checks the clock: is anything overdue?"""
        return self._tell(TimePassed())

    @property
    def next_look_s(self) -> float:
        """When something may be overdue; infinity if nothing ever will be."""
        return self._dispatcher.next_look_s

    def slow(self, device: int, factor: float) -> None:
        """From now on the device is slower than its profile."""
        for name in ("flops", "down_bps", "up_bps"):
            self._devices.profiles[name][device] /= factor

    def check(self) -> None:
        self._dispatcher.check()

    @property
    def corrected(self) -> int:
        """Number of devices whose profile was corrected to their measured speed."""
        return int((self._dispatcher.profiles != self._profiles[: self.joined]).sum())

    def block_count(self, job: int) -> int:
        """Blocks that an unfinished job has been cut into so far; the next one gets this number."""
        return self._dispatcher.block_count(job)

    def left_behind(self) -> str:
        """Jobs and kept slabs that the dispatcher still holds; empty once all have ended and are forgotten."""
        return self._dispatcher.left_behind()

    def _tell(self, event: Event) -> Outcome:
        self._outcome = Outcome()
        self._handle(event, ALL)
        return self._outcome

    # ---- instructions

    def _now_ns(self) -> int:
        return round(1e9 * self.now_s)

    def _dispatch_s(self, at_ns: int) -> float:
        return self.now_s  # exact, where nanoseconds are rounded

    def _send_blocks(self, instruction: SendBlocks, at_ns: int) -> None:
        made = schedule(self._devices, np.array(instruction.devices), instruction, self.now_s)
        keys = zip(instruction.devices, instruction.jobs, instruction.blocks, strict=True)
        self._outcome.sent += [
            Sent(key, tuple(box), due)
            for key, box, due in zip(keys, instruction.boxes, made.due_s.tolist(), strict=True)
        ]

    def _accept_blocks(self, returned: bool, positions: list[int]) -> None:
        self._outcome.accepted += positions

    def _cancel_blocks(self, instruction: CancelBlocks) -> None:
        keys = zip(instruction.devices, instruction.jobs, instruction.blocks, strict=True)
        self._outcome.cancelled += keys

    def _check_job(self, instruction: CheckJob) -> None:
        self._outcome.to_check.append(instruction.job)

    def _job_finished(self, instruction: JobFinished) -> None:
        self._outcome.finished.append(instruction.job)

    def _job_waits(self, instruction: JobWaits) -> None:
        self._outcome.waiting.append(instruction.job)

    def _suspend_device(self, instruction: SuspendDevice) -> None:
        self._outcome.suspended.append(instruction.device)

    def _name_stragglers(self, instruction: NameStragglers) -> None:
        self._outcome.named.append(instruction)

    def _blocks_lost(self, instruction: BlocksLost, at_ns: int, planned_ns: int) -> None:
        self._outcome.lost.append(instruction)

    def _blocks_recovered(self, instruction: BlocksRecovered) -> None:
        self._outcome.recovered.append(instruction.loss)


def _columns(keys: Sequence[Key]) -> tuple[list[int], list[int], list[int]]:
    return [k[0] for k in keys], [k[1] for k in keys], [k[2] for k in keys]
