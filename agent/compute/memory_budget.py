"""The memory budget: blocks must fit into what the owner lends, and are counted before any memory is allocated.

Counted: operand pieces held, outputs of blocks being computed (twice for a block in chunks: its sum and the next
addend), and answers that have not left this process. A block that does not fit waits for earlier ones; if nothing under
way could make room, it is refused. A server that follows its own cost model (ps/planning/cost.py) never sees a refusal:
it counts the same things, and counts an answer until it has arrived.

Used by the protocol thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from agent.compute.pieces import BlockRow, block_rows
from agent.protocol.wire import WireError, Work

# Pieces of cancelled blocks stay until the server releases them, and a kernel may copy a strip of an operand. Memory
# held may exceed memory lent by this factor, never by more.
MEMORY_SLACK = 1.25
# Limit on rows that wait to be computed: the credit, plus cancelled blocks that the compute thread has not reached.
ROWS_PER_CREDIT, SPARE_ROWS = 16, 1024
MOST_RELEASED = 1 << 16  # pieces named as released in one message; a server names each piece once

Key = tuple[int, int, int]  # device, job, block


class Tracker(Protocol):
    """Says whether a message has left this process; pyzmq's MessageTracker does."""

    @property
    def done(self) -> bool: ...


class MemoryBudget:
    def __init__(self, lent_bytes: int, credit_blocks: int) -> None:
        self.lent_bytes = lent_bytes
        self.most_bytes = int(MEMORY_SLACK * lent_bytes)
        self.most_rows = ROWS_PER_CREDIT * credit_blocks + SPARE_ROWS
        self._waiting: deque[BlockRow] = deque()
        self._open: dict[Key, int] = {}  # blocks being computed, or awaiting more chunks -> output bytes
        self._open_bytes = 0
        self._refused: set[Key] = set()  # blocks with chunks still to come
        self._answers: deque[tuple[Tracker, int]] = deque()
        self._answer_bytes = 0

    def offer(self, work: Work, queued_rows: int) -> None:
        """Queue the blocks of a message; `queued_rows` already wait for the compute thread. WireError if that is more
        than any server has reason to send. Call it before anything else uses the message."""
        if len(work.blocks) + len(self._waiting) + queued_rows > self.most_rows:
            raise WireError(f"{len(work.blocks)} blocks in one message, at most {self.most_rows} may wait here")
        if len(work.released) > MOST_RELEASED:
            raise WireError(f"{len(work.released)} pieces are released at once, at most {MOST_RELEASED} are allowed")
        self._waiting.extend(block_rows(work.blocks))

    def take(self, operand_bytes: int) -> tuple[list[BlockRow], list[BlockRow]]:
        """Rows to compute now, and rows refused. Rows in neither list keep waiting, or belong to a refused block."""
        self.settle()
        taken: list[BlockRow] = []
        refused: list[BlockRow] = []
        while self._waiting:
            row = self._waiting[0]
            key = row.key
            if key in self._refused:
                if row.is_last:
                    self._refused.discard(key)
            elif key in self._open:
                if row.chunk == 0:
                    raise WireError(f"block {key[2]} of job {key[1]} came a second time")
                taken.append(row)
            elif operand_bytes + self.output_bytes + (size := output_bytes(row)) <= self.most_bytes:
                self._open[key] = size
                self._open_bytes += size
                taken.append(row)
            elif self.output_bytes:
                break
            else:
                refused.append(row)
                if not row.is_last:
                    self._refused.add(key)
            self._waiting.popleft()
        if len(self._refused) > self.most_rows:
            raise WireError(f"{len(self._refused)} blocks do not fit here")
        return taken, refused

    @property
    def waiting(self) -> bool:
        """True while blocks wait for room; then the caller should read nothing more."""
        return bool(self._waiting)

    @property
    def output_bytes(self) -> int:
        return self._open_bytes + self._answer_bytes

    def __contains__(self, key: Key) -> bool:
        """True while this block is being computed or queued for the compute thread."""
        return key in self._open

    def forgo(self, key: Key) -> None:
        """This block will not be computed; more of its chunks may arrive."""
        self._open_bytes -= self._open.get(key, 0)
        if key in self._open:
            self._open[key] = 0

    def end(self, key: Key) -> None:
        """Nothing of this block is held here."""
        self._open_bytes -= self._open.pop(key, 0)

    def answered(self, keys: Iterable[Key], size: int, tracker: Tracker | None) -> None:
        """These blocks are answered; their cells count until `tracker` says that they have left."""
        for key in keys:
            self.end(key)
        if size and tracker is not None:
            self._answers.append((tracker, size))
            self._answer_bytes += size

    def settle(self) -> None:
        """Forget answers that have left."""
        while self._answers and self._answers[0][0].done:
            self._answer_bytes -= self._answers.popleft()[1]


def output_bytes(row: BlockRow) -> int:
    """Output memory of a block while it is computed. Python integers do not overflow."""
    return 4 * row.batch * row.rows * row.columns * (2 if row.chunks > 1 else 1)
