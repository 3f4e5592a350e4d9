"""Operands that a connection holds: the pieces as they arrived, and a block's two factors as views into them.

Shared by the agent and the emulator's pods. No operand is copied after it leaves the socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.compute.kernels import Kernel
from agent.protocol.wire import INNER_MAJOR, WireError, Work

Array = NDArray[np.float32]


class BlockRow(NamedTuple):
    """One block, or one chunk of it, as plain integers, in the order of wire.BLOCK, which says what they mean."""

    device: int
    job: int
    block: int
    left: int
    right: int
    left_batch: int
    left_outer: int
    right_batch: int
    right_outer: int
    batch: int
    rows: int
    columns: int
    chunk: int
    chunks: int
    down_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Device, job, block."""
        return self[:3]

    @property
    def is_last(self) -> bool:
        """Whether no chunk of the block comes after this one."""
        return self.chunk + 1 == self.chunks

    @property
    def place(self) -> tuple[int, ...]:
        """Its size, and where its operands are: all but its name and its cost."""
        return self[3:14]

    def place_beyond(self, down: int = 0, across: int = 0) -> tuple[int, ...]:
        """The place of a block of its size that lies so many rows below and columns beside it."""
        sides = (self.left_batch, self.left_outer + down, self.right_batch, self.right_outer + across)
        return (self.left, self.right, *sides, *self[9:14])


def block_rows(blocks: NDArray[np.void]) -> list[BlockRow]:
    return list(map(BlockRow._make, blocks.tolist()))


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
        if row.chunks == 1:
            return product
        self.drop((row.left, row.right))
        added, total = self._sums.pop(row.key, (0, product))
        if added != row.chunk:
            raise WireError(f"chunk {row.chunk} of block {row.block} of job {row.job} came after {added} chunks")
        if row.chunk:
            total += product
        if row.is_last:
            return total
        self._sums[row.key] = (row.chunk + 1, total)
        return None

    def run_length(self, rows: Sequence[BlockRow], begin: int, most_bytes: int, most_flops: float) -> int:
        """How many rows from `begin` on are blocks of one size in the same two pieces that lie below each other, or
        beside each other, or in lines of these: one product gives all of them, in half of the time if they are small.
        At least 1. More than one only if all have at most `most_bytes` of output and take at most `most_flops`.
        KeyError if its pieces were dropped."""
        row = rows[begin]
        if row.batch != 1 or row.chunks != 1 or begin + 1 == len(rows):
            return 1
        cells = row.rows * row.columns
        most = min(most_bytes // (4 * cells), most_flops / (2.0 * cells * self.inner(row.left)), len(rows) - begin)
        count = 1
        while count < most and rows[begin + count].place == row.place_beyond(down=count * row.rows):
            count += 1
        if count > 1:
            return count
        while count < most and rows[begin + count].place == row.place_beyond(across=count * row.columns):
            count += 1
        lines = 1
        while count > 1 and (lines + 1) * count <= most:
            line = rows[begin + lines * count : begin + (lines + 1) * count]
            first = (row.place_beyond(lines * row.rows, number * row.columns) for number in range(count))
            if any(other.place != place for other, place in zip(line, first, strict=True)):
                break
            lines += 1
        return lines * count

    def products(self, run: Sequence[BlockRow], kernel: Kernel) -> Array:
        """The products of a run (see `run_length`) as [blocks, rows, columns]."""
        row, count = run[0], len(run)
        height, width = row.rows, row.columns
        line = next((number for number, other in enumerate(run) if other.left_outer != row.left_outer), count)
        lines = count // line
        whole = kernel.product(*self.factors(row._replace(rows=lines * height, columns=line * width)))
        if line == 1:  # below each other
            return whole.reshape(count, height, width)
        parts = whole.reshape(lines, height, line, width).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(parts).reshape(count, height, width)

    def skip(self, row: BlockRow) -> None:
        """The block is not wanted: drop the pieces and the sum that only it uses."""
        if row.chunks > 1:
            self.drop((row.left, row.right))
            self._sums.pop(row.key, None)

    def factors(self, row: BlockRow) -> tuple[Array, Array]:
        """The block's factors, [rows, inner] and [inner, columns], with a leading batch axis if batch > 1."""
        one = self._pieces[row.left][:, row.left_outer : row.left_outer + row.rows]
        two = self._pieces[row.right][:, row.right_outer : row.right_outer + row.columns]
        if row.batch == 1:
            return one[row.left_batch], two[row.right_batch].T
        return (
            one[row.left_batch : row.left_batch + row.batch],
            two[row.right_batch : row.right_batch + row.batch].transpose(0, 2, 1),
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
