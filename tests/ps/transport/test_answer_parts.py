"""Results that arrive in parts are written to the right cells, wherever they were cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.wire import ANSWER, Result
from ps.transport.jobs import Live, Product, Totals
from ps.transport.operands import Operand
from ps.transport.peers import Peer
from ps.transport.receiving import Answers, fill
from ps.transport.records import Records


@given(st.tuples(*[st.integers(1, 6)] * 3), st.lists(st.integers(1, 40), max_size=8))
def test_parts_are_written_to_the_same_cells_as_the_whole(shape: tuple[int, int, int], cuts: list[int]) -> None:
    cells = np.arange(np.prod(shape), dtype=np.float32)
    out = np.full((shape[0] + 1, shape[1] + 2, shape[2] + 3), -1, np.float32)
    target = out[1:, 1:-1, 2:-1]
    fill(target, np.split(cells, sorted(min(cut, cells.size) for cut in cuts)))
    np.testing.assert_array_equal(target, cells.reshape(shape))
    assert (out == -1).sum() == out.size - cells.size, "no other cell is written"


SIDE = 3
GRID = [(0, 1, row, SIDE, column, SIDE) for row in range(0, 12, SIDE) for column in range(0, 15, SIDE)]


@given(st.permutations(range(len(GRID))), st.integers(0, len(GRID)), st.sampled_from(["rows", "columns", "random"]))
def test_neighbours_are_written_to_the_same_cells_as_one_by_one(order: list[int], cut: int, how: str) -> None:
    exact = np.random.default_rng(0).normal(size=(1, 12, 15)).astype(np.float32)
    side = Operand(np.zeros((1, 12, 4), np.float32)), Operand(np.zeros((1, 15, 4), np.float32))
    live = Live(Product(*side, np.zeros((1, 12, 15), np.float32), lambda: None))
    live.boxes = {block: list(box) for block, box in enumerate(GRID)}
    if how != "random":
        order = sorted(order, key=lambda block: GRID[block][2::2] if how == "rows" else GRID[block][4::-2])
    pod = Peer(b"pod", {}, of_the_run=True)
    pod.add([0, 1])
    batch = []
    for blocks in (order[:cut], order[cut:]):
        answers = np.zeros(len(blocks), ANSWER)
        answers["block"], answers["cells"] = blocks, SIDE * SIDE
        boxes = [GRID[block] for block in blocks]
        cells = [exact[0, r : r + SIDE, c : c + SIDE].ravel() for _, _, r, _, c, _ in boxes]
        batch.append((pod, Result(answers, np.concatenate([*cells, np.empty(0, np.float32)]).tobytes())))
    totals = Totals()
    found = Answers.of(batch, {0: live}, 0)
    found.accept(list(range(len(GRID))), totals, Records())
    assert np.array_equal(live.product.out, exact)
    assert (totals.blocks, totals.flops, totals.result_bytes) == (len(GRID), 2 * 12 * 15 * 4, 4 * 12 * 15)
