"""The three queues of a device, as the server models them: downlink, processor, uplink.

A block passes them in order, and while one is uploaded the next is computed and the one after that downloaded. So a
device will be free at three moments, not one: while it uploads for another second it can download at once.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a block takes in each queue, and in how many chunks it comes: if in several, it is computed while it comes.
Passage = tuple[float, float, float, int]


def alone_s(block: Passage) -> float:
    """On a device that does nothing else."""
    down_s, compute_s, up_s, chunks = block
    return max(down_s / chunks + compute_s, down_s + compute_s / chunks) + up_s


@dataclass(slots=True)
class Stages:
    """Seconds, or moments, of the three queues."""

    down_s: float = 0.0
    compute_s: float = 0.0
    up_s: float = 0.0

    def clear(self) -> None:
        self.down_s = self.compute_s = self.up_s = 0.0

    def add(self, block: Passage) -> None:
        self.down_s += block[0]
        self.compute_s += block[1]
        self.up_s += block[2]

    def remove(self, block: Passage) -> None:
        self.down_s -= block[0]
        self.compute_s -= block[1]
        self.up_s -= block[2]

    def send(self, block: Passage, now_s: float) -> float:
        """These are the moments at which the queues are free; this block is sent now. When is it through?"""
        down_s, compute_s, up_s, chunks = block
        begins_s = self.down_s if self.down_s > now_s else now_s
        self.down_s = begins_s + down_s
        if chunks == 1:
            ready_s = self.down_s
            computed_s = (self.compute_s if self.compute_s > ready_s else ready_s) + compute_s
        else:
            ready_s = begins_s + max(down_s / chunks + compute_s, down_s + compute_s / chunks)
            computed_s = max(self.compute_s + compute_s, ready_s)
        self.compute_s = computed_s
        self.up_s = (self.up_s if self.up_s > computed_s else computed_s) + up_s
        return self.up_s

    def dry_s(self, block: Passage) -> float:
        """The moment by which this block must be sent, or one of the queues will be empty for a while."""
        return max(self.down_s, self.compute_s - block[0], self.up_s - block[0] - block[1])

    def left(self, now_s: float, most_s: float) -> tuple[float, float, float]:
        """How long the queues will be busy, each; `most_s`: surely no longer than that."""
        return (
            min(most_s, max(0.0, self.down_s - now_s)),
            min(most_s, max(0.0, self.compute_s - now_s)),
            min(most_s, max(0.0, self.up_s - now_s)),
        )


def after(busy_s: tuple[float, float, float], waiting: Stages, count: int) -> tuple[float, float, float]:
    """How long the queues will be busy if this much, in `count` blocks, comes after what they have: exact for equal
    blocks."""
    if not count:
        return busy_s
    down_s, compute_s, up_s = busy_s
    first_s = max(compute_s, down_s + waiting.down_s / count)  # the processor can begin
    down_s += waiting.down_s
    computed_s = max(first_s + waiting.compute_s, down_s + waiting.compute_s / count)
    one_s = waiting.up_s / count
    up_s = max(max(up_s, first_s + waiting.compute_s / count) + waiting.up_s, computed_s + one_s)
    return down_s, computed_s, up_s
