"""What a device that has joined may send: the answers that it owes, and a little beside them. Pure.

Messages are counted as they are read. Bytes are counted by the kernel as they arrive, so what is not read yet counts,
and so does a message that never ends.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARE_MESSAGES = 64  # heartbeats, words of farewell; at once
MESSAGES_PER_HEARTBEAT = 8  # and with each heartbeat
SPARE_JOINS = 16  # over one connection, ever, beside the first; agents take a new connection each time
SPARE_ANSWERS = 64  # to blocks that were called off, or that it had before
SPARE_BYTES = 1 << 20  # joining takes most: up to 96 KiB
BYTES_PER_HEARTBEAT = 1 << 14
ANSWER_BYTES = 256  # of an answer, beside its cells: a row, a header, and what ZeroMQ and encryption add
ENCRYPTED = 1.02  # of what is sent, at most: 33 bytes a frame


@dataclass(slots=True)
class Allowance:
    messages: int = SPARE_MESSAGES
    answers: int = SPARE_ANSWERS
    joins: int = SPARE_JOINS
    bytes: float = SPARE_BYTES  # over its connection, ever

    def asked(self, blocks: int, cells: int) -> None:
        """It was given so many blocks, whose results have so many cells."""
        self.answers += blocks
        self.bytes += ENCRYPTED * 4 * cells + ANSWER_BYTES * blocks

    def beat(self) -> None:
        self.messages = min(SPARE_MESSAGES, self.messages + MESSAGES_PER_HEARTBEAT)
        self.bytes += BYTES_PER_HEARTBEAT

    def answered(self, count: int) -> bool:
        """False: it answers more than it was asked."""
        self.answers -= max(1, count)
        return self.answers >= 0

    def joined_again(self) -> bool:
        """False: too often."""
        self.joins -= 1
        return self.joins >= 0

    def spoke(self) -> bool:
        """A message that is no answer. False: it talks too much."""
        self.messages -= 1
        return self.messages >= 0
