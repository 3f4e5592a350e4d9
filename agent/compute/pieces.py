"""Operands that a connection holds: the pieces as they arrived, and a block's two factors as views into them.

Shared by the agent and the emulator's pods. No operand is copied after it leaves the socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from agent.compute.kernels import Kernel
from agent.protocol.wire import INNER_MAJOR, WireError, Work

Array = NDArray[np.float32]
# one block as plain integers, in the order of wire.BLOCK
BlockRow = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int, int]


class Operands:
    def __init__(self) -> None:
        self._pieces: dict[int, Array] = {}  # piece -> [batch, outer, inner]
        self._sums: dict[
            tuple[int, int, int], tuple[int, Array]
        ] = {}  # device, job, block -> chunks added up, their sum

    def accept(self, work: Work) -> None:
        """Take in the pieces of a message. WireError if a block refers to cells outside its pieces."""
        self.drop(work.released.tolist())
        for (piece, layout, batch, outer, inner), data in zip(work.pieces.tolist(), work.data, strict=True):
            if piece in self._pieces:
                raise WireError(f"piece {piece} came a second time")
            flat = np.frombuffer(data, dtype=np.float32)
            if layout == INNER_MAJOR:
                array = flat.reshape(batch, inner, outer).transpose(0, 2, 1)
            else:
                array = flat.reshape(batch, outer, inner)
            self._pieces[piece] = array
        self._check(work.blocks)

    def drop(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            self._pieces.pop(piece, None)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in list(self._pieces.values()))

    @property
    def unfinished(self) -> set[tuple[int, int, int]]:
        """Blocks (device, job, block) that wait for their next chunk, with the sum of the earlier ones."""
        return set(self._sums)

    def inner(self, piece: int) -> int:
        return int(self._pieces[piece].shape[2])

    def product(self, row: BlockRow, kernel: Kernel) -> Array | None:
        """The block's product; None if more of its chunks are still to come. KeyError if its pieces were dropped."""
        product = kernel.product(*self.factors(row))
        chunk, chunks = row[12], row[13]
        if chunks == 1:
            return product
        self.drop(row[3:5])
        key = row[:3]
        added, total = self._sums.pop(key, (0, product))
        if added != chunk:
            raise WireError(f"chunk {chunk} of block {row[2]} of job {row[1]} came after {added} chunks")
        if chunk:
            total += product
        if chunk + 1 == chunks:
            return total
        self._sums[key] = (chunk + 1, total)
        return None

    def run_length(self, rows: Sequence[BlockRow], begin: int, most_bytes: int, most_flops: float) -> int:
        """How many rows from `begin` on are blocks of one size in the same two pieces that lie below each other, or
        beside each other, or in lines of these: one product gives all of them, in half of the time if they are small.
        At least 1. More than one only if all have at most `most_bytes` of output and take at most `most_flops`.
        KeyError if its pieces were dropped."""
        row = rows[begin]
        batch, height, width, _, chunks = row[9:14]
        if batch != 1 or chunks != 1 or begin + 1 == len(rows):
            return 1
        cells = height * width
        most = min(most_bytes // (4 * cells), most_flops / (2.0 * cells * self.inner(row[3])), len(rows) - begin)
        count = 1
        while count < most and rows[begin + count][3:14] == (*row[3:6], row[6] + count * height, *row[7:14]):
            count += 1
        if count > 1:
            return count
        while count < most and rows[begin + count][3:14] == (*row[3:8], row[8] + count * width, *row[9:14]):
            count += 1
        line = [other[3:14] for other in rows[begin : begin + count]]
        lines = 1
        while count > 1 and (lines + 1) * count <= most:
            at = begin + lines * count
            if any(
                rows[at + number][3:14] != (*first[:3], first[3] + lines * height, *first[4:])
                for number, first in enumerate(line)
            ):
                break
            lines += 1
        return lines * count

    def products(self, run: Sequence[BlockRow], kernel: Kernel) -> Array:
        """The products of a run (see `run_length`) as [blocks, rows, columns]."""
        row, count = run[0], len(run)
        height, width = row[10], row[11]
        if run[1][8] == row[8]:  # below each other
            left, right = self.factors((*row[:10], count * height, *row[11:]))
            return kernel.product(left, right).reshape(count, height, width)
        line = next((number for number, other in enumerate(run) if other[6] != row[6]), count)
        left, right = self.factors((*row[:10], count // line * height, line * width, *row[12:]))
        beside = kernel.product(left, right).reshape(count // line, height, line, width)
        return np.ascontiguousarray(beside.transpose(0, 2, 1, 3)).reshape(count, height, width)

    def skip(self, row: BlockRow) -> None:
        """The block is not wanted: drop the pieces and the sum that only it uses."""
        if row[13] > 1:
            self.drop(row[3:5])
            self._sums.pop(row[:3], None)

    def factors(self, row: BlockRow) -> tuple[Array, Array]:
        """The block's factors, [rows, inner] and [inner, columns], with a leading batch axis if batch > 1."""
        _, _, _, left, right, left_batch, left_outer, right_batch, right_outer, batch, rows, columns = row[:12]
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
            _, _, _, left, right, left_batch, left_outer, right_batch, right_outer, batch, rows, columns = row[:12]
            for piece in (left, right):
                if piece not in shapes:
                    if piece not in self._pieces:
                        raise WireError(f"a block names piece {piece}, which is not there")
                    shapes[piece] = self._pieces[piece].shape
            one, two = shapes[left], shapes[right]
            if left_batch + batch > one[0] or left_outer + rows > one[1]:
                raise WireError(f"a block reaches beyond piece {left} of shape {one}")
            if right_batch + batch > two[0] or right_outer + columns > two[1]:
                raise WireError(f"a block reaches beyond piece {right} of shape {two}")
            if one[2] != two[2]:
                raise WireError(f"pieces {left} and {right} have inner lengths {one[2]} and {two[2]}")
