"""The agent's compute thread. It computes blocks in arrival order and, once abandoned, stops after the current part.

The protocol thread (agent/compute/session.py) feeds `inbox` and drains `outbox`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from agent.compute.kernels import Abandoned, Array, InParts, Kernel
from agent.compute.pieces import BlockRow, Operands
from agent.protocol.wire import ANSWER, DONE, FAILED, Result, WireError

log = logging.getLogger(__name__)

FLUSH_BYTES = 1 << 20  # batch answers up to this size
FLUSH_S = 0.005  # or up to this age
PART_S = 0.25  # approximate compute time of one part; a block continues this long after its device has left

AnswerRow = tuple[int, int, int, int, int, float, int]  # in the order of wire.ANSWER


class Computer(threading.Thread):
    """Computes blocks in arrival order; batches the answers of small blocks."""

    def __init__(
        self, operands: Operands, kernel: Kernel, ring: Callable[[], object], part_flops: float = math.inf
    ) -> None:
        """`part_flops`: size of one part of a block; `abandoned` is checked between parts."""
        super().__init__(name="compute", daemon=True)
        self.abandoned = False
        self.inbox: SimpleQueue[list[BlockRow] | None] = SimpleQueue()
        self.outbox: SimpleQueue[Result] = SimpleQueue()
        self.cancelled: set[tuple[int, int]] = set()
        self.ended: SimpleQueue[tuple[int, int, int]] = SimpleQueue()  # blocks that ended without an answer
        self.current: Sequence[BlockRow] = ()  # the blocks being computed, by one product
        self._spent: dict[tuple[int, int], float] = {}  # seconds so far, for blocks in chunks
        self._operands, self._ring = operands, ring
        self._kernel = InParts(kernel, part_flops, lambda: self.abandoned)
        self._run_flops = part_flops * FLUSH_S / PART_S
        self._chunks_given = self._chunks_done = 0  # each is written by one thread only
        self._rows_given = self._rows_done = 0

    def give(self, rows: list[BlockRow]) -> None:
        self._rows_given += len(rows)
        self._chunks_given += sum(row.chunks > 1 for row in rows)
        self.inbox.put(rows)

    @property
    def queued_rows(self) -> int:
        return self._rows_given - self._rows_done

    @property
    def streaming(self) -> bool:
        """True while a chunk of a streamed block waits to be computed."""
        return self._chunks_given > self._chunks_done

    @property
    def unfinished(self) -> set[tuple[int, int]]:
        """Blocks (job, block) of which some chunks were computed and others are still to come."""
        return set(self._spent)

    def run(self) -> None:
        with contextlib.suppress(Abandoned):
            self._compute_all()

    def _compute_all(self) -> None:
        while (rows := self.inbox.get()) is not None:
            self._compute_rows(rows)
            self.current = ()

    def _compute_rows(self, rows: list[BlockRow]) -> None:
        answers: list[AnswerRow] = []
        cells: list[Array] = []
        size, opened, at = 0, time.perf_counter(), 0
        while at < len(rows):
            run = self.current = self._run(rows, at)
            at += len(run)
            answered, product = self._answer(run)
            self._rows_done += len(run)
            now = time.perf_counter()
            if run[0].chunks > 1:
                self._chunks_done += 1
                self._ring()
            if product is None:
                continue
            if cells and size + product.nbytes > FLUSH_BYTES:  # joining copies, so batch small answers only
                self._flush(answers, cells)
                answers, cells, size, opened = [], [], 0, now
            answers += answered
            cells.append(product.reshape(-1))
            size += product.nbytes
            if size >= FLUSH_BYTES or now - opened >= FLUSH_S:
                self._flush(answers, cells)
                answers, cells, size, opened = [], [], 0, now
        if answers:
            self._flush(answers, cells)

    def _run(self, rows: list[BlockRow], at: int) -> list[BlockRow]:
        """The rows to compute next, by one product."""
        try:
            count = self._operands.run_length(rows, at, FLUSH_BYTES, self._run_flops)
        except KeyError:  # its pieces were dropped while it waited
            count = 1
        run = rows[at : at + count]
        if self.cancelled and any(row.key[1:] in self.cancelled for row in run):
            return run[:1]
        return run

    def _answer(self, run: list[BlockRow]) -> tuple[list[AnswerRow], Array | None]:
        """Answers to the blocks of a run, and their cells. None: nothing to answer, or not yet."""
        begin = time.perf_counter()
        if len(run) > 1:
            with contextlib.suppress(KeyError, MemoryError):  # then one by one, below
                products = self._operands.products(run, self._kernel)
                seconds, one = (time.perf_counter() - begin) / len(run), products[0].size
                return [(*row.key, DONE, one, seconds, 0) for row in run], products
        answered: list[AnswerRow] = []
        cells: list[Array] = []
        for row in run:
            begin, key = time.perf_counter(), (row.job, row.block)
            status, product = self._compute(row)
            seconds = self._spent.pop(key, 0.0) + time.perf_counter() - begin
            if product is not None:
                answered.append((*row.key, status, product.size, seconds, 0))
                cells.append(product.reshape(-1))
            elif not row.is_last:
                self._spent[key] = seconds
            else:
                self.ended.put(row.key)
        if not cells:
            return [], None
        return answered, cells[0] if len(cells) == 1 else np.concatenate(cells)

    def _compute(self, row: BlockRow) -> tuple[int, Array | None]:
        """Status and product. None: nothing to answer, or not yet."""
        job, block, last = row.job, row.block, row.is_last
        if (job, block) in self.cancelled:
            if last:
                self.cancelled.discard((job, block))
            self._operands.skip(row)
            return DONE, None
        try:
            return DONE, self._operands.product(row, self._kernel)
        except KeyError:
            return DONE, None  # its pieces were dropped while it waited: another device has answered
        except (MemoryError, WireError) as error:
            log.warning("block %d of job %d failed: %s", block, job, error or "not enough memory")
            self._operands.skip(row)
            if not last:
                self.cancelled.add((job, block))  # its remaining chunks are useless
            return FAILED, _NOTHING

    def _flush(self, answers: list[AnswerRow], cells: list[Array]) -> None:
        data = cells[0] if len(cells) == 1 else np.concatenate(cells)
        self.outbox.put(Result(np.array(answers, dtype=ANSWER), data))
        self._ring()


_NOTHING: Array = np.empty(0, dtype=np.float32)
