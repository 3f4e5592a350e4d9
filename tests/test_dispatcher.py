"""Promises of ps.dispatcher: whatever devices do, every cell is accepted exactly once and every job ends.

Most of this is a simulation: a world of devices that join, leave, answer late, twice, wrongly or not at all, driven by
a seed (it stands in the test's name). The world keeps its own books and believes nothing that the dispatcher says.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.profile import Profile, pack_profiles
from ps.dispatcher import (
    CUT,
    DONE,
    IN_FLIGHT,
    PENDING,
    REFUSALS_ALLOWED,
    AcceptBlocks,
    BlocksFailed,
    BlocksReturned,
    DevicesJoined,
    DevicesLeft,
    Dispatcher,
    Event,
    Instruction,
    InvariantBroken,
    JobFinished,
    JobSubmitted,
    JobWaits,
    SendBlocks,
    SuspendDevice,
)
from ps.planner import Plan, Shape, plan

Key = tuple[int, int]  # job, block
Answer = tuple[int, int, int]  # device, job, block

HUGE = 1 << 40
COMMON = Profile(
    flops=1e9, overhead_s=1e-4, down_bps=1e7, up_bps=1e7, latency_s=0.01, memory_bytes=HUGE, credit_blocks=2
)


def one_cell_bytes(shape: Shape) -> int:
    return 4 * (2 * shape.inner + 1)


def columns(answers: Iterable[Answer]) -> tuple[list[int], list[int], list[int]]:
    rows = list(answers)
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


class World:
    """Devices and jobs around a dispatcher, with books of its own."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(plan)
        self.profiles: list[Profile] = []
        self.alive: set[int] = set()
        self.suspended: set[int] = set()
        self.shapes: dict[int, Shape] = {}  # jobs under way
        self.urgent: dict[int, bool] = {}
        self.finished: list[int] = []
        self.accepted: dict[int, NDArray[np.int64]] = {}  # how often each cell of each job was accepted
        self.flying: defaultdict[int, dict[Key, list[int]]] = defaultdict(dict)  # device -> key -> tile
        self.past: list[Answer] = []  # answers that must not count any more
        self.log: list[Instruction] = []

    # ---- events

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case DevicesLeft(devices=devices):
                for device in devices:
                    self._forget(device)
            case BlocksFailed():
                for device, job, block in zip(event.devices, event.jobs, event.blocks, strict=True):
                    if self.flying[device].pop((job, block), None) is not None:
                        self.past.append((device, job, block))
        queued_before = self._queued_urgent()
        instructions = self.dispatcher.handle(event)
        self.log += instructions
        self.dispatcher.check()
        for instruction in instructions:
            self._obey(event, instruction)
        self._no_background_before_urgent(queued_before, instructions)
        self._nothing_waits_in_vain()
        return instructions

    def join(self, *profiles: Profile) -> list[Instruction]:
        first = len(self.profiles)
        self.profiles += profiles
        self.alive |= set(range(first, len(self.profiles)))
        return self.handle(DevicesJoined(first, pack_profiles(profiles)))

    def leave(self, *devices: int) -> list[Instruction]:
        return self.handle(DevicesLeft(list(devices)))

    def submit(self, shape: Shape, *, urgent: bool = True, given: Plan | None = None) -> list[Instruction]:
        job = len(self.accepted)
        self.shapes[job], self.urgent[job] = shape, urgent
        self.accepted[job] = np.zeros((shape.batch, shape.rows, shape.columns), np.int64)
        return self.handle(JobSubmitted(job, shape, urgent, given))

    def answer(self, *answers: Answer) -> list[Instruction]:
        return self.handle(BlocksReturned(*columns(answers)))

    def fail(self, *answers: Answer) -> list[Instruction]:
        return self.handle(BlocksFailed(*columns(answers)))

    # ---- the world's own books

    def in_flight(self) -> list[Answer]:
        return [(device, job, block) for device, blocks in sorted(self.flying.items()) for job, block in blocks]

    def _forget(self, device: int) -> None:
        self.alive.discard(device)
        self.past += [(device, job, block) for job, block in self.flying.pop(device, {})]

    def _obey(self, event: Event, instruction: Instruction) -> None:
        match instruction:
            case AcceptBlocks(positions=positions):
                assert isinstance(event, BlocksReturned), "only answers can be accepted"
                assert len(set(positions)) == len(positions)
                for position in positions:
                    device, job, block = event.devices[position], event.jobs[position], event.blocks[position]
                    b, bs, r, rs, c, cs = self.flying[device].pop((job, block))  # it was sent and not yet answered
                    self.accepted[job][b : b + bs, r : r + rs, c : c + cs] += 1
                    assert self.accepted[job].max() == 1, f"a cell of job {job} was accepted twice"
                    self.past.append((device, job, block))
            case SendBlocks():
                for device, job, block in zip(instruction.devices, instruction.jobs, instruction.blocks, strict=True):
                    assert device in self.alive, f"device {device} is not there and was sent a block"
                    assert (job, block) not in self.flying[device], "sent twice"
                    self.flying[device][job, block] = self.dispatcher.jobs[job].tiles[block].tolist()
                    self._within_credit(device)
            case JobFinished(job=job):
                assert (self.accepted[job] == 1).all(), f"job {job} ended without some of its cells"
                del self.shapes[job]
                self.finished.append(job)
            case SuspendDevice(device=device):
                self._forget(device)
                self.suspended.add(device)

    def _within_credit(self, device: int) -> None:
        profile, held = self.profiles[device], 0
        for (job, _), (_, bs, _, rs, _, cs) in self.flying[device].items():
            held += 4 * bs * ((rs + cs) * self.shapes[job].inner + rs * cs)
        assert held <= profile.memory_bytes, f"device {device} was sent more bytes than it can hold"
        assert len(self.flying[device]) <= profile.credit_blocks, (
            f"device {device} was sent more blocks than its credit"
        )

    def _queued_urgent(self) -> dict[int, set[Key]]:
        return {index: set(record.urgent) for index, record in enumerate(self.dispatcher.devices)}

    def _no_background_before_urgent(self, before: dict[int, set[Key]], instructions: list[Instruction]) -> None:
        """A device that has urgent blocks waiting all along is sent no background block."""
        after = self._queued_urgent()
        for instruction in instructions:
            if isinstance(instruction, SendBlocks):
                for device, job in zip(instruction.devices, instruction.jobs, strict=True):
                    if not self.urgent[job]:
                        assert not before.get(device, set()) & after[device], (
                            f"device {device}: background job {job} first"
                        )

    def _nothing_waits_in_vain(self) -> None:
        """Whatever cell is not accepted yet is on its way or queued, as long as one able device lives."""
        for job, shape in self.shapes.items():
            if any(self.profiles[d].memory_bytes >= one_cell_bytes(shape) for d in self.alive):
                cover = self.accepted[job].copy()
                record = self.dispatcher.jobs[job]
                for (b, bs, r, rs, c, cs), state in zip(record.tiles.tolist(), record.state, strict=True):
                    if state in (PENDING, IN_FLIGHT):
                        cover[b : b + bs, r : r + rs, c : c + cs] += 1
                assert (cover == 1).all(), f"job {job} waits although an able device lives"

    def finish_everything(self, rng: random.Random | None = None) -> None:
        while self.shapes:
            flying = self.in_flight()
            assert flying, f"jobs {list(self.shapes)} are stuck"
            self.answer(*(rng.sample(flying, min(4, len(flying))) if rng else flying[:1]))


# ---- the simulation


def random_profile(rng: random.Random) -> Profile:
    return Profile(
        flops=10 ** rng.uniform(6, 12),
        overhead_s=rng.choice([0.0, 1e-3]),
        down_bps=10 ** rng.uniform(4, 9),
        up_bps=10 ** rng.uniform(4, 9),
        latency_s=rng.choice([0.0, 0.05]),
        memory_bytes=rng.choice([8, 60, 200, 2000, HUGE]),
        credit_blocks=rng.choice([1, 1, 2, 4]),
    )


def random_shape(rng: random.Random) -> Shape:
    return Shape(rng.choice([1, 1, 1, 3]), rng.randint(1, 9), rng.randint(1, 6), rng.randint(1, 9))


def random_answers(world: World, rng: random.Random) -> list[Answer]:
    """Some that are due, in any order, and among them duplicates, late ones, and ones that nobody asked for."""
    flying = world.in_flight()
    answers = rng.sample(flying, rng.randint(0, min(len(flying), 6)))
    if answers and rng.random() < 0.3:
        answers.append(rng.choice(answers))
    answers += rng.choices(world.past, k=rng.randint(0, 2)) if world.past else []
    if rng.random() < 0.3:
        answers.append((rng.randint(-2, len(world.profiles) + 1), rng.randint(-1, 9), rng.randint(-1, 9)))
    if flying and rng.random() < 0.2:  # a block that is under way, on another device than it says
        answers.append((rng.randint(0, len(world.profiles) - 1), *rng.choice(flying)[1:]))
    rng.shuffle(answers)
    return answers


SEEDS = range(25)


@cache
def life(seed: int) -> World:
    return live(seed)


def live(seed: int, events: int = 80) -> World:
    """A life of so many events, after which all jobs are brought to their end."""
    rng, world = random.Random(seed), World()
    failures = rng.choice([0, 1, 6])
    if rng.random() < 0.7:
        world.join(*(random_profile(rng) for _ in range(rng.randint(1, 8))))
    for _ in range(events):
        match rng.choices(["join", "leave", "submit", "answer", "fail"], [1, 1, 3, 12, failures])[0]:
            case "join":
                world.join(*(random_profile(rng) for _ in range(rng.randint(1, 4))))
            case "leave" if world.profiles:
                world.leave(*rng.sample(range(len(world.profiles)), rng.randint(1, min(2, len(world.profiles)))))
            case "submit" if len(world.shapes) < 5:
                world.submit(random_shape(rng), urgent=rng.random() < 0.5)
            case "answer":
                world.answer(*random_answers(world, rng))
            case "fail":
                world.fail(*random_answers(world, rng))
    if not any(world.profiles[d].memory_bytes == HUGE for d in world.alive):
        world.join(COMMON)
    world.finish_everything(rng)
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_every_cell_is_accepted_once_and_every_job_ends_whatever_devices_do(seed: int) -> None:
    world = life(seed)
    assert len(world.finished) == len(set(world.finished)) == len(world.accepted)
    assert all((cells == 1).all() for cells in world.accepted.values())


def test_the_simulation_goes_everywhere() -> None:
    """Otherwise it would prove nothing."""
    worlds = [life(seed) for seed in SEEDS]
    seen = Counter(type(instruction) for world in worlds for instruction in world.log)
    assert set(seen) == {SendBlocks, AcceptBlocks, JobFinished, JobWaits, SuspendDevice}
    assert sum(world.dispatcher.stale for world in worlds) > 100
    assert sum(len(world.suspended) for world in worlds) > 2
    assert sum(len(world.finished) for world in worlds) > 100


def test_the_same_events_give_the_same_instructions() -> None:
    assert live(seed=3).log == live(seed=3).log


# ---- answers that do not count


def quarters() -> Plan:
    """For a product of 64 rows and 64 columns: 16 rows for each of the first four devices."""
    tiles = np.array([[0, 1, 16 * i, 16, 0, 64] for i in range(4)])
    return Plan(tiles, device=np.arange(4), makespan_s=1.0, count=4)


def busy_world() -> World:
    """Four devices of credit 2, and four jobs of a quarter each: every device has two blocks, and two in its queue."""
    world = World()
    world.join(*[COMMON] * 4)
    for _ in range(4):
        world.submit(Shape(1, 64, 64, 64), given=quarters())
    assert [len(world.flying[device]) for device in range(4)] == [2] * 4
    assert [len(record.urgent) for record in world.dispatcher.devices] == [2] * 4
    return world


def state_of(dispatcher: Dispatcher) -> str:
    known = {name: value for name, value in vars(dispatcher).items() if name not in ("stale", "_planner")}
    return repr(known)


@pytest.mark.parametrize("as_failure", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: w.past[0],
        lambda w: ((w.in_flight()[0][0] + 1) % 4, *w.in_flight()[0][1:]),
        lambda w: (0, 0, 10_000),
        lambda w: (0, 10_000, 0),
        lambda w: (10_000, 0, 0),
        lambda w: (-1, 0, 0),
        lambda w: (0, *w.dispatcher.devices[0].urgent[0]),
    ],
    ids=["duplicate", "other device", "no such block", "no such job", "no such device", "negative", "not sent yet"],
)
def test_an_answer_that_is_not_due_changes_nothing(wrong: Callable[[World], Answer], as_failure: bool) -> None:
    world = busy_world()
    world.answer(world.in_flight()[0])
    before, stale = state_of(world.dispatcher), world.dispatcher.stale
    assert (world.fail if as_failure else world.answer)(wrong(world)) == []
    assert state_of(world.dispatcher) == before
    assert world.dispatcher.stale == stale + 1


def test_the_late_answer_of_a_lost_device_changes_nothing() -> None:
    world = busy_world()
    late = [answer for answer in world.in_flight() if answer[0] == 2]
    world.leave(2)
    before = state_of(world.dispatcher)
    assert late
    assert world.answer(*late) == []
    assert state_of(world.dispatcher) == before


def test_of_two_equal_answers_in_one_message_one_counts() -> None:
    world = busy_world()
    answer = world.in_flight()[0]
    instructions = world.answer(answer, answer)
    assert instructions[0] == AcceptBlocks([0])


# ---- loss, failure, suspension


def test_only_the_blocks_of_a_lost_device_are_cut_again() -> None:
    world = busy_world()
    others = {answer for answer in world.in_flight() if answer[0] != 1}
    world.leave(1)
    cut = {
        (job, b)
        for job, record in world.dispatcher.jobs.items()
        for b, state in enumerate(record.state)
        if state == CUT
    }
    assert cut == {(job, 1) for job in range(4)}
    assert others <= set(world.in_flight())


def test_a_device_that_left_twice_left_once() -> None:
    world = busy_world()
    world.leave(1, 1)
    assert world.leave(1) == []
    world.finish_everything()


def test_a_device_that_keeps_failing_is_suspended_and_gets_nothing_more() -> None:
    world = busy_world()
    suspensions = []
    while 0 not in world.suspended:
        answer = next(a for a in world.in_flight() if a[0] == 0)
        suspensions = [i for i in world.fail(answer) if isinstance(i, SuspendDevice)]
    assert suspensions == [SuspendDevice(0, f"it failed {REFUSALS_ALLOWED + 1} blocks")]
    world.submit(Shape(1, 64, 64, 64))
    world.finish_everything()
    assert not world.flying[0]


def test_a_device_that_fails_many_blocks_at_once_gets_none_of_them_back() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=REFUSALS_ALLOWED + 1))
    for _ in range(REFUSALS_ALLOWED + 1):
        world.submit(Shape(1, 8, 8, 8))
    failing = world.in_flight()
    assert len(failing) == REFUSALS_ALLOWED + 1
    instructions = world.fail(*failing)  # the world refuses blocks for a device that is not there
    assert SuspendDevice(0, f"it failed {REFUSALS_ALLOWED + 1} blocks") in instructions
    assert not any(isinstance(i, SendBlocks) for i in instructions)


def test_a_failed_block_goes_to_another_device() -> None:
    world = World()
    world.join(COMMON)
    world.submit(Shape(1, 8, 8, 8))
    (answer,) = world.in_flight()
    world.join(COMMON)
    world.fail(answer)
    assert {device for device, _, _ in world.in_flight()} == {1}


def test_a_failed_block_goes_back_when_no_other_device_is_able() -> None:
    """A job ends as long as one able device lives, and a device that failed once is still able."""
    world, shape = World(), Shape(1, 8, 8, 8)
    world.join(COMMON, replace(COMMON, memory_bytes=one_cell_bytes(shape) - 1))
    world.submit(shape)
    instructions = world.fail(*world.in_flight())
    assert not any(isinstance(i, JobWaits) for i in instructions)
    world.finish_everything()


def test_a_lost_block_finds_the_one_able_device_among_many_idle_ones() -> None:
    """The least busy devices are the ones that can do nothing."""
    world, shape = World(), Shape(1, 64, 64, 64)
    unable = replace(COMMON, memory_bytes=one_cell_bytes(shape) - 1)
    world.join(*[COMMON] * 4, *[unable] * 200)
    world.submit(shape, given=quarters())
    instructions = world.leave(0, 1, 2)
    assert not any(isinstance(i, JobWaits) for i in instructions)
    world.finish_everything()


# ---- waiting for devices


def test_a_job_without_a_device_waits_and_a_joiner_resumes_it() -> None:
    world = World()
    (waits,) = world.submit(Shape(1, 8, 8, 8))
    assert isinstance(waits, JobWaits)
    assert waits.job == 0
    assert waits.reason
    assert any(isinstance(i, SendBlocks) for i in world.join(COMMON))
    world.finish_everything()
    assert world.finished == [0]


def test_a_job_that_no_device_can_hold_says_so_and_waits_for_one_that_can() -> None:
    world, shape = World(), Shape(1, 8, 8, 8)
    small = replace(COMMON, memory_bytes=one_cell_bytes(shape) - 1)
    world.join(small)
    (waits,) = world.submit(shape)
    assert isinstance(waits, JobWaits)
    assert f"{one_cell_bytes(shape)} bytes" in waits.reason
    assert [type(i) for i in world.join(small)] == [JobWaits]
    world.join(COMMON)
    world.finish_everything()


def test_a_job_whose_last_device_left_is_resumed_where_it_stood() -> None:
    world = World()
    world.join(*[COMMON] * 3)
    world.submit(Shape(1, 64, 256, 64))
    world.answer(world.in_flight()[0])
    done = int(world.accepted[0].sum())
    instructions = world.leave(0, 1, 2)
    assert {type(i) for i in instructions} == {JobWaits}
    world.join(COMMON)
    world.finish_everything()
    assert 0 < done < world.accepted[0].size


def test_a_newcomer_takes_waiting_work_at_once() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1, latency_s=0.0))
    for _ in range(3):
        world.submit(Shape(1, 32, 32, 32))
    (sent,) = world.join(replace(COMMON, latency_s=0.0))
    assert isinstance(sent, SendBlocks)
    assert set(sent.devices) == {1}


def test_a_newcomer_that_would_be_slower_takes_nothing() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    for _ in range(3):
        world.submit(Shape(1, 32, 32, 32))
    assert world.join(replace(COMMON, up_bps=1.0)) == []


# ---- urgent before background


def one_block_jobs(world: World, *urgencies: bool) -> None:
    for urgent in urgencies:
        world.submit(Shape(1, 8, 8, 8), urgent=urgent)


def order_of(world: World) -> list[int]:
    """The jobs in the order in which a device of credit 1 gets them."""
    order = []
    while flying := world.in_flight():
        ((_, job, _),) = flying
        order.append(job)
        world.answer(*flying)
    return order


def test_urgent_jobs_go_before_background_ones_on_the_same_device() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    one_block_jobs(world, True, False, True, False, True)
    assert order_of(world) == [0, 2, 4, 1, 3]


def test_urgent_jobs_go_first_after_their_device_was_lost() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    one_block_jobs(world, False, False, True)  # the first is under way already
    world.leave(0)
    world.join(replace(COMMON, credit_blocks=1))
    assert order_of(world) == [2, 0, 1]


def test_urgent_jobs_go_first_when_they_move_to_a_survivor() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    one_block_jobs(world, False, True)
    world.join(replace(COMMON, credit_blocks=1, up_bps=1.0))  # too slow to take anything while the other one lives
    world.leave(0)
    assert order_of(world) == [1, 0]


# ---- what the caller must not do


def test_a_job_cannot_be_submitted_twice() -> None:
    world = busy_world()
    with pytest.raises(ValueError, match="job 0 was submitted twice"):
        world.dispatcher.handle(JobSubmitted(0, Shape(1, 1, 1, 1), urgent=True))


def test_an_id_cannot_be_used_twice() -> None:
    world = busy_world()
    with pytest.raises(ValueError, match="got 3, expected 4"):
        world.dispatcher.handle(DevicesJoined(3, pack_profiles([COMMON])))


def test_a_given_plan_is_used_as_it_is() -> None:
    world = World()
    world.join(*[COMMON] * 3)
    given = Plan(np.array([[0, 1, 0, 4, 0, 3], [0, 1, 0, 4, 3, 5]]), np.array([2, 0]), 1.0, 2)
    assert world.submit(Shape(1, 4, 7, 8), given=given) == [SendBlocks([2, 0], [0, 0], [0, 1])]
    world.finish_everything()


def test_a_given_plan_that_its_devices_cannot_hold_is_refused() -> None:
    world, shape = World(), Shape(1, 4, 7, 8)
    world.join(replace(COMMON, memory_bytes=one_cell_bytes(shape)))
    given = Plan(np.array([[0, 1, 0, 4, 0, 8]]), np.array([0]), 1.0, 1)
    with pytest.raises(ValueError, match="a block that it cannot hold"):
        world.dispatcher.handle(JobSubmitted(0, shape, urgent=True, plan=given))


# ---- check() itself


def flying_key(d: Dispatcher, device: int = 0) -> Key:
    return sorted(d.devices[device].in_flight)[0]


def _stretch(d: Dispatcher) -> None:
    d.jobs[0].tiles[0, 3] += 1


def _shrink(d: Dispatcher) -> None:
    d.jobs[0].tiles[0, 3] -= 1


def _cut_for_nothing(d: Dispatcher) -> None:
    d.jobs[0].state[0] = CUT


def _in_flight_twice(d: Dispatcher) -> None:
    job, block = flying_key(d)
    d.devices[1].credit_blocks += 1
    d.devices[1].in_flight.add((job, block))
    d.devices[1].in_flight_bytes += d.jobs[job].size_bytes[block]


def _queued_and_in_flight(d: Dispatcher) -> None:
    d.devices[1].urgent.append(flying_key(d))
    d._waiting[1] += 1


def _queued_twice(d: Dispatcher) -> None:
    d.devices[0].urgent.append(d.devices[0].urgent[0])
    d._waiting[0] += 1


def _done_and_in_flight(d: Dispatcher) -> None:
    job, block = flying_key(d)
    d.jobs[job].state[block] = DONE


def _nowhere(d: Dispatcher) -> None:
    d.devices[0].urgent.popleft()
    d._waiting[0] -= 1


def _wrong_owner(d: Dispatcher) -> None:
    job, block = flying_key(d)
    d.jobs[job].device[block] = 1


def _bytes_miscounted(d: Dispatcher) -> None:
    d.devices[0].in_flight_bytes -= 1


def _too_many_blocks(d: Dispatcher) -> None:
    d.devices[0].credit_blocks = 1


def _too_many_bytes(d: Dispatcher) -> None:
    d.devices[0].memory_bytes = d.devices[0].in_flight_bytes - 1


def _queue_miscounted(d: Dispatcher) -> None:
    d._waiting[0] += 1


def _dead_with_work(d: Dispatcher) -> None:
    d.devices[0].alive = False


def _job_forgotten_in_flight(d: Dispatcher) -> None:
    del d.jobs[flying_key(d)[0]]


def _job_forgotten_in_queues(d: Dispatcher) -> None:
    del d.jobs[d.devices[0].urgent[-1][0]]


@pytest.mark.parametrize(
    "corrupt",
    [
        _stretch,
        _shrink,
        _cut_for_nothing,
        _in_flight_twice,
        _queued_and_in_flight,
        _queued_twice,
        _done_and_in_flight,
        _nowhere,
        _wrong_owner,
        _bytes_miscounted,
        _too_many_blocks,
        _too_many_bytes,
        _queue_miscounted,
        _dead_with_work,
        _job_forgotten_in_flight,
        _job_forgotten_in_queues,
    ],
    ids=lambda corrupt: corrupt.__name__.strip("_"),
)
def test_check_notices_a_corrupted_state(corrupt: Callable[[Dispatcher], Any]) -> None:
    world = busy_world()
    corrupt(world.dispatcher)
    with pytest.raises(InvariantBroken):
        world.dispatcher.check()
