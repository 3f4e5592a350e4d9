"""Adapts a plan to devices that were lost or have joined, without planning anew.

A lost device's rectangle goes to the other devices of the same column, or row: their heights are solved again under the
cost model. Where there are none, or too few, the rectangle is cut like a small product over the devices that would
finish it soonest; many of them are idle, since plans use few devices. All other devices keep exactly their blocks.

A newcomer takes half a block from the device that ends last, until the next plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ps.planning.capacity import PackingError
from ps.planning.columns import Columns, fitted_heights
from ps.planning.cost import Integers, Numbers, block_seconds, chunk_length, usable_bytes
from ps.planning.pipeline import (
    Cuts,
    chunks_of,
    cut_boxes,
    ended_plan,
    made_plan,
    queue_seconds,
    rectangles,
    running_cost_models,
    taper,
)
from ps.planning.plans import Plan, PlanError, Request, Shape
from ps.planning.weighted_grid import able_devices, grid_boxes

HELPERS = 32  # devices over which a rectangle without neighbours is cut
MOST_NEWCOMERS = 64  # newcomers that get a block at once; the rest wait for the next plan
LATER = 1.1  # a column may take this many times as long as the plan did; beyond that, other devices help


@dataclass(slots=True)
class _Stack:
    """Neighbours in one column (or, turned, row), some of them lost."""

    turned: bool
    frame: tuple[int, int, int, int]  # batch, batches, and begin and size across the stack
    begin: int
    length: int
    boxes: Integers  # indices of the remaining blocks
    holes: list[Integers]  # the lost rectangles


def adapted(plan: Plan, request: Request, lost: Integers, profiles: NDArray[np.void], able: Integers) -> Plan:
    """The same plan without the devices `lost`. Pure; PlanError if no device in `able` has the memory."""
    gone = _marked(lost, profiles)[plan.device]
    if not gone.any():
        return plan
    if not len(able):
        raise PlanError(f"all {len(np.unique(plan.device))} devices of the plan of {request.shape} are lost")
    shape = request.shape
    if plan.chunks is None or plan.ends_s is None:
        plan = ended_plan(*_as_made(plan, shape, profiles), shape, profiles)
        assert plan.chunks is not None
        assert plan.ends_s is not None
    holes = rectangles(plan.boxes[gone], plan.device[gone])
    stacks, alone = _stacks(plan, gone, holes)
    boxes, device, taken, left_over = _solved(plan, stacks, request, profiles)
    kept = ~gone
    kept[taken] = False
    as_before = int(kept.sum())
    boxes, device = np.concatenate([plan.boxes[kept], boxes]), np.concatenate([plan.device[kept], device])
    alone += left_over
    if alone:
        end_of = np.zeros(len(profiles))
        end_of[plan.device[kept]] = plan.ends_s[kept]
        stacked = np.unique(device[as_before:])
        end_of[stacked] = np.maximum(end_of[stacked], plan.makespan_s)  # approximate: they have just been given more
        more, helpers = _helped(alone, end_of, shape, profiles, able)
        boxes, device = np.concatenate([boxes, more]), np.concatenate([device, helpers])
    # only devices whose blocks have changed bring other slabs and end at another time
    changed = _marked(np.concatenate([device[as_before:], plan.device[taken]]), profiles)[device]
    some = np.flatnonzero(changed)
    part = made_plan(boxes[some], device[some], shape, profiles)
    assert part.chunks is not None
    assert part.ends_s is not None
    new = len(boxes) - as_before
    chunks = np.concatenate([plan.chunks[kept], np.ones(new, np.int64)])
    fresh = np.concatenate([plan.fresh[kept], np.ones((new, 2), np.bool_)])
    ends_s = np.concatenate([plan.ends_s[kept], np.zeros(new)])
    chunks[some], fresh[some], ends_s[some] = part.chunks, part.fresh, part.ends_s
    return Plan(boxes, device, fresh, float(ends_s.max()), chunks, ends_s)


def _as_made(
    plan: Plan, shape: Shape, profiles: NDArray[np.void]
) -> tuple[Integers, Integers, NDArray[np.bool_], Integers]:
    return plan.boxes, plan.device, plan.fresh, chunks_of(plan.boxes, plan.device, shape, profiles)


def _marked(devices: Integers, profiles: NDArray[np.void]) -> NDArray[np.bool_]:
    """A mask over the devices of the table."""
    marks = np.zeros(len(profiles), np.bool_)
    marks[devices] = True
    return marks


def _stacks(plan: Plan, gone: NDArray[np.bool_], holes: list[Integers]) -> tuple[list[_Stack], list[Integers]]:
    """The neighbours of each hole, and holes without neighbours. No block is in two stacks."""
    free = ~gone
    stacks: list[_Stack] = []
    alone: list[Integers] = []
    pending = list(holes)
    while pending:
        hole = pending.pop(0)
        choices = [_around(plan.boxes, free, hole, pending, turned) for turned in (False, True)]
        best = max(choices, key=lambda stack: 0 if stack is None else len(set(plan.device[stack.boxes].tolist())))
        if best is None:
            alone.append(hole)
            continue
        pending = [other for other in pending if not any(other is filled for filled in best.holes)]
        free[best.boxes] = False
        stacks.append(best)
    return stacks, alone


def _around(
    boxes: Integers, free: NDArray[np.bool_], hole: Integers, others: list[Integers], turned: bool
) -> _Stack | None:
    """The unbroken run of blocks and holes of the same breadth around `hole`; None if it has no block."""
    along, across = (4, 2) if turned else (2, 4)
    frame = [0, 1, across, across + 1]
    same = np.flatnonzero(free & (boxes[:, 0] == hole[0]) & (boxes[:, across] == hole[across]))
    same = same[(boxes[same][:, frame] == hole[frame]).all(axis=1)]
    if not len(same):
        return None
    beside = [hole, *(other for other in others if (other[frame] == hole[frame]).all())]
    begins = np.concatenate([boxes[same, along], [other[along] for other in beside]])
    sizes = np.concatenate([boxes[same, along + 1], [other[along + 1] for other in beside]])
    order = np.argsort(begins, kind="stable")
    broken = begins[order][1:] != (begins + sizes)[order][:-1]
    run = np.concatenate([[0], np.cumsum(broken)])
    mine = order[run == run[np.flatnonzero(order == len(same))[0]]]
    if (mine >= len(same)).all():
        return None
    return _Stack(
        turned=turned,
        frame=(int(hole[0]), int(hole[1]), int(hole[across]), int(hole[across + 1])),
        begin=int(begins[mine].min()),
        length=int(sizes[mine].sum()),
        boxes=np.sort(same[mine[mine < len(same)]]),
        holes=[beside[i - len(same)] for i in mine.tolist() if i >= len(same)],
    )


def _solved(
    plan: Plan, stacks: list[_Stack], request: Request, profiles: NDArray[np.void]
) -> tuple[Integers, Integers, Integers, list[Integers]]:
    """New blocks and their devices, the blocks they replace, and holes that would make their stack end too late."""
    boxes, device = [np.empty((0, 6), np.int64)], [np.empty(0, np.int64)]
    taken, left_over = [np.empty(0, np.int64)], []
    for turned in (False, True):
        mine = [stack for stack in stacks if stack.turned == turned]
        if not mine:
            continue
        made, strips = _columns(plan, mine, request, profiles)
        widths = np.array([stack.frame[3] for stack in mine])
        try:
            spans_s = made.whole_spans(widths, np.full(len(mine), plan.makespan_s))
        except PackingError:  # a stack has too little memory: other devices fill the holes of all stacks
            left_over += [hole for stack in mine for hole in stack.holes]
            continue
        heights = fitted_heights(made, widths, spans_s)
        for index, stack in enumerate(mine):
            if spans_s[index] > LATER * plan.makespan_s:
                left_over += stack.holes
                continue
            who = np.flatnonzero((made.member == index) & (heights > 0))
            rows = heights[who]
            frame = np.broadcast_to(stack.frame, (len(who), 4))
            along, across = [stack.begin + np.cumsum(rows) - rows, rows], [frame[:, 2], frame[:, 3]]
            table = np.column_stack([frame[:, :2], *(across + along if turned else along + across)])
            cut, owner = cut_boxes(table, made.order[who], strips[who], turned, request.shape, profiles)
            boxes.append(cut)
            device.append(owner)
            taken.append(stack.boxes)
    return np.concatenate(boxes), np.concatenate(device), np.concatenate(taken), left_over


def _columns(
    plan: Plan, stacks: list[_Stack], request: Request, profiles: NDArray[np.void]
) -> tuple[Columns, Integers]:
    """The remaining devices of each stack as a column of its own, and the number of strips of each device. A
    device's blocks elsewhere in the plan delay it."""
    shape = request.shape
    index = np.concatenate([stack.boxes for stack in stacks])
    stack_of = np.repeat(np.arange(len(stacks)), [len(stack.boxes) for stack in stacks])
    pairs, seat = np.unique(stack_of * len(profiles) + plan.device[index], return_inverse=True)
    member, names = np.divmod(pairs, len(profiles))
    chunks = np.ones(len(names), np.int64)
    np.maximum.at(chunks, seat, chunks_of(plan.boxes[index], plan.device[index], shape, profiles))
    strips = np.where(chunks > 1, 1, np.bincount(seat))
    along = np.bincount(seat, plan.boxes[index, 5 if stacks[0].turned else 3])  # approximate: they will get more
    batches, across = np.array([(stack.frame[1], stack.frame[3]) for stack in stacks])[member].T
    steep = taper(*queue_seconds(profiles, names, shape, batches, along, across, along), strips)
    cuts = Cuts(strips, chunks, np.zeros(len(names), np.bool_), np.stack([steep, steep]))
    cost_model = running_cost_models(profiles[names], request, cuts)
    elsewhere = _marked(names, profiles)[plan.device]
    elsewhere[index] = False
    others = np.flatnonzero(elsewhere)
    delay_s = np.bincount(
        plan.device[others], _busy_s(plan.boxes[others], plan.device[others], shape, profiles), len(profiles)
    )
    mine = cost_model[stacks[0].turned]
    column = np.arange(len(stacks))
    made = Columns(
        cost_model=replace(mine, fixed_s=mine.fixed_s + delay_s[names]),
        order=names,
        starts=np.searchsorted(member, column),
        member=member,
        team_starts=column,
        team=column,
        length=np.array([stack.length for stack in stacks]),
        breadth=1,
    )
    return made, strips


def _busy_s(boxes: Integers, device: Integers, shape: Shape, profiles: NDArray[np.void]) -> Numbers:
    """Upper bound of the seconds that each block adds to its device: everything but the latency."""
    batches, rows, columns = boxes[:, 1], boxes[:, 3], boxes[:, 5]
    down_s, compute_s, up_s = queue_seconds(profiles, device, shape, batches, rows, columns, rows + columns)
    busy_s: Numbers = profiles["overhead_s"][device] + down_s + compute_s + up_s
    return busy_s


def _helped(
    holes: list[Integers], end_of: Numbers, shape: Shape, profiles: NDArray[np.void], able: Integers
) -> tuple[Integers, Integers]:
    """Cut each rectangle over the devices that, with their present work, would finish it soonest. `end_of`: when each
    device ends."""
    mine = profiles[able]
    capable = able_devices(shape, mine)
    able, mine = able[capable], mine[capable]
    backlog_s = np.maximum(end_of - 2 * profiles["latency_s"], 0.0)
    found, helpers = [], []
    for hole in holes:
        batch, batches, row, rows, column, columns = hole.tolist()
        ends_s = backlog_s[able] + block_seconds(mine, batches, rows, shape.inner, columns)
        names = able[np.sort(np.argsort(ends_s, kind="stable")[:HELPERS])]
        part, owner = grid_boxes(
            Shape(batches, rows, shape.inner, columns), profiles[names], backlog_s[names], count=len(names)
        )
        found.append(part + np.array([batch, 0, row, 0, column, 0]))
        helpers.append(names[owner])
        np.add.at(backlog_s, helpers[-1], _busy_s(part, helpers[-1], shape, profiles))
    return np.concatenate(found), np.concatenate(helpers)


def with_newcomers(plan: Plan, shape: Shape, joined: Integers, profiles: NDArray[np.void]) -> Plan:
    """The same plan with newcomers in it: each takes half a block from the device that ends last, if the newcomer would
    end sooner."""
    if plan.ends_s is None:
        plan = ended_plan(*_as_made(plan, shape, profiles), shape, profiles)
        assert plan.ends_s is not None
    end_of = dict(zip(plan.device.tolist(), plan.ends_s.tolist(), strict=True))
    boxes, device = plan.boxes.copy(), plan.device
    budget = usable_bytes(profiles)
    for newcomer in joined[:MOST_NEWCOMERS].tolist():
        last = max(end_of, key=end_of.__getitem__)
        mine = np.flatnonzero(device == last)
        index = mine[np.argmax(boxes[mine, 1] * boxes[mine, 3] * boxes[mine, 5])]
        axis = 0 if boxes[index, 1] > 1 else 2 if boxes[index, 3] >= boxes[index, 5] else 4
        half = int(boxes[index, axis + 1]) // 2
        if not half:
            break  # the block is a single cell
        given = boxes[index].copy()
        given[axis] += boxes[index, axis + 1] - half
        given[axis + 1] = half
        chunk = int(chunk_length(given[1], given[3], shape.inner, given[5], budget[newcomer]))
        if not chunk:
            continue  # too little memory
        profile, parts = profiles[newcomer : newcomer + 1], -(-shape.inner // chunk)
        ends = float(block_seconds(profile, given[1], given[3], shape.inner, given[5], None, parts)[0])
        ends += end_of.get(newcomer, 0.0)  # the newcomer may already have work, as a helper
        if last == newcomer or ends >= end_of[last]:
            continue
        boxes[index, axis + 1] -= half
        boxes, device = np.concatenate([boxes, given[None]]), np.append(device, newcomer)
        name = np.array([last])
        end_of[last] -= float(_busy_s(given[None], name, shape, profiles)[0]) / 2  # approximate: slabs are shared
        end_of[newcomer] = ends
    return made_plan(boxes, device, shape, profiles)
