"""Speculative copies of overdue blocks: which piece of a copy stands for which block.

A copy is cut into pieces, which are blocks on other devices. Until it is decided, the overdue block counts and the
pieces do not. The first good answer decides: one from the late device ends the pieces, one from a piece ends the late
block.
"""

from __future__ import annotations

from collections.abc import Iterator

Key = tuple[int, int]  # job, block


class SpeculativeCopies:
    def __init__(self) -> None:
        self._pieces: dict[Key, list[int]] = {}
        self._block_of: dict[Key, int] = {}  # piece -> the overdue block
        self.begun = 0

    def __contains__(self, block: Key) -> bool:
        return block in self._pieces

    def __iter__(self) -> Iterator[Key]:
        return iter(self._pieces)

    def begin(self, block: Key, pieces: list[int]) -> None:
        self.begun += 1
        self._pieces[block] = pieces
        for piece in pieces:
            self._block_of[block[0], piece] = block[1]

    def block_of(self, piece: Key) -> int | None:
        """The overdue block that this is a piece of; None if it is not a piece, or the copy is decided."""
        return self._block_of.get(piece)

    def decide(self, block: Key) -> list[int]:
        """End this copy. Returns its pieces."""
        pieces = self._pieces.pop(block)
        for piece in pieces:
            del self._block_of[block[0], piece]
        return pieces
