"""Operands on their way out: which piece of which operand a connection needs, packed once, sent without a copy.

A piece is a range of an operand's rows (or of its batch). A connection gets a cell of an operand once, however many of
its devices need it, unless a later block reaches across the pieces that it holds: that range is then sent whole. A
block too large for its device's memory is sent in chunks along the inner dimension, each packed when it is sent. Pure:
the server handles the sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.protocol.wire import BLOCK, INNER_MAJOR, OUTER_MAJOR, PIECE
from ps.planning.cost import Integers

Array = NDArray[np.float32]
Range = tuple[int, int, int, int]  # batch from, to; outer from, to

MESSAGE_BYTES = 8 << 20  # operands per message, about: small enough that a device computes while the next one arrives

MESSAGE_PIECES = 250  # below wire.MAX_FRAMES


_ids = itertools.count()


class Operand:
    """One factor of a product, seen as [batch, outer, inner]; `outer` is rows of the left or columns of the right."""

    def __init__(self, array: Array, uses: int = 1) -> None:
        """`uses`: products that will have it as a factor before it changes; more than one makes it worth keeping."""
        self.array, self.uses = array, uses
        self.id = next(_ids)  # of this operand in this version
        item = array.itemsize
        self.layout = INNER_MAJOR if array.strides[1] == item and array.strides[2] != item else OUTER_MAJOR
        self._packed: dict[Range, Array] = {}

    def piece(self, key: Range) -> Array:
        """[batch0:batch1, outer0:outer1] as contiguous memory: the operand's own where possible, else packed once."""
        if (packed := self._packed.get(key)) is None:
            packed = self._packed[key] = self.chunk(key, 0, self.array.shape[2])
        return packed

    @property
    def all(self) -> Range:
        return (0, self.array.shape[0], 0, self.array.shape[1])

    def mostly(self, ranges: Integers) -> bool:
        """Whether it is small, and these ranges, overlapping or not, add up to all of it."""
        cells = int(((ranges[:, 1] - ranges[:, 0]) * (ranges[:, 3] - ranges[:, 2])).sum())
        return self.array.nbytes <= MESSAGE_BYTES and cells >= self.array.shape[0] * self.array.shape[1]

    def chunk(self, key: Range, start: int, end: int) -> Array:
        """[batch0:batch1, outer0:outer1, start:end] as contiguous memory, not cached."""
        view = self.array[key[0] : key[1], key[2] : key[3], start:end]
        return np.ascontiguousarray(view.transpose(0, 2, 1) if self.layout == INNER_MAJOR else view)


@dataclass(slots=True)
class Held:
    """The pieces of one operand that one connection has."""

    ids: list[int] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)

    def drop(self, piece: int) -> None:
        index = self.ids.index(piece)
        del self.ids[index], self.ranges[index]


@dataclass(frozen=True, slots=True)
class Parcel:
    """The contents of one WORK message, without its stamp."""

    pieces: NDArray[np.void]
    blocks: NDArray[np.void]
    data: list[Array]


def parcels(
    job: int,
    operands: tuple[Operand, Operand],
    boxes: Integers,
    blocks: Integers,
    devices: Integers,
    down_bytes: Integers,
    held: tuple[Held, Held],
    piece_ids: Iterator[int],
    shared: bool = True,
    generous: bool = False,
    message_bytes: int | None = None,
) -> Iterator[Parcel]:
    """Messages that bring these blocks to one connection; `held` learns the new pieces as they are made.

    `shared`: many devices share the connection and its pieces, so a slab counts for every block. A single device is
    charged what it does not have yet. Slabs that touch become one piece of a message: its blocks are then one product.
    `generous`: a small operand is sent whole if many parts of it are wanted, which costs less than packing the parts.
    `message_bytes`: blocks share a message up to about this size. A message counts as arrived only when all of it has,
    so a device computes the blocks of one message while the next is on its way."""
    inner = operands[0].array.shape[2]
    message_bytes = message_bytes or MESSAGE_BYTES
    group = np.zeros(len(boxes), np.int64)
    if operands[0].array.nbytes + operands[1].array.nbytes > message_bytes:
        sizes = 4 * inner * boxes[:, 1] * (boxes[:, 3] + boxes[:, 5]) if shared else down_bytes
        group = np.cumsum(sizes) // message_bytes
    todo = np.split(np.arange(len(boxes)), np.flatnonzero(np.diff(group)) + 1)[::-1]
    while todo:
        part = todo.pop()
        if len(part) == 1 and not shared:
            at = int(part[0])
            line = (boxes[at].tolist(), int(blocks[at]), int(devices[at]), int(down_bytes[at]))
            yield _alone(job, operands, *line, held, piece_ids)
            continue
        batch, batches, row, rows, column, columns = boxes[part].T
        wanted = (
            np.column_stack([batch, batch + batches, row, row + rows]),
            np.column_stack([batch, batch + batches, column, column + columns]),
        )
        missing = [w[locate(w, held[side].ranges) < 0] for side, w in enumerate(wanted)]
        fresh = [
            [operand.all] if generous and operand.mostly(ranges) else merged(ranges)
            for operand, ranges in zip(operands, missing, strict=True)
        ]
        if len(fresh[0]) + len(fresh[1]) > MESSAGE_PIECES and len(part) > 1:
            todo += [part[len(part) // 2 :], part[: len(part) // 2]]
            continue
        table = np.empty(len(part), BLOCK)
        table["device"], table["job"], table["block"] = devices[part], job, blocks[part]
        table["batch"], table["rows"], table["columns"] = batches, rows, columns
        table["chunk"], table["chunks"], table["down_bytes"] = 0, 1, down_bytes[part]
        pieces: list[tuple[int, int, int, int, int]] = []
        data: list[Array] = []
        for side, name in enumerate(("left", "right")):
            for key in fresh[side]:
                piece = next(piece_ids)
                pieces.append((piece, operands[side].layout, key[1] - key[0], key[3] - key[2], inner))
                data.append(operands[side].piece(key))
                held[side].ids.append(piece)
                held[side].ranges.append(key)
            source = locate(wanted[side], held[side].ranges)
            start = np.array(held[side].ranges)[source]
            table[name] = np.array(held[side].ids)[source]
            table[f"{name}_batch"] = wanted[side][:, 0] - start[:, 0]
            table[f"{name}_outer"] = wanted[side][:, 2] - start[:, 2]
        yield Parcel(np.array(pieces, dtype=PIECE), table, data)


def _range(row: list[int]) -> Range:
    return (row[0], row[1], row[2], row[3])


def _alone(
    job: int,
    operands: tuple[Operand, Operand],
    box: list[int],
    block: int,
    device: int,
    down_bytes: int,
    held: tuple[Held, Held],
    piece_ids: Iterator[int],
) -> Parcel:
    """One block. Avoids arrays of one element, which would be most of the work with thousands of connections."""
    batch, batches, row, rows, column, columns = box
    pieces: list[tuple[int, int, int, int, int]] = []
    data: list[Array] = []
    found: list[tuple[int, Range]] = []
    for operand, mine, low, high in zip(operands, held, (row, column), (row + rows, column + columns), strict=True):
        ranges = zip(mine.ids, mine.ranges, strict=True)
        source = next(
            (
                (piece, have)
                for piece, have in ranges
                if have[0] <= batch and have[1] >= batch + batches and have[2] <= low and have[3] >= high
            ),
            None,
        )
        if source is None:
            source = next(piece_ids), (batch, batch + batches, low, high)
            pieces.append((source[0], operand.layout, batches, high - low, operand.array.shape[2]))
            data.append(operand.piece(source[1]))
            mine.ids.append(source[0])
            mine.ranges.append(source[1])
        found.append(source)
    (left, left_at), (right, right_at) = found
    begins = (batch - left_at[0], row - left_at[2], batch - right_at[0], column - right_at[2])
    line = (device, job, block, left, right, *begins, batches, rows, columns, 0, 1, down_bytes)
    return Parcel(np.array(pieces, PIECE), np.array([line], BLOCK), data)


def streamed(
    job: int,
    operands: tuple[Operand, Operand],
    box: Sequence[int],
    block: int,
    device: int,
    length: int,
    piece_ids: Iterator[int],
) -> Iterator[Parcel]:
    """Messages that bring one block to its device, `length` inner values at a time."""
    batch, batches, row, rows, column, columns = box
    inner = operands[0].array.shape[2]
    ranges = ((batch, batch + batches, row, row + rows), (batch, batch + batches, column, column + columns))
    for chunk, start in enumerate(range(0, inner, length)):
        end = min(start + length, inner)
        data = [operand.chunk(key, start, end) for operand, key in zip(operands, ranges, strict=True)]
        left, right = next(piece_ids), next(piece_ids)
        pieces = [
            (left, operands[0].layout, batches, rows, end - start),
            (right, operands[1].layout, batches, columns, end - start),
        ]
        size = sum(d.nbytes for d in data)
        line = (device, job, block, left, right, 0, 0, 0, 0, batches, rows, columns, chunk, -(-inner // length), size)
        yield Parcel(np.array(pieces, PIECE), np.array([line], BLOCK), data)


def locate(wanted: Integers, ranges: list[Range]) -> Integers:
    """For each wanted range, the index of one that contains it, or -1."""
    if not ranges:
        return np.full(len(wanted), -1)
    have = np.array(ranges)[:, None, :]
    inside = (
        (have[..., 0] <= wanted[:, 0])
        & (have[..., 1] >= wanted[:, 1])
        & (have[..., 2] <= wanted[:, 2])
        & (have[..., 3] >= wanted[:, 3])
    )
    return np.where(inside.any(axis=0), inside.argmax(axis=0), -1)


def merged(wanted: Integers) -> list[Range]:
    """Ranges that contain all wanted ones and nothing else: ranges that overlap or touch are joined, first along the
    rows of a batch entry, then along the batch among ranges with the same rows."""
    same = np.all(wanted[1:] == wanted[:-1], axis=1)  # neighbours share a slab: most rows repeat the one before
    ranges = set(map(_range, wanted[np.concatenate([[True], ~same])].tolist())) if len(wanted) else set()
    by_rows = _joined(sorted(ranges))
    by_batch = _joined(sorted((lo, hi, b0, b1) for b0, b1, lo, hi in by_rows))
    return [(b0, b1, lo, hi) for lo, hi, b0, b1 in by_batch]


def _joined(ranges: list[Range]) -> list[Range]:
    """Join sorted ranges (same, same, low, high) that overlap or touch where the first two agree."""
    out: list[Range] = []
    for one, two, low, high in ranges:
        if out and out[-1][:2] == (one, two) and low <= out[-1][3]:
            out[-1] = (one, two, out[-1][2], max(out[-1][3], high))
        else:
            out.append((one, two, low, high))
    return out
