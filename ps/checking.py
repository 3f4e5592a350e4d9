"""The check of complete products (`ps/verify.py`), its larger part made while the devices still work."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping

import numpy as np

from ps.jobs import Live, Totals
from ps.ledger import DONE
from ps.verify import Expectation, wrong_blocks


class Checking:
    def __init__(self, jobs: Mapping[int, Live], totals: Totals) -> None:
        self._jobs, self._totals = jobs, totals
        self._secret = secrets.randbits(64)  # so that nobody knows what is asked of its blocks

    def prepare(self, jobs: Iterable[int]) -> None:
        begun = time.perf_counter()
        for job in jobs:
            if job in self._jobs:
                self._expected(job)
        self._totals.check_s += time.perf_counter() - begun

    def wrong(self, job: int) -> list[int]:
        """The blocks of this complete job that are not right; they do not count."""
        begun = time.perf_counter()
        product, record = self._jobs[job].product, self._jobs[job].job
        done = np.flatnonzero(np.array(record.state) == DONE)
        expected = self._expected(job)
        wrong = wrong_blocks(product.left.array, product.right.array, product.out, record.tiles[done], expected)
        self._totals.checked_blocks += len(done)
        if wrong:
            cells = int(np.prod(record.tiles[done[wrong]][:, 1::2], axis=1).sum())
            self._totals.wrong_blocks += len(wrong)
            self._totals.blocks -= len(wrong)
            self._totals.flops -= 2 * cells * product.shape.inner
        self._totals.check_s += time.perf_counter() - begun
        found: list[int] = done[wrong].tolist()
        return found

    def _expected(self, job: int) -> Expectation:
        live = self._jobs[job]
        if live.expected is None:
            live.expected = Expectation.of(live.product.left.array, live.product.right.array, (self._secret, job))
        return live.expected
