"""Small blocks for unknown devices, cut from a plan that other devices could carry out alone.

A trial block is part of the product. It is so small that a typical device finishes it in a fraction of the product's
time. If the device never answers, another can still compute it before the product ends. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.cost import Integers, block_seconds, chunk_length, least_bytes, usable_bytes
from ps.planning.pipeline import fresh_slabs
from ps.planning.plans import Plan, Shape


def with_trial_blocks(plan: Plan, shape: Shape, profiles: NDArray[np.void], devices: Sequence[int]) -> Plan:
    """The plan with one small block for each of these devices, as far as possible. `profiles`: by id, those of
    `devices` as currently believed. A trial block is cut from the last block of a device, and no block brings a slab
    that it would not bring otherwise."""
    boxes, owner = plan.boxes.copy(), plan.device.copy()
    # A latency is also a claim, and a block may be out for that long. A device whose latency exceeds the time of the
    # product could not contribute anyway.
    near = 2 * profiles["latency_s"] <= settings.NOW.trial_patience * plan.makespan_s
    able = near & (usable_bytes(profiles) >= least_bytes(shape.inner))
    within_s = plan.makespan_s / settings.NOW.trials
    trials: list[Integers] = []
    given: list[int] = []
    last = {device: position for position, device in enumerate(owner.tolist())}
    sides = boxes[:, 3] + boxes[:, 5]
    places = iter(sorted(last.values(), key=lambda position: int(sides[position])))  # small slabs first
    for device in [device for device in devices if able[device]][: settings.NOW.trials]:
        for position in places:
            axis = _axis(boxes[position], plan.fresh[position])
            size = _size(boxes[position], axis, shape, profiles[device : device + 1], within_s)
            if size:
                trial = boxes[position].copy()
                boxes[position, axis + 1] -= size
                trial[axis] += boxes[position, axis + 1]
                trial[axis + 1] = size
                trials.append(trial)
                given.append(device)
                break
    if not trials:
        return plan
    boxes, owner = np.concatenate([boxes, np.stack(trials)]), np.concatenate([owner, np.array(given, np.int64)])
    return Plan(boxes, owner, fresh_slabs(boxes, owner, shape, profiles), plan.makespan_s)


def _axis(box: Integers, fresh: NDArray[np.bool_]) -> int:
    """The axis along which a block is cut, 2: rows, 4: columns; 0 if both of its slabs came with other blocks. A slab
    that it shares with other blocks stays whole."""
    if fresh.all():
        return 2 if box[3] >= box[5] else 4
    return 2 if fresh[0] else 4 if fresh[1] else 0


def _size(box: Integers, axis: int, shape: Shape, profile: NDArray[np.void], within_s: float) -> int:
    """How many rows or columns of a block a device computes within this time, at most a quarter of them. If even one
    takes longer: one, if it ends before others would compute it too; otherwise 0."""
    length = int(box[axis + 1]) if axis else 0
    if length < 2:
        return 0
    sizes = np.arange(1, max(1, length // 4) + 1)
    rows, columns = (sizes, int(box[5])) if axis == 2 else (int(box[3]), sizes)
    held = chunk_length(int(box[1]), rows, shape.inner, columns, usable_bytes(profile)) > 0
    sizes = sizes[: int(np.count_nonzero(held))]  # everything smaller than the largest that fits also fits
    if not len(sizes):
        return 0
    rows, columns = (sizes, columns) if axis == 2 else (rows, sizes)
    seconds = block_seconds(profile, int(box[1]), rows, shape.inner, columns) - 2 * profile["latency_s"]
    fit = int(np.searchsorted(seconds, within_s, side="right"))
    if fit:
        return int(sizes[fit - 1])
    return int(seconds[0] <= within_s * settings.NOW.trial_patience * settings.NOW.trials)
