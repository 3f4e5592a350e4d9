"""Small blocks for unknown devices, taken out of a plan that other devices could do alone.

A probe is part of the product. It is so small that a device as fast as a typical one finishes it in a fraction of the
product's time. If the device never answers, another can still do it before the product ends. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers, block_seconds, chunk_length, least_bytes, usable_bytes
from ps.planning.pipeline import chunks_of, fresh_slabs
from ps.planning.plans import Plan, Shape

PROBES_A_PLAN = 16  # devices that get a probe in the same product; the others get theirs in the next one
BRIEF = 1 / 16  # of the product's time, by the model of a typical device
PATIENCE = 0.5  # of the product's time; after this others compute the probe too, and until then it costs nothing


def with_probes(plan: Plan, shape: Shape, profiles: NDArray[np.void], devices: Sequence[int]) -> Plan:
    """The plan with one small block for each of these devices, as far as that is possible; `profiles`: by id, those of
    `devices` as they are believed. A probe is cut from the last block of a device, and no block is made to bring a slab
    that it would not bring otherwise."""
    tiles, owner = plan.tiles.copy(), plan.device.copy()
    # A latency is a claim, too, and a block may be out for as long. A device that is farther away than the product
    # takes could not contribute to it anyway.
    near = [d for d in devices if 2 * profiles["latency_s"][d] <= PATIENCE * plan.makespan_s]
    able = [d for d in near if usable_bytes(profiles[d : d + 1])[0] >= least_bytes(shape.inner)]
    probes: list[Integers] = []
    given: list[int] = []
    last = {device: position for position, device in enumerate(owner.tolist())}
    sides = tiles[:, 3] + tiles[:, 5]
    places = iter(sorted(last.values(), key=lambda position: int(sides[position])))  # small slabs first
    for device in able[:PROBES_A_PLAN]:
        for position in places:
            axis = _axis(tiles[position], plan.fresh[position])
            size = _size(tiles[position], axis, shape, profiles[device : device + 1], BRIEF * plan.makespan_s)
            if size:
                probe = tiles[position].copy()
                tiles[position, axis + 1] -= size
                probe[axis] += tiles[position, axis + 1]
                probe[axis + 1] = size
                probes.append(probe)
                given.append(device)
                break
    if not probes:
        return plan
    tiles, owner = np.concatenate([tiles, np.stack(probes)]), np.concatenate([owner, np.array(given, np.int64)])
    chunks = chunks_of(tiles, owner, shape, profiles)
    return Plan(tiles, owner, fresh_slabs(tiles, owner, chunks), plan.makespan_s, chunks)


def _axis(tile: Integers, fresh: NDArray[np.bool_]) -> int:
    """The axis along which it is cut, 2: rows, 4: columns; 0 if both of its slabs came with other blocks. A slab that
    it shares with others stays as it is."""
    if fresh.all():
        return 2 if tile[3] >= tile[5] else 4
    return 2 if fresh[0] else 4 if fresh[1] else 0


def _size(tile: Integers, axis: int, shape: Shape, profile: NDArray[np.void], within_s: float) -> int:
    """How many rows or columns of a block a device does within this time, at most a quarter of them. If even one takes
    longer: one, if that is done before others would compute it too; else 0."""
    length = int(tile[axis + 1]) if axis else 0
    if length < 2:
        return 0
    sizes = np.arange(1, max(1, length // 4) + 1)
    rows, columns = (sizes, int(tile[5])) if axis == 2 else (int(tile[3]), sizes)
    held = chunk_length(int(tile[1]), rows, shape.inner, columns, usable_bytes(profile)) > 0
    sizes = sizes[: int(np.count_nonzero(held))]  # everything smaller than the largest that fits also fits
    if not len(sizes):
        return 0
    rows, columns = (sizes, columns) if axis == 2 else (rows, sizes)
    seconds = block_seconds(profile, int(tile[1]), rows, shape.inner, columns) - 2 * profile["latency_s"]
    fit = int(np.searchsorted(seconds, within_s, side="right"))
    if fit:
        return int(sizes[fit - 1])
    return int(seconds[0] <= within_s * PATIENCE / BRIEF)
