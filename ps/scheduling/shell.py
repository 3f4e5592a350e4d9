"""The shell around the dispatcher: tells it what happened and carries out what it decides.

The only place that interprets instructions. Sockets, virtual time and the simulated world of tests are subclasses; none
of them reads the dispatcher's state, because an instruction carries all that a shell needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, assert_never

from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    AcceptBlocks,
    BlocksLost,
    BlocksRecovered,
    CancelBlocks,
    CheckJob,
    Event,
    Instruction,
    JobFinished,
    JobWaits,
    NameStragglers,
    SendBlocks,
    SuspendDevice,
)

Returned = TypeVar("Returned")  # what a subclass keeps of a turn's answers until it knows which of them count


class Shell(ABC, Generic[Returned]):
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @abstractmethod
    def _now_ns(self) -> int: ...

    @abstractmethod
    def _dispatch_s(self, at_ns: int) -> float:
        """The dispatcher's time at that moment."""

    def _handle(self, event: Event, returned: Returned | None = None) -> None:
        """Tell the dispatcher, and carry out what it decides. `returned`: the answers that a BlocksReturned stands
        for."""
        at_ns = self._now_ns()
        self._carry_out(self._dispatcher.handle(event, self._dispatch_s(at_ns)), at_ns, returned)

    def _carry_out(self, instructions: Sequence[Instruction], at_ns: int, returned: Returned | None = None) -> None:
        """In the dispatcher's order, but checks last: devices get their work first, and a check may suspend some of
        them. `at_ns`: when the dispatcher was told; by the model, its blocks leave then."""
        planned_ns = self._now_ns()
        complete: list[CheckJob] = []
        for instruction in instructions:
            match instruction:
                case SendBlocks():
                    self._send_blocks(instruction, at_ns)
                case AcceptBlocks(positions=positions):
                    assert returned is not None, "only answers can be accepted"
                    self._accept_blocks(returned, positions)
                case CancelBlocks():
                    self._cancel_blocks(instruction)
                case CheckJob():
                    complete.append(instruction)
                case JobFinished():
                    self._job_finished(instruction)
                case JobWaits():
                    self._job_waits(instruction)
                case SuspendDevice():
                    self._suspend_device(instruction)
                case NameStragglers():
                    self._name_stragglers(instruction)
                case BlocksLost():
                    self._blocks_lost(instruction, at_ns, planned_ns)
                case BlocksRecovered():
                    self._blocks_recovered(instruction)
                case _:
                    assert_never(instruction)
        self._carried_out()
        for job in complete:
            self._check_job(job)

    @abstractmethod
    def _send_blocks(self, instruction: SendBlocks, at_ns: int) -> None: ...

    @abstractmethod
    def _accept_blocks(self, returned: Returned, positions: list[int]) -> None: ...

    @abstractmethod
    def _cancel_blocks(self, instruction: CancelBlocks) -> None: ...

    @abstractmethod
    def _check_job(self, instruction: CheckJob) -> None:
        """Ends, now or later, in a JobChecked."""

    @abstractmethod
    def _job_finished(self, instruction: JobFinished) -> None: ...

    @abstractmethod
    def _job_waits(self, instruction: JobWaits) -> None: ...

    @abstractmethod
    def _suspend_device(self, instruction: SuspendDevice) -> None: ...

    @abstractmethod
    def _name_stragglers(self, instruction: NameStragglers) -> None: ...

    @abstractmethod
    def _blocks_lost(self, instruction: BlocksLost, at_ns: int, planned_ns: int) -> None: ...

    @abstractmethod
    def _blocks_recovered(self, instruction: BlocksRecovered) -> None: ...

    def _carried_out(self) -> None:
        """All instructions of this event were carried out, except for checks."""
