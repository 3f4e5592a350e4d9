"""Requests of other threads to the server's thread, above all new products.

New plans take a long time (13 devices: up to 0.5 s; 1,000: 1.5 s), so they are made in a thread of their own; products
submitted meanwhile wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ps.outside import Background, Bell
from ps.planning.plans import Level
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import JobsSubmitted, Submission
from ps.transport.checking import Checking
from ps.transport.jobs import Live, Product

BLOCKS_PER_TURN = 4096  # if ready products have more in all, each begins in a turn of its own


class Requests:
    """A queue of functions for the server's thread, which calls one per turn."""

    def __init__(self, bell: Bell) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self.bell = bell  # rings when there is something to do

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Callable[[], None]) -> None:
        self._waiting.append(request)
        self.wake()

    def add_first(self, request: Callable[[], None]) -> None:
        """For the server's thread: to be done at its next turn."""
        self._waiting.appendleft(request)
        self.wake()

    def wake(self) -> None:
        self.bell.ring()

    def do_one(self) -> None:
        if self._waiting:
            self._waiting.popleft()()

    def close(self) -> None:
        self.bell.close()


class Intake:
    """Numbers, plans and begins submitted products."""

    def __init__(
        self,
        jobs: dict[int, Live],
        dispatcher: Dispatcher,
        planning: Background,
        checking: Checking | None,
        tell: Callable[[JobsSubmitted], None],
        next_turn: Callable[[Callable[[], None]], None],
        now_s: Callable[[], float],
    ) -> None:
        """`planning`: makes new plans. `checking`: None if products are not verified. `next_turn`: does something at
        the next turn, before other requests. `now_s`: the dispatcher's time."""
        self._jobs, self._dispatcher, self._planning, self._checking = jobs, dispatcher, planning, checking
        self._tell, self._next_turn, self._now_s = tell, next_turn, now_s
        self._beginning = False  # a submission of which some products have begun
        self._waiting: deque[tuple[Sequence[Product], tuple[Level, ...]]] = deque()  # while plans are being made
        self._next_job = 0

    def begin(self, products: Sequence[Product], ahead: tuple[Level, ...]) -> None:
        """Plan these products and send their first blocks, or let them wait for plans in progress."""
        if self._planning.busy or self._beginning:
            self._waiting.append((products, ahead))
            return
        numbered = dict(enumerate(products, self._next_job))
        self._next_job += len(products)
        submitted = JobsSubmitted(
            [Submission(job, p.request, p.critical, p.plan, p.kept) for job, p in numbered.items()], ahead
        )
        inquiry = self._dispatcher.inquire(submitted, self._now_s())
        if inquiry is not None and inquiry.takes_long:
            asked = inquiry
            self._planning.do(
                asked.answer, lambda plans: self._go(numbered, self._dispatcher.with_plans(submitted, asked, plans))
            )
        elif inquiry is not None:
            self._go(numbered, self._dispatcher.with_plans(submitted, inquiry, inquiry.answer()))
        else:
            self._go(numbered, submitted)

    def _go(self, numbered: dict[int, Product], planned: JobsSubmitted) -> None:
        self._jobs.update((job, Live(product)) for job, product in numbered.items())
        self._tell_parts(_parts(planned))

    def _tell_parts(self, parts: list[JobsSubmitted]) -> None:
        self._tell(parts[0])
        if self._checking is not None:
            self._checking.prepare(
                (new.job, new.plan.boxes) for new in parts[0].jobs if new.plan is not None and not new.plan.waits
            )
        self._beginning = len(parts) > 1
        if self._beginning:
            self._next_turn(lambda: self._tell_parts(parts[1:]))
        else:
            self._plan_ahead()

    def _plan_ahead(self) -> None:
        ahead = self._dispatcher.inquire_ahead(self._now_s())
        if ahead is not None and ahead.takes_long:
            self._planning.do(ahead.answer, lambda _: self._begin_waiting())
            return
        if ahead is not None:
            ahead.answer()
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the products that were submitted while plans were made."""
        while self._waiting and not (self._planning.busy or self._beginning):
            self.begin(*self._waiting.popleft())


def _parts(planned: JobsSubmitted) -> list[JobsSubmitted]:
    """The event in parts, for one turn of the server each: to begin thousands of blocks takes a tenth of a second.
    Products without a plan are planned together, so they stay together."""
    jobs = planned.jobs
    if any(new.plan is None for new in jobs):
        return [planned]
    if sum(len(new.plan.boxes) for new in jobs if new.plan is not None) <= BLOCKS_PER_TURN:
        return [planned]
    return [replace(planned, jobs=[new], more=new is not jobs[-1]) for new in jobs]
