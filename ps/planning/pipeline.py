"""How a device works through its blocks, and the cost model that follows from it for the packing.

Download, compute and upload are three queues. A block passes them in order, and different blocks use different queues
at the same time. A rectangle of w columns and h rows is therefore cut into k strips along its height: blocks that share
the slab of the columns. Their sizes follow the speed of the device's queues: a strip should have passed the other
queues just when the next one arrives. So heights grow, or shrink, by one factor, the taper, from the first strip
(share a of the height) to the last (share z). With p the seconds to download a row or column, q to compute a cell, u to
upload it,

    T = 2 latency + k overhead + max(p_w w + p_h h   + (q + u) z w h,                     download ends last
                                     p_w w + p_h a h + max(q + u z, q a + u) w h)         compute or upload ends last

(a bound set by a strip in between is also set by the first or the last, since the sizes are a geometric series).

A rectangle whose strips do not fit the device's memory is one block instead, its operands streamed in c chunks:

    T = 2 latency + c overhead + u w h + max(p_w w + p_h h + q w h / c,  (p_w w + p_h h) / c + q w h)

A slab that will be used r times while it is kept is downloaded once, so the packing charges 1/r of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.capacity import SHAPES, Areas, CostModel
from ps.planning.cost import BYTES, CHUNKS_HELD, Integers, Numbers, chunk_length, chunk_of, queue_seconds, usable_bytes
from ps.planning.packing import halved
from ps.planning.plans import Plan, Request, Shape


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the rectangle of each device is cut; at least one of `strips` and `chunks` is 1."""

    strips: Integers
    chunks: Integers
    separate: NDArray[np.bool_]  # strips are matrices of a batch, and share nothing
    tapers: Numbers  # [2, k]: how many times larger the next strip is, upright and turned

    @classmethod
    def none(cls, count: int) -> Cuts:
        return cls(np.ones(count, np.int64), np.ones(count, np.int64), np.zeros(count, np.bool_), np.ones((2, count)))


def running_cost_models(profiles: NDArray[np.void], request: Request, cuts: Cuts) -> tuple[CostModel, CostModel]:
    """Upright (strips along the rows) and turned (along the columns, which the model then calls rows)."""
    inner = request.shape.inner
    compute_s, up_s = 2 * inner / profiles["flops"], 8 * BYTES / profiles["up_bps"]
    k, c, streamed = cuts.strips, cuts.chunks, cuts.chunks > 1
    once = _side_s(profiles, Request(request.shape))  # streamed operands are not kept
    column_s, row_s = np.where(streamed, once, _side_s(profiles, request))
    fixed_s = 2 * profiles["latency_s"] + np.maximum(k, c) * profiles["overhead_s"]
    values = usable_bytes(profiles) / BYTES
    whole = _square(values, inner)
    # two outputs, and the shortest chunks
    streamed_too = _square(values / 2, CHUNKS_HELD * settings.NOW.least_chunk / 2)
    most_cells = np.floor(np.maximum(whole, streamed_too) * (1 + 1e-12) + 1e-9)

    def cost_model(wide_s: Numbers, tall_s: Numbers, taper: Numbers) -> CostModel:
        first, last = strips_until(1, k, taper), 1 - strips_until(k - 1, k, taper)
        wide = np.stack([wide_s, wide_s * np.where(cuts.separate, first, 1 / c)])
        tall = np.stack([tall_s, tall_s * np.where(streamed, 1 / c, first)])
        ends_down = np.where(streamed, compute_s / c + up_s, (compute_s + up_s) * last)
        ends_up = np.maximum(compute_s + up_s * last, compute_s * first + up_s)
        cell = np.stack([ends_down, np.where(streamed, compute_s + up_s, ends_up)])
        return CostModel(fixed_s, wide, tall, cell, most_cells)

    return cost_model(column_s, row_s, cuts.tapers[0]), cost_model(row_s, column_s, cuts.tapers[1])


def strips_until(number: Integers | int, count: Integers, taper: Numbers) -> Numbers:
    """The part of a rectangle in its first `number` strips, when each is `taper` times as large as the one before."""
    steady = np.abs(taper - 1) < 1e-6
    steep = np.where(steady, 2.0, taper)
    return np.where(steady, number / count, (1 - steep**number) / (1 - steep**count))


def _square(values: Numbers, held: float) -> Numbers:
    """The largest square of cells that fits beside `held` values of each of its rows and columns."""
    return (values / (np.sqrt(held * held + values) + held)) ** 2


def cuts_within(profiles: NDArray[np.void], request: Request, areas: Areas, span_s: float) -> Cuts:
    """How to cut the ideal rectangle of each device if all are to end within `span_s`."""
    shape = request.shape
    cells = areas.within(span_s)
    one = np.minimum(cells, float(shape.rows) * shape.columns)  # several matrices of a batch are separate blocks
    width = np.sqrt(one * request.right_uses / request.left_uses)
    width = np.clip(width, np.maximum(one / shape.rows, 1), shape.columns)
    height = np.clip(one / width, 1, shape.rows)
    rectangles = np.maximum(cells / np.maximum(one, 1e-300), 1)
    separate = rectangles >= 2
    lines = rectangles * (height + width)
    down_s, compute_s, up_s = queue_seconds(profiles, slice(None), shape.inner, rectangles, height, width, lines)
    total_s, credit = down_s + compute_s + up_s, profiles["credit_blocks"]
    now = settings.NOW
    strip_s = now.strip_s * min(len(profiles) / now.crowd, 1.0)
    worth = np.clip(total_s / strip_s, 1, np.minimum(now.most_strips, credit))
    if max(request.left_uses, request.right_uses) == 1:  # slabs that are kept stay in few pieces
        several = credit >= now.most_strips
        worth = np.where(several, np.clip(total_s / now.long_s, worth, np.maximum(worth, now.most_pieces)), worth)
    strips = np.where(separate, np.minimum(worth, rectangles), worth).astype(np.int64)
    budget, columns = usable_bytes(profiles), np.ceil(width).astype(np.int64)
    rows = np.ceil(height / np.where(separate, 1, strips)).astype(np.int64)
    whole = chunk_length(1, rows, shape.inner, columns, budget) == shape.inner
    chunk = chunk_length(1, np.ceil(height).astype(np.int64), shape.inner, columns, budget)
    chunks = -(-shape.inner // np.maximum(chunk, min(now.least_chunk, shape.inner)))
    column_s, row_s = _side_s(profiles, request)
    others_s = compute_s / rectangles, up_s / rectangles
    upright = _best_taper(one, strips, column_s, row_s, *others_s, shape.columns, shape.rows)
    turned = _best_taper(one, strips, row_s, column_s, *others_s, shape.rows, shape.columns)
    tapers = np.where(separate, taper(down_s, compute_s, up_s, strips), [upright, turned])
    return Cuts(np.where(whole, strips, 1), np.where(whole, 1, chunks), separate & whole, tapers)


def _best_taper(
    cells: Numbers,
    strips: Integers,
    slab_s: Numbers,
    along_s: Numbers,
    compute_s: Numbers,
    up_s: Numbers,
    slab_most: int,
    along_most: int,
) -> Numbers:
    """The taper of the rectangle of this many cells that ends soonest, among a few shapes. Nothing can be computed
    before the slab that all strips share has arrived, so a device with a slow uplink does better with a narrow slab.
    `slab_s`, `along_s`: seconds to download one line of the slab, and one along which strips are cut; `slab_most`,
    `along_most`: the most lines of each."""
    squares = SHAPES[:, None] * np.sqrt(cells * along_s / slab_s)
    slabs = np.clip(squares, np.maximum(cells / along_most, 1), slab_most)
    strips_s = along_s * cells / slabs
    tapers = taper(strips_s, compute_s, up_s, strips)
    return _best(tapers, slab_s * slabs + _after_slab_s(strips_s, compute_s, up_s, strips, tapers))


def _best(choices: Numbers, ends_s: Numbers) -> Numbers:
    """Of the choices along the first axis, for each device the one that ends soonest."""
    best: Numbers = np.take_along_axis(choices, ends_s.argmin(axis=0)[None], axis=0)[0]
    return best


def _side_s(profiles: NDArray[np.void], request: Request) -> tuple[Numbers, Numbers]:
    """Seconds to download a column, and a row, divided by how often each will be used."""
    side_s = 8 * BYTES * request.shape.inner / profiles["down_bps"]
    return side_s / request.right_uses, side_s / request.left_uses


def taper(strips_s: Numbers, compute_s: Numbers, up_s: Numbers, strips: Integers) -> Numbers:
    """How many times larger each next strip should be, given the seconds of all strips in download, compute and upload:
    the ratio of the slower of compute and upload to download; closer to 1 where the third queue is slow as well."""
    # more strips than those for the overlap serve only to keep each of them short
    most = settings.NOW.steepest ** (np.minimum(1, settings.NOW.most_strips / strips) ** 2)
    steepest = np.clip(np.maximum(compute_s, up_s) / np.maximum(strips_s, 1e-300), 1 / most, most)
    choices = np.stack([steepest, steepest**0.5, np.ones_like(steepest)])
    return _best(choices, _after_slab_s(strips_s, compute_s, up_s, strips, choices))


def _after_slab_s(strips_s: Numbers, compute_s: Numbers, up_s: Numbers, strips: Integers, taper: Numbers) -> Numbers:
    """When all strips have passed the three queues, counted from the arrival of their common slab."""
    first, last = strips_until(1, strips, taper), 1 - strips_until(strips - 1, strips, taper)
    others_s = np.maximum(compute_s + up_s * last, compute_s * first + up_s)
    return np.maximum(strips_s + (compute_s + up_s) * last, strips_s * first + others_s)


def cut_boxes(
    boxes: Integers, device: Integers, strips: Integers, turned: bool, shape: Shape, profiles: NDArray[np.void]
) -> tuple[Integers, Integers]:
    """Blocks in the order of their devices. Each fits its device's memory; unstreamed, if dividing a batch achieves
    that. Rectangles are cut into strips if these need no streaming: streamed strips could share nothing."""
    boxes = np.column_stack([boxes, strips])  # halves keep their number of strips

    def too_large(t: Integers, d: Integers) -> NDArray[np.bool_]:
        length = chunk_of(t, d, shape.inner, profiles)
        large: NDArray[np.bool_] = (length == 0) | ((length < shape.inner) & (t[:, 1] > 1))
        return large

    boxes, device = halved(boxes, device, too_large)
    strips, boxes = boxes[:, 6], boxes[:, :6]
    axis = np.where(boxes[:, 1] > 1, 0, 4 if turned else 2)
    extent = boxes[np.arange(len(boxes)), axis + 1]
    count = np.minimum(strips, extent)
    batches, rows, columns = boxes[:, 1], boxes[:, 3], boxes[:, 5]
    along = batches * np.where(batches > 1, rows + columns, columns if turned else rows)
    steep = taper(*queue_seconds(profiles, device, shape.inner, batches, rows, columns, along), count)
    largest = boxes.copy()
    share = np.maximum(strips_until(1, count, steep), 1 - strips_until(count - 1, count, steep))
    largest[np.arange(len(boxes)), axis + 1] = np.minimum(extent, np.ceil(share * extent) + 1)
    count = np.where(chunk_of(largest, device, shape.inner, profiles) < shape.inner, 1, count)
    index = np.repeat(np.arange(len(boxes)), count)
    number = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    begin, end = (
        np.rint(extent[index] * strips_until(until, count[index], steep[index])).astype(np.int64)
        for until in (number, number + 1)
    )
    some = end > begin
    index, begin, end = index[some], begin[some], end[some]
    boxes, device, axis, row = boxes[index], device[index], axis[index], np.arange(len(index))
    boxes[row, axis] += begin
    boxes[row, axis + 1] = end - begin
    across, along = (boxes[:, 2], boxes[:, 4]) if turned else (boxes[:, 4], boxes[:, 2])
    order = np.lexsort((along, across, boxes[:, 0], device))
    return boxes[order], device[order]


def made_plan(boxes: Integers, device: Integers, shape: Shape, profiles: NDArray[np.void]) -> Plan:
    """The plan of these blocks: the slabs that each brings, and when its device ends."""
    fresh = fresh_slabs(boxes, device, shape, profiles)
    ends_s = _device_ends_s(device, _passages(boxes, device, fresh, shape, profiles), profiles)
    return Plan(boxes, device, fresh, float(ends_s.max()), ends_s[device])


def fresh_slabs(boxes: Integers, device: Integers, shape: Shape, profiles: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each block brings its rows, and its columns: unless it and an earlier block of its device, with the same
    range, come whole."""
    batch = int(boxes[:, :2].max()) + 1
    matrix = (device * batch + boxes[:, 0]) * batch + boxes[:, 1]
    whole = np.flatnonzero(chunk_of(boxes, device, shape.inner, profiles) == shape.inner)
    fresh = np.ones((len(boxes), 2), np.bool_)
    for side, axis in enumerate((2, 4)):
        span = boxes[:, axis] * (int(boxes[:, axis : axis + 2].max()) + 1) + boxes[:, axis + 1]
        order = whole[np.lexsort((span[whole], matrix[whole]))]  # stable: the first of equal blocks stays first
        fresh[order[1:], side] = (np.diff(matrix[order]) != 0) | (np.diff(span[order]) != 0)
    return fresh


def together_ends_s(plans: Sequence[Plan], shapes: Sequence[Shape], profiles: NDArray[np.void]) -> Numbers:
    """When each device has done its blocks of all these plans, by id, in their order; 0 without work."""
    passages = [
        _passages(plan.boxes, plan.device, plan.fresh, shape, profiles)
        for plan, shape in zip(plans, shapes, strict=True)
    ]
    return _device_ends_s(np.concatenate([plan.device for plan in plans]), np.hstack(passages), profiles)


def _passages(
    boxes: Integers, device: Integers, fresh: NDArray[np.bool_], shape: Shape, profiles: NDArray[np.void]
) -> Numbers:
    """Seconds of each block in the three queues, and its chunks: [4, k]."""
    batches, rows, columns = boxes[:, 1], boxes[:, 3], boxes[:, 5]
    lines = batches * (rows * fresh[:, 0] + columns * fresh[:, 1])
    chunks = -(-shape.inner // np.maximum(chunk_of(boxes, device, shape.inner, profiles), 1))
    return np.stack([*queue_seconds(profiles, device, shape.inner, batches, rows, columns, lines, chunks), chunks])


def _device_ends_s(device: Integers, passages: Numbers, profiles: NDArray[np.void]) -> Numbers:
    """When each device ends, by id; 0 without work. Its blocks pass the three queues one after another. While it has as
    many as its credit allows, the next one is sent when an answer has arrived."""
    order = np.argsort(device, kind="stable")
    passages, mine = passages[:, order], device[order]
    starts = np.flatnonzero(np.diff(mine, prepend=-1))
    count = np.diff(starts, append=len(mine))
    longest = np.argsort(-count, kind="stable")  # longest first, so that the devices that still have a block come first
    starts, count = starts[longest], count[longest]
    used = mine[starts]
    credit, line_s = profiles["credit_blocks"][used], 2 * profiles["latency_s"][used]
    down_s, compute_s, up_s, chunks = passages
    # the first chunk can be computed when it arrives, the last one not before the download ends
    after_first_s, after_last_s = down_s / chunks + compute_s, down_s + compute_s / chunks
    downloaded, computed, uploaded = np.zeros((3, len(starts)))
    most = int(count.max(initial=0))
    answered_s = np.zeros((most, len(starts)))  # by number of the block
    for number in range(most):
        on = int(np.searchsorted(-count, -number))  # devices with more blocks than that
        at = starts[:on] + number
        if len(waiting := np.flatnonzero(credit[:on] <= number)):
            answers_s = answered_s[number - credit[waiting], waiting]
            downloaded[waiting] = np.maximum(downloaded[waiting], answers_s)
        ready_s = downloaded[:on] + np.maximum(after_first_s[at], after_last_s[at])
        computed[:on] = np.maximum(computed[:on] + compute_s[at], ready_s)
        downloaded[:on] += down_s[at]
        uploaded[:on] = np.maximum(uploaded[:on], computed[:on]) + up_s[at]
        answered_s[number, :on] = uploaded[:on] + line_s[:on]
    ends_s = np.zeros(len(profiles))
    ends_s[used] = line_s + uploaded
    return ends_s


def rectangles(boxes: Integers, device: Integers) -> list[Integers]:
    """The rectangles of each device, with strips joined again: a block joins the one before if they are adjacent and
    differ in just one direction."""
    found: list[Integers] = []
    owner = -1
    for box, name in zip(boxes, device.tolist(), strict=True):
        if found and owner == name:
            last = found[-1]
            differs = [axis for axis in (0, 2, 4) if last[axis] != box[axis] or last[axis + 1] != box[axis + 1]]
            if len(differs) == 1 and last[differs[0]] + last[differs[0] + 1] == box[differs[0]]:
                last[differs[0] + 1] += box[differs[0] + 1]
                continue
        found.append(box.copy())
        owner = name
    return found
