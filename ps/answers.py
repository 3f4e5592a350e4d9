"""What devices have returned, sorted out before anything of it counts, and written where it belongs when it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.wire import DONE, Result, WireError
from ps.events import BlocksFailed, BlocksReturned
from ps.jobs import Live, Totals
from ps.peers import Peer
from ps.records import Records


@dataclass(slots=True)
class Answers:
    """Of one turn, as one event of those that are good and one of those that failed."""

    batch: Sequence[tuple[Peer, Result]]
    good: BlocksReturned = field(default_factory=lambda: BlocksReturned([], [], []))
    bad: BlocksFailed = field(default_factory=lambda: BlocksFailed([], [], []))
    answered: list[tuple[Peer, int, int]] = field(default_factory=list)
    places: list[tuple[Live | None, NDArray[np.float32], list[int]]] = field(default_factory=list)  # of the good ones

    @classmethod
    def of(cls, batch: Sequence[tuple[Peer, Result]], jobs: Mapping[int, Live]) -> Answers:
        """All or nothing: whatever does not fit raises WireError, and nothing has been changed."""
        self = cls(batch)
        for peer, message in batch:
            cells, start = np.frombuffer(message.data, np.float32), 0
            for device, job, block, status, size, _, _ in message.answers.tolist():
                if device >= len(peer.ids):
                    raise WireError(f"an answer names device {device}, the sender has {len(peer.ids)}")
                live = jobs.get(job)  # None: its job is finished, the dispatcher will not count it
                tile = live.tile(block) if live is not None else []
                if live is not None and status == DONE and size != tile[1] * tile[3] * tile[5]:
                    raise WireError(f"an answer to block {block} of job {job} has {size} cells, which is not its size")
                event = self.good if status == DONE else self.bad
                self.answered.append((peer, job, block))
                event.devices.append(peer.ids[device])
                event.jobs.append(job)
                event.blocks.append(block)
                if status == DONE:
                    self.places.append((live, cells[start : start + size], tile))
                start += size
        return self

    def accept(self, positions: list[int], totals: Totals, records: Records, received_ns: int) -> None:
        """Those of the good ones that count: into their products, and into the books."""
        for position in positions:
            live, cells, (b, bs, r, rs, c, cs) = self.places[position]
            assert live is not None
            live.product.out[b : b + bs, r : r + rs, c : c + cs] = cells.reshape(bs, rs, cs)
            totals.flops += 2 * cells.size * live.product.shape.inner
            totals.result_bytes += cells.nbytes
        totals.blocks += len(positions)
        whole = len(positions) == sum(len(message.answers) for _, message in self.batch)
        good = self.good
        counted = None if whole else {(good.devices[p], good.jobs[p], good.blocks[p]) for p in positions}
        for peer, message in self.batch:
            records.answered(message.answers, peer.ids, received_ns, counted, message.stamp_ns)
