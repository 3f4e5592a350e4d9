"""The operands a connection holds: pieces as they arrived, and a block's two factors as views into them.

Shared by the agent and the emulator's pods. Views only: an operand is never copied after it left the socket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from agent.wire import INNER_MAJOR, WireError, Work

Array = NDArray[np.float32]
# one block as plain integers, in the order of wire.BLOCK
BlockRow = tuple[int, int, int, int, int, int, int, int, int, int, int, int]


class Operands:
    def __init__(self) -> None:
        self._pieces: dict[int, Array] = {}  # piece -> [batch, outer, inner]
        self._of_job: defaultdict[int, list[int]] = defaultdict(list)
        self.bytes = 0

    def accept(self, work: Work) -> None:
        """Take in what a message brings. WireError if a block asks for cells that its pieces do not have."""
        self.release(work.released.tolist())
        for (piece, layout, job, batch, outer, inner), data in zip(work.pieces.tolist(), work.data, strict=True):
            if piece in self._pieces:
                raise WireError(f"piece {piece} came a second time")
            flat = np.frombuffer(data, dtype=np.float32)
            if layout == INNER_MAJOR:
                array = flat.reshape(batch, inner, outer).transpose(0, 2, 1)
            else:
                array = flat.reshape(batch, outer, inner)
            self._pieces[piece] = array
            self._of_job[job].append(piece)
            self.bytes += array.nbytes
        self._check(work.blocks)

    def release(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            for piece in self._of_job.pop(job, ()):
                self.bytes -= self._pieces.pop(piece).nbytes

    def clear(self) -> None:
        self.release(list(self._of_job))

    def inner(self, piece: int) -> int:
        return int(self._pieces[piece].shape[2])

    def factors(self, row: BlockRow) -> tuple[Array, Array]:
        """The block's left [rows, inner] and right [inner, columns]; with a batch axis in front if it has several."""
        _, _, _, left, right, left_batch, left_outer, right_batch, right_outer, batch, rows, columns = row
        one, two = self._pieces[left], self._pieces[right]
        if batch == 1:
            return (
                one[left_batch, left_outer : left_outer + rows],
                two[right_batch, right_outer : right_outer + columns].T,
            )
        return (
            one[left_batch : left_batch + batch, left_outer : left_outer + rows],
            two[right_batch : right_batch + batch, right_outer : right_outer + columns].transpose(0, 2, 1),
        )

    def _check(self, blocks: NDArray[np.void]) -> None:
        shapes: dict[int, tuple[int, ...]] = {}
        for row in blocks.tolist():
            _, _, _, left, right, left_batch, left_outer, right_batch, right_outer, batch, rows, columns = row
            for piece in (left, right):
                if piece not in shapes:
                    if piece not in self._pieces:
                        raise WireError(f"a block names piece {piece}, which was never sent")
                    shapes[piece] = self._pieces[piece].shape
            one, two = shapes[left], shapes[right]
            if left_batch + batch > one[0] or left_outer + rows > one[1]:
                raise WireError(f"a block reaches beyond piece {left} of shape {one}")
            if right_batch + batch > two[0] or right_outer + columns > two[1]:
                raise WireError(f"a block reaches beyond piece {right} of shape {two}")
            if one[2] != two[2]:
                raise WireError(f"pieces {left} and {right} have inner lengths {one[2]} and {two[2]}")
