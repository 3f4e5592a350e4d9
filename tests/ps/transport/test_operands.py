"""Promises of ps.transport.operands and agent.compute.pieces: whatever blocks a connection gets, and in whatever pieces
their operands travel, the device multiplies the right numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.compute.kernels import Kernel, NumpyKernel, available_kernels
from agent.compute.pieces import BlockRow, Operands, block_rows
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import BLOCK, INNER_MAJOR, OUTER_MAJOR, PIECE, WireError, Work, decode, encode
from ps.planning.plans import Shape
from ps.planning.sharing import grid_plan
from ps.transport.operands import MESSAGE_PIECES, Array, Held, Operand, Parcel, parcels, streamed

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test

Box = tuple[int, int, int, int, int, int]  # batch, batches, row, rows, column, columns

# ---- both ends of a connection


class Line:
    """A connection: the server's record of what the device holds, and what the device really holds."""

    def __init__(self, shared: bool = True, message_bytes: int | None = None) -> None:
        self.receiver = Operands()
        self._shared, self._message_bytes = shared, message_bytes
        self._held: dict[int, tuple[Held, Held]] = {}
        self.piece_ids = count()
        self.parcels: list[Parcel] = []

    def send(self, job: int, operands: tuple[Operand, Operand], boxes: Sequence[Box], blocks: Sequence[int]) -> None:
        """Send these blocks, and check the device's result for each."""
        devices, down_bytes = np.arange(len(boxes)) % 3, 1000 + np.arange(len(boxes))
        held = self._held.setdefault(job, (Held(), Held()))
        arrived: list[tuple[int, int, int]] = []
        for parcel in parcels(
            job,
            operands,
            np.array(boxes),
            np.array(blocks),
            devices,
            down_bytes,
            held,
            self.piece_ids,
            shared=self._shared,
            message_bytes=self._message_bytes,
        ):
            for row in self.bring(parcel):
                assert row.job == job
                assert (row.chunk, row.chunks) == (0, 1), "the block comes whole"
                arrived.append((row.device, row.block, row.down_bytes))
                product = self.receiver.product(row, NumpyKernel())
                assert product is not None
                box = boxes[blocks.index(row.block)]
                assert np.array_equal(product.reshape(box[1::2]), expected_of(operands, box))
        assert sorted(arrived) == sorted(zip(devices.tolist(), blocks, down_bytes.tolist(), strict=True))

    def bring(self, parcel: Parcel) -> list[BlockRow]:
        self.parcels.append(parcel)
        work = transmit(Work(1, np.empty(0, "<u4"), parcel.pieces, parcel.blocks, list(parcel.data)))
        self.receiver.accept(work)
        return block_rows(work.blocks)

    def release(self, job: int) -> None:
        pieces = np.array([piece for held in self._held.pop(job) for piece in held.ids], "<u4")
        self.receiver.accept(transmit(Work(1, pieces, np.empty(0, PIECE), np.empty(0, BLOCK), [])))


def expected_of(operands: tuple[Operand, Operand], box: Box) -> Array:
    b, bs, r, rs, c, cs = box
    product: Array = operands[0].array[b : b + bs, r : r + rs] @ operands[1].array[b : b + bs, c : c + cs].transpose(
        0, 2, 1
    )
    return product


def transmit(work: Work) -> Work:
    """Through the wire format and back."""
    frames = [f.tobytes() if isinstance(f, np.ndarray) else bytes(f) for f in encode(work)]
    arrived = decode(frames)
    assert isinstance(arrived, Work)
    return arrived


# ---- products, and ways to tile them

# The same shape in different memory layouts. Values are small integers: products are exact, so == may be used.
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "row-major": np.ascontiguousarray,
    "transposed": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1),
    "batch inside": lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),
    "strided": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "rows of a larger one": lambda x: np.pad(x, [(0, 0), (1, 1), (2, 1)])[:, 1:-1, 2:-1],
    "broadcast along the batch": lambda x: np.broadcast_to(x[:1], x.shape),
    "broadcast along the rows": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "broadcast along the inner length": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}
layouts = st.sampled_from(sorted(LAYOUTS))


def operand(shape: tuple[int, int, int], layout: str) -> Operand:
    """All values differ, as far as the layout allows."""
    return Operand(LAYOUTS[layout](np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)))


def operands_of(shape: Shape, left: str = "row-major", right: str = "row-major") -> tuple[Operand, Operand]:
    return (
        operand((shape.batch, shape.rows, shape.inner), left),
        operand((shape.batch, shape.columns, shape.inner), right),
    )


shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 12), st.integers(1, 5), st.integers(1, 12))


@st.composite
def halves(draw: st.DrawFn, box: Box) -> tuple[Box, Box] | None:
    """The box cut in two at any place along any axis; None if it is one cell."""
    axes = [axis for axis in (0, 2, 4) if box[axis + 1] > 1]
    if not axes:
        return None
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box[axis + 1] - 1))
    first, second = list(box), list(box)
    first[axis + 1] = at
    second[axis] += at
    second[axis + 1] -= at
    b0, bs0, r0, rs0, c0, cs0 = first
    b1, bs1, r1, rs1, c1, cs1 = second
    return (b0, bs0, r0, rs0, c0, cs0), (b1, bs1, r1, rs1, c1, cs1)


def whole(shape: Shape) -> Box:
    return 0, shape.batch, 0, shape.rows, 0, shape.columns


@st.composite
def any_tiling(draw: st.DrawFn, shape: Shape) -> list[Box]:
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 12))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        both = draw(halves(box))
        boxes += [box] if both is None else both
    return boxes


@st.composite
def grids(draw: st.DrawFn, shape: Shape) -> list[Box]:
    def intervals(length: int) -> list[tuple[int, int]]:
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))) if length > 1 else []
        return [(a, b - a) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]

    across = intervals(shape.batch), intervals(shape.rows), intervals(shape.columns)
    return [(b, bs, r, rs, c, cs) for (b, bs), (r, rs), (c, cs) in product(*across)]


@st.composite
def planned(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """The planner's blocks for some fleet."""
    speeds = draw(st.lists(st.sampled_from([1e6, 3e6, 1e7, 1e9]), min_size=1, max_size=12))
    fleet = pack_profiles([Profile(flops, 1e-4, 1e7, 1e6, 0.0, 1 << 30, 2) for flops in speeds])
    return [tuple(box) for box in grid_plan(shape, fleet).boxes.tolist()]


@st.composite
def in_calls(draw: st.DrawFn, boxes: list[Box], max_calls: int = 4) -> list[list[int]]:
    """The boxes' numbers in any order, divided over several calls; some boxes may go to another device."""
    order = draw(st.permutations(range(len(boxes))))[: draw(st.integers(1, len(boxes)))]
    calls: list[list[int]] = [[] for _ in range(max_calls)]
    for number in order:
        calls[draw(st.integers(0, max_calls - 1))].append(number)
    return [call for call in calls if call]


# ---- the right numbers arrive


@pytest.mark.slow
@settings(calm, max_examples=150)
@given(data=st.data())
def test_every_block_is_multiplied_from_its_own_operands(data: st.DataObject) -> None:
    """Any product, layout, tiling and order of sending; some blocks are cut again afterwards and sent again."""
    shape = data.draw(shapes)
    operands = operands_of(shape, data.draw(layouts), data.draw(layouts))
    boxes = data.draw(any_tiling(shape))
    line = Line(shared=data.draw(st.booleans()), message_bytes=data.draw(st.sampled_from([None, 1, 3000])))
    for call in data.draw(in_calls(boxes)):
        line.send(7, operands, [boxes[n] for n in call], call)
        again = data.draw(halves(boxes[call[0]]))
        if again is not None:
            line.send(7, operands, list(again), [len(boxes), len(boxes) + 1])


@settings(calm, max_examples=60)
@given(data=st.data(), message_bytes=st.integers(1, 400), message_pieces=st.integers(2, 6))
def test_messages_stay_small_and_complete_whatever_the_limits(
    data: st.DataObject, message_bytes: int, message_pieces: int
) -> None:
    shape = data.draw(shapes)
    operands = operands_of(shape, data.draw(layouts), data.draw(layouts))
    boxes = data.draw(any_tiling(shape))
    largest = max(4 * shape.inner * bs * (rs + cs) for _, bs, _, rs, _, cs in boxes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ps.transport.operands.MESSAGE_BYTES", message_bytes)
        patch.setattr("ps.transport.operands.MESSAGE_PIECES", message_pieces)
        line = Line()
        for call in data.draw(in_calls(boxes)):
            line.send(0, operands, [boxes[n] for n in call], call)
    for parcel in line.parcels:
        assert len(parcel.blocks) > 0
        assert len(parcel.pieces) == len(parcel.data) <= message_pieces
        assert sum(d.nbytes for d in parcel.data) <= message_bytes + largest


def test_a_thousand_scattered_blocks_fit_the_frames_of_the_protocol() -> None:
    shape = Shape(1, 2000, 2, 2000)
    boxes = [(0, 1, 2 * i, 1, 2 * i, 1) for i in range(1000)]
    line = Line()
    line.send(0, operands_of(shape), boxes, range(1000))  # fails if the device refuses it
    assert max(len(parcel.pieces) for parcel in line.parcels) == MESSAGE_PIECES


def test_operands_are_split_so_that_a_device_computes_while_the_rest_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Shape(1, 80, 4, 80)
    boxes = [(0, 1, 2 * i, 1, 2 * i, 1) for i in range(40)]  # no shared operands: each block brings 2 x 4 values
    monkeypatch.setattr("ps.transport.operands.MESSAGE_BYTES", 5 * 32)
    line = Line()
    line.send(0, operands_of(shape), boxes, range(40))
    sizes = [sum(d.nbytes for d in parcel.data) for parcel in line.parcels]
    assert sum(sizes) == 40 * 32
    assert 5 * 32 <= max(sizes) <= 6 * 32


def test_a_device_on_a_slow_line_gets_the_strips_of_a_rectangle_one_by_one_and_their_slab_once() -> None:
    shape = Shape(1, 80, 4, 30)
    strips = [(0, 1, row, 20, 0, 30) for row in range(0, 80, 20)]
    line = Line(shared=False, message_bytes=1000)  # each strip counts as a little more
    line.send(0, operands_of(shape), strips, range(4))
    assert [len(parcel.blocks) for parcel in line.parcels] == [1, 1, 1, 1]
    sizes = [sum(d.nbytes for d in parcel.data) for parcel in line.parcels]
    assert sizes == [16 * (20 + 30), 16 * 20, 16 * 20, 16 * 20]


def test_blocks_for_one_device_share_a_message_up_to_what_its_line_carries_and_slabs_that_touch_a_piece() -> None:
    shape = Shape(1, 80, 40, 30)
    strips = [(0, 1, row, 20, 0, 30) for row in range(0, 80, 20)]
    line = Line(shared=False, message_bytes=2500)  # each block counts as a little more than 1000
    line.send(0, operands_of(shape), strips, range(4))
    assert [len(parcel.blocks) for parcel in line.parcels] == [2, 2]
    assert [parcel.pieces["outer"].tolist() for parcel in line.parcels] == [[40, 30], [40]]


# ---- nothing travels twice


def needed_bytes(shape: Shape, boxes: Sequence[Box]) -> int:
    """Every cell of an operand that some box needs, once."""
    left = np.zeros((shape.batch, shape.rows), bool)
    right = np.zeros((shape.batch, shape.columns), bool)
    for b, bs, r, rs, c, cs in boxes:
        left[b : b + bs, r : r + rs] = right[b : b + bs, c : c + cs] = True
    return 4 * shape.inner * int(left.sum() + right.sum())


@settings(calm, max_examples=80)
@given(data=st.data())
def test_a_grid_sends_no_cell_twice_and_none_needlessly_in_any_number_of_calls(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(grids(shape))
    line, sent = Line(), []
    for call in data.draw(in_calls(boxes)):
        line.send(0, operands_of(shape), [boxes[n] for n in call], call)
        sent += [boxes[n] for n in call]
        assert line.receiver.bytes == needed_bytes(shape, sent)


@pytest.mark.slow
@settings(calm, max_examples=80)
@given(data=st.data())
def test_a_plan_sends_no_cell_twice_and_none_needlessly_in_one_call(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(planned(shape))
    (call,) = data.draw(in_calls(boxes, max_calls=1))
    line = Line()
    line.send(0, operands_of(shape), [boxes[n] for n in call], call)
    assert line.receiver.bytes == needed_bytes(shape, [boxes[n] for n in call])


@pytest.mark.slow
@settings(calm, max_examples=80)
@given(data=st.data())
def test_a_plan_in_several_calls_sends_at_most_what_each_call_needs(data: st.DataObject) -> None:
    """A pod's devices are served one by one as they become free; a block across held pieces sends its range again."""
    shape = data.draw(shapes)
    boxes = data.draw(planned(shape))
    line, sent, at_most = Line(), [], 0
    for call in data.draw(in_calls(boxes)):
        line.send(0, operands_of(shape), [boxes[n] for n in call], call)
        sent += [boxes[n] for n in call]
        at_most += needed_bytes(shape, [boxes[n] for n in call])
        assert needed_bytes(shape, sent) <= line.receiver.bytes <= at_most


def test_a_block_sent_again_brings_no_operands() -> None:
    shape, line = Shape(2, 6, 3, 6), Line()
    for block in range(3):
        line.send(0, operands_of(shape), [(0, 2, 1, 3, 2, 4)], [block])
        assert line.receiver.bytes == needed_bytes(shape, [(0, 2, 1, 3, 2, 4)])


@pytest.mark.parametrize("layout", ["row-major", "transposed"])
def test_an_operand_is_sent_without_a_copy(layout: str) -> None:
    factor = operand((1, 6, 4), layout)
    assert np.shares_memory(factor.piece((0, 1, 0, 6)), factor.array)


def test_a_slab_that_needs_packing_is_packed_once() -> None:
    factor = operand((2, 6, 4), "strided")
    piece = factor.piece((0, 2, 1, 4))
    assert piece.flags.c_contiguous
    assert not np.shares_memory(piece, factor.array)
    assert factor.piece((0, 2, 1, 4)) is piece


# ---- releasing


@pytest.mark.slow
@settings(calm, max_examples=40)
@given(data=st.data())
def test_releasing_every_job_frees_every_byte_and_disturbs_no_other_job(data: st.DataObject) -> None:
    jobs = {}
    line = Line()
    for job in data.draw(st.permutations([0, 1, 2**63])):
        shape = data.draw(shapes)
        jobs[job] = operands_of(shape), data.draw(any_tiling(shape))
    sizes = {}
    for job, (operands, boxes) in jobs.items():
        before = line.receiver.bytes
        line.send(job, operands, boxes, range(len(boxes)))
        sizes[job] = line.receiver.bytes - before
        assert sizes[job] > 0
    for job in data.draw(st.permutations(list(jobs))):
        line.release(job)
        del jobs[job], sizes[job]
        assert line.receiver.bytes == sum(sizes.values())
        for other, (operands, boxes) in jobs.items():
            line.send(other, operands, boxes, range(len(boxes)))
    assert line.receiver.bytes == 0


def test_releasing_an_unknown_piece_changes_nothing() -> None:
    line = Line()
    shape = Shape(1, 2, 2, 2)
    line.send(1, operands_of(shape), [whole(shape)], [0])
    line.receiver.drop([2, 99, 2**32 - 1])
    assert line.receiver.bytes == needed_bytes(shape, [whole(shape)])


def test_a_piece_is_released_alone() -> None:
    line, shape = Line(), Shape(1, 6, 3, 4)
    line.send(0, operands_of(shape), [whole(shape)], [0])
    left, _ = line.parcels[0].pieces["piece"].tolist()
    line.receiver.accept(transmit(Work(1, np.array([left], "<u4"), np.empty(0, PIECE), np.empty(0, BLOCK), [])))
    assert line.receiver.bytes == 4 * 3 * 4


def test_a_block_whose_pieces_were_dropped_while_it_waited_is_recognised() -> None:
    line, shape = Line(), Shape(1, 6, 3, 4)
    line.send(0, operands_of(shape), [whole(shape)], [0])
    line.release(0)
    with pytest.raises(KeyError):
        line.receiver.product(block_rows(line.parcels[0].blocks)[0], NumpyKernel())


def test_a_cancelled_block_leaves_its_pieces_to_the_others() -> None:
    line, shape = Line(), Shape(1, 6, 3, 4)
    line.send(0, operands_of(shape), [whole(shape)], [0])
    line.receiver.skip(block_rows(line.parcels[0].blocks)[0])
    assert line.receiver.bytes == needed_bytes(shape, [whole(shape)])


# ---- in chunks along the inner dimension

kernels = st.sampled_from(available_kernels()[0])


def assert_empty(receiver: Operands) -> None:
    assert receiver.bytes == 0
    assert receiver.unfinished == set()


@st.composite
def long_products(draw: st.DrawFn) -> tuple[Shape, Box, int]:
    """A product, a rectangle of it, and the inner length of a chunk: never all of it."""
    shape = draw(st.builds(Shape, st.integers(1, 3), st.integers(1, 8), st.integers(2, 40), st.integers(1, 8)))
    box = draw(st.sampled_from(draw(any_tiling(shape))))
    return shape, box, draw(st.integers(1, shape.inner - 1))


@pytest.mark.slow
@settings(calm, max_examples=150)
@given(product=long_products(), left=layouts, right=layouts, kernel=kernels)
def test_a_block_in_chunks_is_the_block_in_one_piece(
    product: tuple[Shape, Box, int], left: str, right: str, kernel: Kernel
) -> None:
    """Values are not small integers here: chunks are added up in float32, in another order than within one product."""
    shape, box, length = product
    rng = np.random.default_rng(0)
    operands = (
        Operand(LAYOUTS[left](rng.standard_normal((shape.batch, shape.rows, shape.inner), dtype=np.float32))),
        Operand(LAYOUTS[right](rng.standard_normal((shape.batch, shape.columns, shape.inner), dtype=np.float32))),
    )
    line, results = Line(), []
    for parcel in streamed(7, operands, box, 3, 2, length, line.piece_ids):
        (row,) = line.bring(parcel)
        assert row.key == (2, 7, 3)
        assert row.down_bytes == sum(d.nbytes for d in parcel.data)
        assert line.receiver.bytes == sum(d.nbytes for d in parcel.data), "an earlier chunk was kept"
        results.append(line.receiver.product(row, kernel))
        assert line.receiver.bytes == 0, "a chunk is kept after its use"
    *before, last = results
    assert len(results) == -(-shape.inner // length)
    assert before == [None] * len(before), "an answer before the last chunk"
    assert last is not None
    np.testing.assert_allclose(last.reshape(box[1::2]), expected_of(operands, box), rtol=1e-5, atol=1e-5)
    assert_empty(line.receiver)


@settings(calm, max_examples=80)
@given(product=long_products())
def test_chunks_bring_every_cell_once_and_none_is_longer_than_agreed(product: tuple[Shape, Box, int]) -> None:
    shape, box, length = product
    sent = list(streamed(0, operands_of(shape), box, 0, 0, length, count()))
    assert sum(d.nbytes for parcel in sent for d in parcel.data) == needed_bytes(shape, [box])
    inner = [int(parcel.pieces["inner"][0]) for parcel in sent]
    assert sum(inner) == shape.inner
    assert max(inner) <= length
    assert [parcel.blocks["chunk"].item() for parcel in sent] == list(range(len(sent)))
    assert {parcel.blocks["chunks"].item() for parcel in sent} == {len(sent)}


def test_a_chunk_is_packed_when_it_is_sent_and_not_kept() -> None:
    """Otherwise the server would hold a second copy of operands that are too large for the device."""
    operands = operands_of(Shape(1, 4, 30, 4), "strided", "transposed")
    source = streamed(0, operands, [0, 1, 0, 4, 0, 4], 0, 0, 10, count())
    next(source)
    operands[0].array[:] = 5.0
    assert all((next(source).data[0] == 5.0).all() for _ in range(2))
    assert operands[0]._packed == operands[1]._packed == {}


def chunks_of_two_blocks() -> tuple[Line, list[BlockRow], list[BlockRow], Array]:
    """Blocks 0 and 1 of one product, three chunks each, all arrived; and the right product."""
    shape, line = Shape(1, 4, 30, 6), Line()
    operands = operands_of(shape)
    rows = [
        [
            row
            for parcel in streamed(0, operands, [0, 1, 0, 4, column, 3], block, 0, 10, line.piece_ids)
            for row in line.bring(parcel)
        ]
        for block, column in ((0, 0), (1, 3))
    ]
    return line, rows[0], rows[1], expected_of(operands, whole(shape))[0]


def test_chunks_of_several_blocks_may_take_turns() -> None:
    line, one, two, expected = chunks_of_two_blocks()
    results = [line.receiver.product(row, NumpyKernel()) for pair in zip(one, two, strict=True) for row in pair]
    assert results[:4] == [None] * 4
    np.testing.assert_allclose(np.hstack([r for r in results if r is not None]), expected, rtol=1e-6)
    assert_empty(line.receiver)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ((1,), "chunk 1 of block 0 of job 0 came after 0 chunks"),
        ((2,), "chunk 2 of block 0 of job 0 came after 0 chunks"),
        ((0, 2), "chunk 2 of block 0 of job 0 came after 1 chunks"),
        ((0, 1, 0), "chunk 0 of block 0 of job 0 came after 2 chunks"),
        ((0, 1, 1), "chunk 1 of block 0 of job 0 came after 2 chunks"),
    ],
    ids=str,
)
def test_a_chunk_out_of_turn_is_refused_and_spoils_no_other_block(order: tuple[int, ...], told: str) -> None:
    line, one, two, expected = chunks_of_two_blocks()
    assert line.receiver.product(two[0], NumpyKernel()) is None
    *good, bad = order
    for chunk in good:
        assert line.receiver.product(one[chunk], NumpyKernel()) is None
    if bad in good:  # it must be sent a second time
        again = next(streamed(0, operands_of(Shape(1, 4, 30, 6)), [0, 1, 0, 4, 0, 3], 0, 0, 10, count(90)))
        (row,) = line.bring(Parcel(again.pieces, with_chunk(again.blocks, bad), again.data))
    else:
        row = one[bad]
    with pytest.raises(WireError, match=told):
        line.receiver.product(row, NumpyKernel())
    assert line.receiver.product(two[1], NumpyKernel()) is None
    last = line.receiver.product(two[2], NumpyKernel())
    assert last is not None
    np.testing.assert_allclose(last, expected[:, 3:], rtol=1e-6)


def with_chunk(blocks: NDArray[np.void], chunk: int) -> NDArray[np.void]:
    changed = blocks.copy()
    changed["chunk"] = chunk
    return changed


@pytest.mark.parametrize("computed", [0, 1, 2])
def test_a_cancelled_block_in_chunks_leaves_nothing_behind(computed: int) -> None:
    line, one, two, expected = chunks_of_two_blocks()
    for row in one[:computed]:
        line.receiver.product(row, NumpyKernel())
    for row in one[computed:]:
        line.receiver.skip(row)
    results = [line.receiver.product(row, NumpyKernel()) for row in two]
    assert results[2] is not None
    np.testing.assert_allclose(results[2], expected[:, 3:], rtol=1e-6)
    assert_empty(line.receiver)


# ---- inconsistent work

# pieces 10 and 11 hold 2 x 4 rows and 2 x 5 columns over an inner length of 3; one block takes all of both
WORK = Work(
    stamp_ns=0,
    released=np.empty(0, "<u4"),
    pieces=np.array([(10, OUTER_MAJOR, 2, 4, 3), (11, INNER_MAJOR, 2, 5, 3)], PIECE),
    blocks=np.array([(0, 1, 0, 10, 11, 0, 0, 0, 0, 2, 4, 5, 0, 1, 216)], BLOCK),
    data=[np.ones(24, np.float32), np.ones(30, np.float32)],
)


def block_with(**changes: int) -> Work:
    blocks = WORK.blocks.copy()
    for name, value in changes.items():
        blocks[name] = value
    return replace(WORK, blocks=blocks)


def test_a_block_may_take_all_of_its_pieces() -> None:
    operands = Operands()
    operands.accept(transmit(WORK))
    left, right = operands.factors(block_rows(WORK.blocks)[0])
    assert (left.shape, right.shape) == ((2, 4, 3), (2, 3, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 5},
        {"columns": 6},
        {"batch": 3},
        {"left_outer": 1},
        {"right_outer": 1},
        {"left_batch": 1},
        {"right_batch": 1},
        {"left_outer": 2**32 - 1},
        {"right_outer": 2**32 - 4},
        {"left_batch": 2**32 - 1},
        {"rows": 2**32 - 1},
        {"left_outer": 2**32 - 1, "rows": 2},
        {"right_batch": 2**32 - 1, "batch": 2},
    ],
    ids=str,
)
def test_a_block_that_reaches_outside_its_piece_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(WireError, match=r"reaches beyond piece 1[01]"):
        Operands().accept(transmit(block_with(**changes)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_block_of_an_unknown_piece_is_refused(side: str) -> None:
    with pytest.raises(WireError, match="names piece 12, which is not there"):
        Operands().accept(transmit(block_with(**{side: 12})))


def test_a_block_of_a_released_piece_is_refused() -> None:
    operands = Operands()
    operands.accept(transmit(WORK))
    later = replace(WORK, released=np.array([10], "<u4"), pieces=np.empty(0, PIECE), data=[])
    with pytest.raises(WireError, match="names piece 10, which is not there"):
        operands.accept(transmit(later))


def test_a_block_whose_operands_do_not_fit_each_other_is_refused() -> None:
    pieces = np.array([(10, OUTER_MAJOR, 2, 4, 3), (11, INNER_MAJOR, 2, 5, 2)], PIECE)
    odd = replace(WORK, pieces=pieces, data=[np.ones(24, np.float32), np.ones(20, np.float32)])
    with pytest.raises(WireError, match="inner lengths 3 and 2"):
        Operands().accept(transmit(odd))


def test_a_piece_that_comes_twice_is_refused() -> None:
    """Otherwise its bytes would be counted twice and its release would fail."""
    operands = Operands()
    operands.accept(transmit(WORK))
    with pytest.raises(WireError, match="10"):
        operands.accept(transmit(WORK))


@settings(calm, max_examples=120)
@given(data=st.data())
def test_work_with_changed_figures_is_refused_or_can_be_computed_and_released(data: st.DataObject) -> None:
    pieces, blocks = WORK.pieces.copy(), np.repeat(WORK.blocks, 2)
    for _ in range(data.draw(st.integers(1, 4))):
        table = data.draw(st.sampled_from((pieces, blocks)))
        name = data.draw(st.sampled_from(table.dtype.names or ()))
        value = data.draw(st.one_of(st.integers(0, 12), st.sampled_from([2**31, 2**32 - 1])))
        table[name][data.draw(st.integers(0, len(table) - 1))] = value
    operands = Operands()
    try:
        operands.accept(transmit(replace(WORK, pieces=pieces, blocks=blocks)))
    except WireError:
        pass
    else:
        for row in block_rows(blocks):
            left, right = operands.factors(row)
            assert (left @ right).size == row.batch * row.rows * row.columns
    operands.drop(pieces["piece"].tolist())
    assert operands.bytes == 0
