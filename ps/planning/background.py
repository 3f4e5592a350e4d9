"""A question to the planner with all that its answer depends on, so that another thread can work on it.

Solving for thousands of devices takes seconds, and the server's thread must not stop meanwhile. The dispatcher's state
changes while the planner works. An inquiry holds what was known when it was made, and the dispatcher checks the answer
against what is known by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ps.planning.planner import Integers, Plan, PlanError, Planner, Question

LARGE = 1000  # devices; below, the slowest plan takes 30 ms (`make bench`, part e); above, it is a pause
END_S = 5.0


@dataclass(frozen=True, slots=True)
class Inquiry:
    planner: Planner
    question: Question | None  # None: plan ahead
    profiles: NDArray[np.void]
    able: Integers
    revised: Mapping[int, int]
    busy: Integers

    @property
    def takes_long(self) -> bool:
        """Whether the answer may need to be solved, for a large fleet."""
        return len(self.able) > LARGE and (
            self.question is None or not self.planner.has_ready(self.question, self.able, self.revised, self.busy)
        )

    def answer(self) -> list[Plan]:
        """Plans; an empty list if there are none, or only plans ahead were asked for."""
        if self.question is None:
            self.planner.plan_ahead(self.profiles, self.able, self.revised, self.busy)
            return []
        try:
            return ask(self.planner, self.question, self.profiles, self.able, self.revised, self.busy)
        except PlanError:
            return []  # the dispatcher finds out when the jobs begin, and says why


def ask(
    planner: Planner,
    question: Question,
    profiles: NDArray[np.void],
    able: Integers,
    revised: Mapping[int, int],
    busy: Integers,
) -> list[Plan]:
    """Plans without the devices that are kept for deferred products; with them, if the others cannot do it."""
    try:
        return planner.plan(question, profiles, able, revised, busy)
    except PlanError:
        if not len(busy):
            raise
        return planner.plan(question, profiles, able, revised)


class PlanningThread:
    """Answers inquiries one after another, beside the server's thread, and hands the answers back to it."""

    def __init__(self, hand_back: Callable[[Callable[[], None]], None]) -> None:
        """`hand_back`: makes the server's thread call a function soon."""
        self.busy = 0  # inquiries not handed back yet; counted by the server's thread alone
        self._hand_back = hand_back
        self._inquiries: SimpleQueue[tuple[Inquiry, Callable[[list[Plan]], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # started on first use

    def ask(self, inquiry: Inquiry, then: Callable[[list[Plan]], None]) -> None:
        self.busy += 1
        self._inquiries.put((inquiry, then))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="planning", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (asked := self._inquiries.get()) is not None:
            inquiry, then = asked
            try:
                plans = inquiry.answer()
            except BaseException as error:
                self._hand_back(lambda error=error: _raise(error))  # type: ignore[misc]
                return
            self._hand_back(lambda plans=plans, then=then: self._done(plans, then))  # type: ignore[misc]

    def _done(self, plans: list[Plan], then: Callable[[list[Plan]], None]) -> None:
        self.busy -= 1
        then(plans)

    def end(self) -> None:
        """At the end of the server: begin no further inquiry."""
        if self._thread is not None:
            while not self._inquiries.empty():
                self._inquiries.get()
            self._inquiries.put(None)
            self._thread.join(END_S)  # a long solve ends with the process


def _raise(error: BaseException) -> None:
    raise error
