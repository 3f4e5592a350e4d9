"""Neighbouring blocks are computed by one product: the same cells, in the same order, as one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.compute.computer import Computer
from agent.compute.kernels import NumpyKernel
from agent.compute.pieces import BlockRow, Operands, block_rows
from agent.protocol.wire import BLOCK, INNER_MAJOR, OUTER_MAJOR, PIECE, Work

ROWS, COLUMNS, INNER, SIDE = 24, 40, 16, 8
EXACT = np.random.default_rng(0)  # small whole numbers: the order of additions changes nothing
LEFT, RIGHT = (EXACT.integers(-4, 5, (side, INNER)).astype(np.float32) for side in (ROWS, COLUMNS))


def given_work(boxes: Sequence[tuple[int, int]], layout: int = OUTER_MAJOR) -> Work:
    """Blocks of SIDE x SIDE that begin at these rows and columns."""
    pieces = np.array([(0, layout, 1, ROWS, INNER), (1, layout, 1, COLUMNS, INNER)], PIECE)
    blocks = np.zeros(len(boxes), BLOCK)
    blocks["block"], blocks["right"], blocks["batch"], blocks["chunks"] = np.arange(len(boxes)), 1, 1, 1
    blocks["rows"] = blocks["columns"] = SIDE
    blocks["left_outer"], blocks["right_outer"] = np.array(boxes, np.uint32).reshape(-1, 2).T
    data = [(side.T if layout == INNER_MAJOR else side).tobytes() for side in (LEFT, RIGHT)]
    return Work(0, np.zeros(0, np.uint32), pieces, blocks, data)


def held(work: Work) -> tuple[Operands, list[BlockRow]]:
    operands = Operands()
    operands.accept(work)
    return operands, block_rows(work.blocks)


def expected(row: BlockRow) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return LEFT[row.left_outer : row.left_outer + SIDE] @ RIGHT[row.right_outer : row.right_outer + SIDE].T


def computed(operands: Operands, rows: list[BlockRow], cancelled: Sequence[int] = ()) -> dict[int, list[float]]:
    """Cells of each answered block."""
    computer = Computer(operands, NumpyKernel(), lambda: None)
    computer.cancelled.update((0, block) for block in cancelled)
    computer.inbox.put(rows)
    computer.inbox.put(None)
    computer.run()
    found: dict[int, list[float]] = {}
    while not computer.outbox.empty():
        result = computer.outbox.get()
        cells = np.asarray(result.data).tolist()
        for _, _, block, _, size, _, _ in result.answers.tolist():
            found[block], cells = cells[:size], cells[size:]
    assert computer.queued_rows == -len(rows), "they were not given by `give`"
    return found


@pytest.mark.parametrize("layout", [OUTER_MAJOR, INNER_MAJOR])
@given(
    boxes=st.lists(st.tuples(st.sampled_from([0, 8, 16]), st.sampled_from(range(0, 40, 8))), min_size=1, unique=True),
    ordered=st.booleans(),
)
def test_blocks_in_any_order_are_answered_as_one_by_one(
    layout: int, boxes: list[tuple[int, int]], ordered: bool
) -> None:
    operands, rows = held(given_work(sorted(boxes) if ordered else boxes, layout))
    found = computed(operands, rows)
    assert found == {row.block: expected(row).ravel().tolist() for row in rows}


def test_neighbours_are_one_product() -> None:
    beside = held(given_work([(8, column) for column in range(0, 40, 8)]))
    below = held(given_work([(row, 8) for row in range(0, 24, 8)]))
    lines = held(given_work([(row, column) for row in (0, 8) for column in (8, 16, 24)] + [(16, 8), (16, 16)]))
    runs = [operands.run_length(rows, 0, 1 << 20, 1e9) for operands, rows in (beside, below, lines)]
    assert runs == [5, 3, 6], "a line that is not complete is a run of its own"


def test_others_are_not() -> None:
    for boxes in ([(0, 0), (8, 8)], [(0, 0), (16, 0)], [(0, 8), (0, 0)]):
        operands, rows = held(given_work(boxes))
        assert operands.run_length(rows, 0, 1 << 20, 1e9) == 1


def test_a_run_ends_where_its_output_or_its_arithmetic_would_be_too_much() -> None:
    operands, rows = held(given_work([(8, column) for column in range(0, 40, 8)]))
    assert operands.run_length(rows, 0, 3 * 4 * SIDE * SIDE, 1e9) == 3
    assert operands.run_length(rows, 0, 1 << 20, 2.0 * 2 * SIDE * SIDE * INNER) == 2


def test_a_cancelled_block_in_a_run_is_not_answered() -> None:
    operands, rows = held(given_work([(8, column) for column in range(0, 40, 8)]))
    assert sorted(computed(operands, rows, cancelled=[2])) == [0, 1, 3, 4]
