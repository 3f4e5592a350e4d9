"""What a joined device may send: the answers that it owes, and a small allowance beyond them. Pure.

Messages are counted when they are read. Bytes are counted by the kernel as they arrive, so unread bytes count too, and
so does a message that never ends.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARE_MESSAGES = 64  # for heartbeats and farewells; burst
MESSAGES_PER_HEARTBEAT = 8  # added with each heartbeat
SPARE_JOINS = 16  # per connection, beyond the first join; agents open a new connection each time
SPARE_ANSWERS = 64  # to blocks that were cancelled or are duplicates
SPARE_BYTES = 1 << 20  # joining needs the most: up to 96 KiB
BYTES_PER_HEARTBEAT = 1 << 14
ANSWER_BYTES = 256  # per answer, beyond its cells: row, header, ZeroMQ framing and encryption
ENCRYPTED = 1.02  # largest growth by encryption: 33 bytes per frame


@dataclass(slots=True)
class Allowance:
    messages: int = SPARE_MESSAGES
    answers: int = SPARE_ANSWERS
    joins: int = SPARE_JOINS
    bytes: float = SPARE_BYTES  # over the whole life of the connection

    def asked(self, blocks: int, cells: int) -> None:
        """The device was sent this many blocks, whose results have this many cells."""
        self.answers += blocks
        self.bytes += ENCRYPTED * 4 * cells + ANSWER_BYTES * blocks

    def beat(self) -> None:
        self.messages = min(SPARE_MESSAGES, self.messages + MESSAGES_PER_HEARTBEAT)
        self.bytes += BYTES_PER_HEARTBEAT

    def answered(self, count: int) -> bool:
        """False if the device answers more than it was asked."""
        self.answers -= max(1, count)
        return self.answers >= 0

    def joined_again(self) -> bool:
        """False if the device joins too often."""
        self.joins -= 1
        return self.joins >= 0

    def spoke(self) -> bool:
        """Count a message that is not an answer. False if there are too many."""
        self.messages -= 1
        return self.messages >= 0
