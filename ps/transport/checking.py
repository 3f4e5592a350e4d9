"""The check of complete products (`ps/verification/verifier.py`); most of it runs while the devices still work.

A glance at a small product takes less time than handing it to another thread. Everything else is done outside the
server's thread, critical products first, so that no answer waits for a check.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from ps.outside import Background, Done
from ps.planning.cost import Integers
from ps.scheduling.events import JobChecked, Work
from ps.transport.jobs import Live, Totals
from ps.verification.glance import Glance, Lot
from ps.verification.sketch import Expectation
from ps.verification.verifier import Findings, Verifier

# Operands and output of a product that the server's thread glances at: it reads 4 MiB in about 2 ms. Larger ones would
# delay answers, smaller ones are done before another thread has taken over.
GLANCED_AT_BYTES = 4 << 20


class Checking:
    def __init__(
        self,
        jobs: Mapping[int, Live],
        totals: Totals,
        background: Background,
        fleet: Callable[[], int] = lambda: 0,
        notice: Callable[[str], None] = lambda text: None,
        chance: random.Random | None = None,
    ) -> None:
        """`fleet`: returns the number of devices present. `chance`: a random source that devices cannot predict."""
        chance = chance or random.SystemRandom()
        self._jobs, self._totals, self._fleet, self._notice = jobs, totals, fleet, notice
        self._background = background
        self._secret = chance.getrandbits(64)  # devices must not know how their blocks are checked
        self._verifier = Verifier(chance.getrandbits(64))  # used in the background only
        self._lot = Lot(chance.randrange)
        self._doubted = False

    def prepare(self, jobs: Iterable[tuple[int, Integers]]) -> None:
        """Jobs that have begun, each with the boxes of its plan."""
        begun = time.perf_counter()
        for job, boxes in jobs:
            if (live := self._jobs.get(job)) is None:
                continue
            self._draw(live)
            if _small(live):
                self._glance(job, live)
            if live.drawn or not _small(live):
                work = _timed(partial(self._prepared, job, live, boxes))
                self._background.do(work, lambda timed: self._spent(timed[1]), _rank(live, complete=False))
        self._totals.check_s += time.perf_counter() - begun

    def check(self, job: int, work: Work, then: Callable[[JobChecked], None]) -> None:
        """Check this complete job, and call `then`, now or in a later turn; wrong blocks do not count."""
        begun = time.perf_counter()
        live, boxes, fleet = self._jobs[job], work.boxes[work.done], self._fleet()
        self._totals.checked_blocks += len(work.done)
        self._draw(live)
        glances = _small(live) and not live.drawn and live.expected is None
        right = glances and not self._glance(job, live).suspicious(live.product.out)
        if not right:
            self._background.do(
                _timed(partial(self._found, job, live, boxes, work.devices, fleet)),
                lambda timed: self._told(job, live, work, timed, then),
                _rank(live, complete=True),
            )
        self._totals.check_s += time.perf_counter() - begun
        if right:
            then(JobChecked(job, [], {}))

    def _told(
        self, job: int, live: Live, work: Work, timed: tuple[Findings, float], then: Callable[[JobChecked], None]
    ) -> None:
        found, seconds = timed
        self._spent(seconds)
        if found.wrong:
            cells = int(np.prod(work.boxes[work.done][found.wrong][:, 1::2], axis=1).sum())
            self._totals.wrong_blocks += len(found.wrong)
            self._totals.blocks -= len(found.wrong)
            self._totals.flops -= 2 * cells * live.product.shape.inner
        if found.doubted and not self._doubted:  # once is enough
            self._doubted = True
            name = live.product.name
            self._notice(f"the check of {name} accuses devices, but {found.doubted}. None is suspended for it")
        then(JobChecked(job, work.done[found.wrong].tolist(), found.why))

    def _spent(self, seconds: float) -> None:
        self._totals.check_background_s += seconds

    def _draw(self, live: Live) -> None:
        """Decide at random, once per product, whether to sketch it."""
        if live.drawn is None:
            live.drawn = self._lot.draw()

    # ---- in the background, but for glances at small products

    def _prepared(self, job: int, live: Live, boxes: Integers) -> None:
        self._glance(job, live)
        if live.drawn:
            self._expected(job, live, boxes)

    def _found(self, job: int, live: Live, boxes: Integers, devices: Integers, fleet: int) -> Findings:
        product = live.product
        if not live.drawn and live.expected is None and not self._glance(job, live).suspicious(product.out):
            return Findings()
        found = self._verifier.check(
            product.left.array,
            product.right.array,
            product.out,
            boxes,
            devices,
            self._expected(job, live, boxes),
            fleet,
            again=live.checked,
        )
        live.checked = True
        return found

    def _glance(self, job: int, live: Live) -> Glance:
        if live.glance is None:
            live.glance = Glance.of(live.product.left.array, live.product.right.array, (self._secret, job, 1))
        return live.glance

    def _expected(self, job: int, live: Live, boxes: Integers) -> Expectation:
        if live.expected is None or not live.expected.fits(boxes):
            left, right = live.product.left.array, live.product.right.array
            live.expected = Expectation.of(left, right, boxes, (self._secret, job))
        return live.expected


def _small(live: Live) -> bool:
    return live.product.operand_bytes + live.product.out.nbytes <= GLANCED_AT_BYTES


def _rank(live: Live, complete: bool) -> int:
    """Critical products first, complete ones before those that devices still work on."""
    return 2 * (not live.product.critical) + (not complete)


def _timed(work: Callable[[], Done]) -> Callable[[], tuple[Done, float]]:
    """The work's result, and its seconds."""

    def timed() -> tuple[Done, float]:
        begun = time.perf_counter()
        return work(), time.perf_counter() - begun

    return timed
