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
from ps.planning.planner import Level, Planner, Request, Shape
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    AcceptBlocks,
    BlocksFailed,
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
    OperandsForgotten,
    SendBlocks,
    Submission,
    SuspendDevice,
    TimePassed,
)
from testbed.virtual.modelled import schedule

Key = tuple[int, int, int]  # device, job, block
ROUNDING_S = 1e-9  # for sums of modelled seconds, added and subtracted in different orders
KEPT_USES = 4  # expected number of uses of a kept slab


@dataclass(frozen=True, slots=True)
class Sent:
    key: Key
    tile: tuple[int, ...]  # batch, batches, row, rows, column, columns
    due_s: float  # when its answer is back at the server, if nothing happens to it


@dataclass(slots=True)
class Outcome:
    """The result of one event."""

    sent: list[Sent] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # positions among the answers
    finished: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # jobs that no device can do at present
    suspended: list[int] = field(default_factory=list)
    cancelled: list[Key] = field(default_factory=list)  # another device was faster
    to_check: list[int] = field(default_factory=list)  # jobs with all blocks returned, to be verified


@dataclass(frozen=True, slots=True)
class Work:
    """One product; `kept`: its left and right operand, if devices may keep slabs of it."""

    job: int
    shape: Shape
    critical: bool = True
    kept: tuple[int | None, int | None] = (None, None)


class VirtualFleet:
    """`profiles`: every device that will ever join, in order of joining. `verify`: a job ends only once `checked`
    allows it. `history`: times of earlier blocks as multiples of the expected time; without it, the cost model alone
    decides what is overdue until enough blocks have returned."""

    def __init__(
        self,
        profiles: NDArray[np.void],
        planner: Planner | None = None,
        verify: bool = False,
        history: Sequence[float] = (),
    ) -> None:
        self.now_s = 0.0
        self.joined = 0
        self._profiles = profiles
        self._dispatcher = Dispatcher(planner or Planner(), verify)
        self._dispatcher.deadlines.returned(history, [1.0] * len(history))
        self._devices = Devices(profiles.copy())  # actual speeds; the profiles they announced do not change

    def join(self, count: int, newcomers: bool = False) -> Outcome:
        first, self.joined = self.joined, self.joined + count
        return self._handle(DevicesJoined(first, self._profiles[first : self.joined], newcomers=newcomers))

    def leave(self, devices: Sequence[int]) -> Outcome:
        return self._handle(DevicesLeft(list(devices)))

    def submit(self, works: Sequence[Work], more_to_come: bool = False) -> Outcome:
        """`more_to_come`: as many products, all critical, come before any product waits for the deferred ones
        of these."""
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
        return self._handle(JobsSubmitted(new, (more,) if more_to_come else ()))

    def forget(self, operands: Sequence[int]) -> Outcome:
        return self._handle(OperandsForgotten(list(operands)))

    def answer(self, keys: Sequence[Key]) -> Outcome:
        return self._handle(BlocksReturned(*_columns(keys)))

    def refuse(self, keys: Sequence[Key]) -> Outcome:
        return self._handle(BlocksFailed(*_columns(keys)))

    def checked(self, job: int, wrong: Sequence[int]) -> Outcome:
        """These blocks of the job are wrong."""
        return self._handle(JobChecked(job, list(wrong)))

    def look(self) -> Outcome:
        """The server checks the clock: is anything overdue?"""
        return self._handle(TimePassed())

    @property
    def next_look_s(self) -> float:
        """When something may be overdue; infinity if nothing ever will be."""
        return self._dispatcher.deadlines.next_s

    def slow(self, device: int, factor: float) -> None:
        """From now on the device is slower than its profile."""
        for name in ("flops", "down_bps", "up_bps"):
            self._devices.profiles[name][device] /= factor

    def check(self) -> None:
        self._dispatcher.check()

    @property
    def corrected(self) -> int:
        """Number of devices whose profile was corrected by what they really delivered."""
        return int((self._dispatcher.profiles != self._profiles[: self.joined]).sum())

    def block_count(self, job: int) -> int:
        """Blocks that an unfinished job has ever been cut into; the next block gets this number."""
        return len(self._dispatcher.jobs[job].state)

    def left_behind(self) -> str:
        """What the dispatcher still holds of jobs and kept slabs; empty once all are over and forgotten."""
        busy = {i: repr(d) for i, d in enumerate(self._dispatcher.devices) if not d.idle or d.kept_bytes}
        late = {
            i: d.waiting
            for i, d in enumerate(self._dispatcher.devices)
            if d.idle and max(abs(d.waiting.down_s), abs(d.waiting.compute_s), abs(d.waiting.up_s)) > ROUNDING_S
        }
        rest: dict[str, object] = {"jobs": list(self._dispatcher.jobs), "busy": busy, "backlog": late}
        rest |= {"orphans": self._dispatcher._orphans, "waiting": self._dispatcher._waiting_total}
        rest["losses"] = self._dispatcher._losses
        rest["suspects"] = [d for d in self._dispatcher._suspects if not self._dispatcher.devices[d].alive]
        return ", ".join(f"{name} {value}" for name, value in rest.items() if value)

    def _handle(self, event: Event) -> Outcome:
        outcome = Outcome()
        for instruction in self._dispatcher.handle(event, self.now_s):
            match instruction:
                case SendBlocks():
                    outcome.sent += self._sent(instruction)
                case AcceptBlocks(positions=positions):
                    outcome.accepted += positions
                case JobFinished(job=job):
                    outcome.finished.append(job)
                case JobWaits(job=job):
                    outcome.waiting.append(job)
                case SuspendDevice(device=device):
                    outcome.suspended.append(device)
                case CancelBlocks(devices=devices, jobs=jobs, blocks=blocks):
                    outcome.cancelled += zip(devices, jobs, blocks, strict=True)
                case CheckJob(job=job):
                    outcome.to_check.append(job)
        return outcome

    def _sent(self, blocks: SendBlocks) -> list[Sent]:
        made = schedule(self._devices, np.array(blocks.devices), self._dispatcher.jobs, blocks, self.now_s)
        keys = zip(blocks.devices, blocks.jobs, blocks.blocks, strict=True)
        return [
            Sent(key, tuple(tile), due)
            for key, tile, due in zip(keys, made.tiles.tolist(), made.due_s.tolist(), strict=True)
        ]


def _columns(keys: Sequence[Key]) -> tuple[list[int], list[int], list[int]]:
    return [k[0] for k in keys], [k[1] for k in keys], [k[2] for k in keys]
