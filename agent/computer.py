"""The agent's second thread: computes blocks in the order they came, and stops within a part of one when nobody wants
them any more."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from agent.kernels import Abandoned, Array, InParts, Kernel
from agent.operands import BlockRow, Operands
from agent.wire import ANSWER, DONE, FAILED, Result, WireError

log = logging.getLogger(__name__)

FLUSH_BYTES = 1 << 20  # answers travel together until they are this many bytes
FLUSH_S = 0.005  # or this old


class Computer(threading.Thread):
    """Computes blocks in the order they came. Answers of small blocks travel together."""

    def __init__(
        self, operands: Operands, kernel: Kernel, ring: Callable[[], object], part_flops: float = math.inf
    ) -> None:
        """`part_flops`: of a part of a block, between two of which `abandoned` ends it all."""
        super().__init__(name="compute", daemon=True)
        self.abandoned = False
        self.inbox: SimpleQueue[list[BlockRow] | None] = SimpleQueue()
        self.outbox: SimpleQueue[Result] = SimpleQueue()
        self.cancelled: set[tuple[int, int]] = set()
        self._spent: dict[tuple[int, int], float] = {}  # seconds so far of blocks that come in chunks
        self._operands, self._ring = operands, ring
        self._kernel = InParts(kernel, part_flops, lambda: self.abandoned)
        self._chunks_given = self._chunks_done = 0  # each counted by one thread

    def give(self, rows: list[BlockRow]) -> None:
        self._chunks_given += sum(row[13] > 1 for row in rows)
        self.inbox.put(rows)

    @property
    def streaming(self) -> bool:
        """Is a chunk of a streamed block waiting to be computed?"""
        return self._chunks_given > self._chunks_done

    def run(self) -> None:
        with contextlib.suppress(Abandoned):
            self._compute_all()

    def _compute_all(self) -> None:
        while (rows := self.inbox.get()) is not None:
            answers: list[tuple[int, int, int, int, int, float, int]] = []
            cells: list[Array] = []
            size, opened = 0, time.perf_counter()
            for row in rows:
                device, job, block = row[:3]
                begin = time.perf_counter()
                status, product = self._compute(row)
                now = time.perf_counter()
                seconds = self._spent.pop((job, block), 0.0) + now - begin
                if row[13] > 1:
                    self._chunks_done += 1
                    self._ring()
                if product is None:
                    if row[12] + 1 < row[13]:
                        self._spent[job, block] = seconds
                    continue
                answers.append((device, job, block, status, product.size, seconds, 0))
                cells.append(product.reshape(-1))
                size += product.nbytes
                if size >= FLUSH_BYTES or now - opened >= FLUSH_S:
                    self._flush(answers, cells)
                    answers, cells, size, opened = [], [], 0, now
            if answers:
                self._flush(answers, cells)

    def _compute(self, row: BlockRow) -> tuple[int, Array | None]:
        """Status and product; None: there is nothing to answer, or not yet."""
        job, block, last = row[1], row[2], row[12] + 1 == row[13]
        if (job, block) in self.cancelled:
            if last:
                self.cancelled.discard((job, block))
            self._operands.skip(row)
            return DONE, None
        try:
            return DONE, self._operands.product(row, self._kernel)
        except KeyError:
            return DONE, None  # dropped while it waited: somebody else has answered
        except (MemoryError, WireError) as error:
            log.warning("block %d of job %d failed: %s", block, job, error or "not enough memory")
            self._operands.skip(row)
            if not last:
                self.cancelled.add((job, block))  # the rest of it is of no use
            return FAILED, _NOTHING

    def _flush(self, answers: list[tuple[int, int, int, int, int, float, int]], cells: list[Array]) -> None:
        data = cells[0] if len(cells) == 1 else np.concatenate(cells)
        self.outbox.put(Result(np.array(answers, dtype=ANSWER), data))
        self._ring()


_NOTHING: Array = np.empty(0, dtype=np.float32)
