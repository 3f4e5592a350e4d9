"""Sorts out what devices returned before any of it counts, and writes accepted answers where they belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.protocol.wire import DONE, Result, WireError
from ps.scheduling.events import BlocksFailed, BlocksReturned, Box
from ps.transport.jobs import Live, Totals
from ps.transport.peers import Peer
from ps.transport.records import Records

Cells = NDArray[np.float32]


@dataclass(slots=True)
class Answers:
    """The answers of one turn, as one event for the good ones and one for those that failed."""

    batch: Sequence[tuple[Peer, Result]]
    received_ns: int
    good: BlocksReturned = field(default_factory=lambda: BlocksReturned([], [], []))
    bad: BlocksFailed = field(default_factory=lambda: BlocksFailed([], [], []))
    answered: list[tuple[Peer, int, int]] = field(default_factory=list)
    places: list[tuple[Live | None, list[Cells], Box]] = field(default_factory=list)  # of the good ones

    @classmethod
    def of(cls, batch: Sequence[tuple[Peer, Result]], jobs: Mapping[int, Live], received_ns: int) -> Answers:
        """All or nothing: an answer that does not fit raises WireError, and nothing is changed."""
        self = cls(batch, received_ns)
        for peer, message in batch:
            cells, start = _cells(message), 0
            for device, job, block, status, size, _, _ in message.answers.tolist():
                if device >= len(peer.ids):
                    raise WireError(f"an answer names device {device}, the sender has {len(peer.ids)}")
                live = jobs.get(job)  # None: its job is finished, so the dispatcher will not count it
                box = live.box(block) if live is not None else ()
                if live is not None and status == DONE and size != box[1] * box[3] * box[5]:
                    raise WireError(f"an answer to block {block} of job {job} has {size} cells, which is not its size")
                event = self.good if status == DONE else self.bad
                self.answered.append((peer, job, block))
                event.devices.append(peer.ids[device])
                event.jobs.append(job)
                event.blocks.append(block)
                if status == DONE:
                    mine = cells if len(message.answers) == 1 else [cells[0][start : start + size]]
                    self.places.append((live, mine, box))
                start += size
        return self

    def accept(self, positions: list[int], totals: Totals, records: Records) -> None:
        """Write those of the good answers that count into their products and into the records."""
        for position in positions:
            live, cells, (b, bs, r, rs, c, cs) = self.places[position]
            assert live is not None
            target = live.product.out[b : b + bs, r : r + rs, c : c + cs]
            if len(cells) == 1:
                target[...] = cells[0].reshape(bs, rs, cs)
            else:
                fill(target, cells)
            totals.flops += 2 * target.size * live.product.shape.inner
            totals.result_bytes += target.nbytes
        totals.blocks += len(positions)
        whole = len(positions) == sum(len(message.answers) for _, message in self.batch)
        good = self.good
        counted = None if whole else {(good.devices[p], good.jobs[p], good.blocks[p]) for p in positions}
        for peer, message in self.batch:
            if peer.of_the_run:
                records.answered(message.answers, peer.ids, self.received_ns, counted, message.stamp_ns)
            else:  # its times are claims, and the verdict is not built on claims
                records.answered(message.answers, peer.ids, self.received_ns, counted, due_counts=False)


def _cells(message: Result) -> list[Cells]:
    """As they came: in parts if they belong to one block, joined if several blocks share them."""
    if not isinstance(message.data, tuple):
        return [np.frombuffer(message.data, np.float32)]
    parts = [np.frombuffer(part, np.float32) for part in message.data]
    return parts if len(message.answers) == 1 else [np.concatenate(parts)]


def fill(target: Cells, parts: Sequence[Cells]) -> None:
    """Write a block [batch, rows, columns] from its cells in order, wherever they are cut. Joining them first would
    copy all of them."""
    _, rows, columns = target.shape
    at = 0
    for part in parts:
        done = 0
        while done < part.size:
            (batch, row), column = divmod(at // columns, rows), at % columns
            left = part.size - done
            if column or left < columns:  # part of a row
                count = min(columns - column, left)
                target[batch, row, column : column + count] = part[done : done + count]
            else:
                whole = min(left // columns, rows - row)
                count = whole * columns
                target[batch, row : row + whole] = part[done : done + count].reshape(whole, columns)
            done += count
            at += count
