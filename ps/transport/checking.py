"""The check of complete products (`ps/verification/verifier.py`); most of it runs while the devices still work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ps.planning.cost import Integers
from ps.scheduling.events import JobChecked, Work
from ps.transport.jobs import Live, Totals
from ps.verification.glance import Glance, Lot
from ps.verification.sketch import Expectation
from ps.verification.verifier import Findings, Verifier


class Checking:
    def __init__(
        self,
        jobs: Mapping[int, Live],
        totals: Totals,
        fleet: Callable[[], int] = lambda: 0,
        notice: Callable[[str], None] = lambda text: None,
        chance: random.Random | None = None,
    ) -> None:
        """`fleet`: returns the number of devices present. `chance`: a random source that devices cannot predict."""
        chance = chance or random.SystemRandom()
        self._jobs, self._totals, self._fleet, self._notice = jobs, totals, fleet, notice
        self._secret = chance.getrandbits(64)  # devices must not know how their blocks are checked
        self._verifier = Verifier(chance.getrandbits(64))
        self._lot = Lot(chance.randrange)
        self._doubted = False

    def prepare(self, jobs: Iterable[tuple[int, Integers]]) -> None:
        """Jobs that have begun, each with the boxes of its plan."""
        begun = time.perf_counter()
        for job, boxes in jobs:
            if job in self._jobs:
                self._glance(job)
                self._draw(job, boxes)
        self._totals.check_s += time.perf_counter() - begun

    def check(self, job: int, work: Work) -> JobChecked:
        """Check this complete job; wrong blocks do not count."""
        begun = time.perf_counter()
        live = self._jobs[job]
        product, boxes = live.product, work.boxes[work.done]
        self._totals.checked_blocks += len(work.done)
        self._draw(job, boxes)
        found = Findings()
        if live.expected is not None or self._glance(job).suspicious(product.out):
            found = self._verifier.check(
                product.left.array,
                product.right.array,
                product.out,
                boxes,
                work.devices,
                self._expected(job, boxes),
                self._fleet(),
                again=live.checked,
            )
            live.checked = True
        if found.wrong:
            cells = int(np.prod(boxes[found.wrong][:, 1::2], axis=1).sum())
            self._totals.wrong_blocks += len(found.wrong)
            self._totals.blocks -= len(found.wrong)
            self._totals.flops -= 2 * cells * product.shape.inner
        if found.doubted and not self._doubted:  # once is enough
            self._doubted = True
            self._notice(f"the check of {product.name} accuses devices, but {found.doubted}. None is suspended for it")
        self._totals.check_s += time.perf_counter() - begun
        return JobChecked(job, work.done[found.wrong].tolist(), found.why)

    def _draw(self, job: int, boxes: Integers) -> None:
        """Decide at random, once per product, whether to sketch it."""
        live = self._jobs[job]
        if not live.drawn:
            live.drawn = True
            if self._lot.draw():
                self._expected(job, boxes)

    def _glance(self, job: int) -> Glance:
        live = self._jobs[job]
        if live.glance is None:
            live.glance = Glance.of(live.product.left.array, live.product.right.array, (self._secret, job, 1))
        return live.glance

    def _expected(self, job: int, boxes: Integers) -> Expectation:
        live = self._jobs[job]
        if live.expected is None or not live.expected.fits(boxes):
            left, right = live.product.left.array, live.product.right.array
            live.expected = Expectation.of(left, right, boxes, (self._secret, job))
        return live.expected
