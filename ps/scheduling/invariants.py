"""What must always be true of a dispatcher. For tests and simulations: it inspects everything, and is slow."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ps.scheduling.newcomers import RATES
from ps.scheduling.state import CUT, IN_FLIGHT, PENDING, Device, Job, Key

if TYPE_CHECKING:
    from ps.scheduling.dispatcher import Dispatcher


ROUNDING_S = 1e-9  # for sums of modelled seconds, added and subtracted in different orders


class InvariantBroken(AssertionError):
    """The dispatcher contradicts itself; the message says how."""


def check(of: Dispatcher) -> None:
    where: dict[Key, list[str]] = {}
    for index, record in enumerate(of._state.devices):
        for key in record.in_flight:
            where.setdefault(key, []).append(f"in flight on {index}")
        for key in (*record.critical, *record.deferred):
            where.setdefault(key, []).append(f"queued at {index}")
        _check_device(of, index, record)
    _check_standing(of)
    unwatched = [key for record in of._state.devices for key in record.in_flight if not of._state.jobs[key[0]].firm]
    if unwatched and of._deadlines.next_s == float("inf"):
        raise InvariantBroken(f"blocks {unwatched[:5]} are in flight, and nothing will ever be overdue")
    for job_id, job in of._state.jobs.items():
        _check_job(of, job_id, job, where)
    for job_id, block in of._stragglers.copies:
        if job_id not in of._state.jobs or of._state.jobs[job_id].state[block] != IN_FLIGHT:
            raise InvariantBroken(f"job {job_id} block {block} has a speculative copy and is not in flight")
    if where:
        raise InvariantBroken(f"blocks of jobs that are over: {where}")
    _check_losses(of)


def _check_device(of: Dispatcher, index: int, record: Device) -> None:
    """What it holds is what is counted, within its credit and its memory."""
    jobs = of._state.jobs
    if gone := {job for job, _ in (*record.in_flight, *record.critical, *record.deferred)} - set(jobs):
        raise InvariantBroken(f"device {index} has blocks of jobs that are over: {sorted(gone)}")
    held = sum(jobs[j].size_bytes[b] for j, b in record.in_flight)
    if held != record.in_flight_bytes or len(record.in_flight) > record.credit_blocks:
        raise InvariantBroken(f"device {index} holds {len(record.in_flight)} blocks, {held} bytes: {record}")
    if held + record.kept_bytes > record.memory_bytes:
        raise InvariantBroken(f"device {index} holds more than its {record.memory_bytes} bytes: {record}")
    slabs = of._assignments.slabs
    kept = [s.row_bytes * int((s.high[index] - s.low[index]).sum()) for s in slabs.of.values()] if record.alive else []
    if sum(kept) != record.kept_bytes:
        raise InvariantBroken(f"device {index} keeps {sum(kept)} bytes of slabs: {record}")
    if len(record.critical) + len(record.deferred) != of._state.waiting[index]:
        raise InvariantBroken(f"device {index}: {of._state.waiting[index]} waiting counted, {record}")
    fed = record.in_flight or index in of._standing.suspects
    if not fed and (record.critical or record.deferred):
        raise InvariantBroken(f"device {index} has nothing in flight, so nothing will send what is queued: {record}")
    if not record.alive and not record.idle:
        raise InvariantBroken(f"device {index} left and still has work: {record}")


def _check_job(of: Dispatcher, job_id: int, job: Job, where: dict[Key, list[str]]) -> None:
    """Its blocks tile its output, and each is where its state says; they are taken out of `where`."""
    if job_id in of._state.held:
        if job.state or not (of._state.ahead or of._state.more):
            raise InvariantBroken(f"job {job_id} is held, and has blocks, or nothing is to come")
        return
    cover = np.zeros((job.shape.batch, job.shape.rows, job.shape.columns), np.int8)
    orphans = [orphan.box[0] for orphan in of._state.orphans if orphan.job == job_id]
    counts = [of._stragglers.copies.block_of((job_id, b)) is None for b in range(len(job.state))]
    live = [job.boxes[b] for b in range(len(job.state)) if job.state[b] != CUT and counts[b]]
    for b, bs, r, rs, c, cs in (*live, *orphans):
        cover[b : b + bs, r : r + rs, c : c + cs] += 1
    if (cover != 1).any():
        raise InvariantBroken(f"job {job_id}: {int((cover != 1).sum())} cells not covered exactly once")
    for block, state in enumerate(job.state):
        places = where.pop((job_id, block), [])
        expected = {PENDING: f"queued at {job.device[block]}", IN_FLIGHT: f"in flight on {job.device[block]}"}
        if places != ([expected[state]] if state in expected else []):
            raise InvariantBroken(f"job {job_id} block {block} in state {state} is {places}")
    under_way = sum(state in (PENDING, IN_FLIGHT) and own for state, own in zip(job.state, counts, strict=True))
    if job.open != under_way:
        raise InvariantBroken(f"job {job_id}: {job.open} blocks counted open, {under_way} found")


def _check_losses(of: Dispatcher) -> None:
    repairs = Counter(orphan.loss for orphan in of._state.orphans if orphan.loss)
    for job in of._state.jobs.values():
        repairs.update(x for x, state in zip(job.loss, job.state, strict=True) if x and state in (PENDING, IN_FLIGHT))
    if repairs != of._state.losses:
        raise InvariantBroken(f"losses that are being repaired: counted {of._state.losses}, found {dict(repairs)}")


def _check_standing(of: Dispatcher) -> None:
    """Every living device takes work, or is a suspect, or has yet to prove that it answers. Nothing is kept of departed
    devices, and no device is believed more than it claims."""
    standing = [*of._standing.able.tolist(), *of._standing.suspects, *of._standing.unproven]
    living = [index for index, record in enumerate(of._state.devices) if record.alive]
    if sorted(standing) != living:
        suspects, unproven = list(of._standing.suspects), list(of._standing.unproven)
        raise InvariantBroken(
            f"{living} live; able: {of._standing.able.tolist()}, suspects: {suspects}, unproven: {unproven}"
        )
    kept = {
        *of._standing.strikes,
        *of._beliefs.newcomers.beliefs,
        *of._beliefs.slowness.factor,
        *of._stragglers._named,
        *of._standing.overtaken,
        *of._beliefs.new,
    }
    if gone := kept - set(living):
        raise InvariantBroken(f"devices {sorted(gone)} are gone, and something is kept of them")
    for rate in RATES:
        if (more := of._beliefs.profiles[rate] > np.maximum(1.0, of._beliefs.claims[rate])).any():
            raise InvariantBroken(f"devices {np.flatnonzero(more).tolist()} are believed more {rate} than they claim")


def left_behind(of: Dispatcher) -> str:
    """What a dispatcher still holds of jobs and kept slabs; empty once all are over and forgotten."""
    state = of._state
    late = {
        index: record.waiting
        for index, record in enumerate(state.devices)
        if record.idle
        and max(map(abs, (record.waiting.down_s, record.waiting.compute_s, record.waiting.up_s))) > ROUNDING_S
    }
    rest: dict[str, object] = {
        "jobs": list(state.jobs),
        "busy": {i: repr(d) for i, d in enumerate(state.devices) if not d.idle or d.kept_bytes},
        "backlog": late,
        "deferred": list(of._assignments.teams._of),
        "held for deferred": of._assignments.teams.busy.tolist(),
        "orphans": state.orphans,
        "held": state.held,
        "waiting": int(state.waiting.sum()),
        "losses": state.losses,
        "suspects": [device for device in of._standing.suspects if not state.devices[device].alive],
    }
    return ", ".join(f"{name} {value}" for name, value in rest.items() if value)
