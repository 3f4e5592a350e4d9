"""Promises of ps.scheduling.dispatcher: whatever devices do, every cell is accepted exactly once and every job ends.

Most of this is a simulation: a world of devices that join, leave, answer late, twice, wrongly or not at all, driven by
a seed (it is in the test's name). The world keeps its own records and trusts nothing that the dispatcher says.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from ps.planning.cost import block_bytes, chunk_length, least_bytes
from ps.planning.planner import Planner, Question
from ps.planning.plans import Plan, Request, Shape
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    AcceptBlocks,
    BlocksFailed,
    BlocksLost,
    BlocksRecovered,
    BlocksReturned,
    Box,
    CancelBlocks,
    CheckJob,
    DevicesJoined,
    DevicesLeft,
    Event,
    Instruction,
    JobChecked,
    JobFinished,
    JobsSubmitted,
    JobWaits,
    NameStragglers,
    OperandsForgotten,
    SendBlocks,
    Submission,
    SuspendDevice,
)
from ps.scheduling.invariants import InvariantBroken
from ps.scheduling.settings import NOW
from ps.scheduling.shell import Shell
from ps.scheduling.state import CUT, DONE, IN_FLIGHT, PENDING, Job

Key = tuple[int, int]  # job, block
Answer = tuple[int, int, int]  # device, job, block
Kind = TypeVar("Kind")  # of instructions
Kept = tuple[int | None, int | None]  # operands whose slabs may be kept, left and right

HUGE = 1 << 40


class Sent(NamedTuple):
    """One block of a SendBlocks."""

    device: int
    job: int
    block: int
    box: Box
    inner: int
    chunk: int
    down_bytes: int
    kept: int


COMMON = Profile(
    flops=1e9, overhead_s=1e-4, down_bps=1e7, up_bps=1e7, latency_s=0.01, memory_bytes=HUGE, credit_blocks=2
)


def sends(instruction: SendBlocks) -> Iterator[Sent]:
    """The blocks one by one."""
    return map(Sent._make, zip(*instruction.columns, strict=True))


def one_cell_bytes(shape: Shape) -> int:
    """Memory that a device must lend to be useful: half of it is for blocks."""
    return 2 * least_bytes(shape.inner)


def columns(answers: Iterable[Answer]) -> tuple[list[int], list[int], list[int]]:
    rows = list(answers)
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


def only(kind: type[Kind], instructions: Sequence[Instruction]) -> list[Kind]:
    """The instructions of this kind, in order."""
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def plan_of(boxes: Sequence[tuple[int, ...]], devices: list[int], fresh: list[tuple[int, int]] | None = None) -> Plan:
    new = np.ones((len(boxes), 2), bool) if fresh is None else np.array(fresh, bool)
    return Plan(boxes=np.array(boxes), device=np.array(devices), fresh=new, makespan_s=1.0)


Range = tuple[int, int, int, int]  # batch from, to; outer from, to


@dataclass
class Charges:
    """What each device was charged for, so that every missing charge can be explained."""

    paid: defaultdict[tuple[Any, ...], dict[Key, Range]] = field(default_factory=lambda: defaultdict(dict))
    lives: Counter[int] = field(default_factory=Counter)  # how often an operand was forgotten
    saved: int = 0  # slabs that were not charged

    def add(self, blocks: list[tuple[int, Job, int]]) -> None:
        """New blocks, in any order. Every slab missing in their charges was charged to the same device with another
        block, of the same job or with the same operand since it was last forgotten."""
        missing = {}
        for job_id, job, block in blocks:
            weights = [4 * job.shape.inner * w for w in (_outer(job, block, 0), _outer(job, block, 1))]
            possible = [chosen for n in range(3) for chosen in combinations((0, 1), n)]
            lacks = sum(weights) - job.down_bytes[block]
            missing[job_id, block] = [c for c in possible if sum(weights[side] for side in c) == lacks]
            assert missing[job_id, block], f"block {block} of job {job_id}: {job.down_bytes[block]} bytes are no slabs"
            for side in (0, 1):
                if any(side not in chosen for chosen in missing[job_id, block]):
                    for source in self._sources(job_id, job, block, side):
                        self.paid[source][job_id, block] = _range(job, block, side)
        for job_id, job, block in blocks:
            explained = [c for c in missing[job_id, block] if all(self._has(job_id, job, block, side) for side in c)]
            assert explained, f"block {block} of job {job_id}: its device never got what it is not charged for"
            if job.chunk[block] < job.shape.inner:
                assert explained[0] == (), f"block {block} of job {job_id} is streamed and brings everything"
            self.saved += len(explained[0])

    def forget(self, device: int) -> None:
        """Another device has its number now, and none of its slabs."""
        for source in [source for source in self.paid if source[0] == device]:
            del self.paid[source]

    def _sources(self, job_id: int, job: Job, block: int, side: int) -> list[tuple[Any, ...]]:
        device, operand = job.device[block], job.operands[side]
        own = (device, "job", job_id, side)
        return [own] if operand is None else [own, (device, "operand", operand, self.lives[operand])]

    def _has(self, job_id: int, job: Job, block: int, side: int) -> bool:
        b0, b1, low, high = _range(job, block, side)
        return any(
            p[0] <= b0 and b1 <= p[1] and p[2] <= low and high <= p[3]
            for source in self._sources(job_id, job, block, side)
            for key, p in self.paid[source].items()
            if key != (job_id, block)
        )


def _range(job: Job, block: int, side: int) -> Range:
    box: list[int] = job.boxes[block].tolist()
    low = box[2 + 2 * side]
    return box[0], box[0] + box[1], low, low + box[3 + 2 * side]


def _outer(job: Job, block: int, side: int) -> int:
    b0, b1, low, high = _range(job, block, side)
    return (b1 - b0) * (high - low)


class World(Shell[BlocksReturned]):
    """Devices and jobs around a dispatcher, with its own records. Every event happens at time 0."""

    def __init__(self, reuse: bool = False, planner: Planner | None = None) -> None:
        """`reuse`: a joining device gets the number of one that left without having returned anything."""
        super().__init__(Dispatcher(planner or Planner()))
        self.dispatcher = self._dispatcher
        self.reuse, self.reused = reuse, 0
        self.profiles: list[Profile] = []
        self.alive: set[int] = set()
        self.worked: set[int] = set()
        self.suspended: set[int] = set()
        self.shapes: dict[int, Shape] = {}  # jobs under way
        self.critical: dict[int, bool] = {}
        self.kept: dict[int, Kept] = {}
        self.finished: list[int] = []
        self.accepted: dict[int, NDArray[np.int64]] = {}  # how often each cell of each job was accepted
        self.flying: defaultdict[int, dict[Key, Box]] = defaultdict(dict)  # device -> key -> box
        self.past: list[Answer] = []  # answers that must not count any more
        self.log: list[Instruction] = []
        self._queued_before: dict[int, set[Key]] = {}  # critical blocks that waited when the event came
        self.owner: dict[Key, int] = {}
        self.charges = Charges()
        self.slabs: defaultdict[int, dict[int, int]] = defaultdict(dict)  # device -> operand -> bytes it keeps of it
        self.thefts = self.streamed = 0

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
            case OperandsForgotten(operands=operands):
                self.charges.lives.update(set(operands))
                for kept in self.slabs.values():
                    for operand in operands:
                        kept.pop(operand, None)
        self._queued_before = self._queued_critical()
        so_far = len(self.log)
        self._handle(event, event if isinstance(event, BlocksReturned) else None)
        self._nothing_waits_in_vain()
        return self.log[so_far:]

    def _carry_out(
        self, instructions: Sequence[Instruction], at_ns: int, returned: BlocksReturned | None = None
    ) -> None:
        self.log += instructions
        self.dispatcher.check()
        self._look_at_new_blocks()
        super()._carry_out(instructions, at_ns, returned)

    def join(self, *profiles: Profile) -> list[Instruction]:
        first = len(self.profiles)
        free = sorted(set(range(first)) - self.alive - self.worked) if self.reuse else []
        joined = DevicesJoined(first, pack_profiles(profiles), free[: len(profiles)])
        for device, profile in zip(joined.devices, profiles, strict=True):
            self.profiles[device : device + 1] = [profile]
            self.charges.forget(device)
        self.alive |= set(joined.devices)
        self.reused += len(joined.again)
        return self.handle(joined)

    def leave(self, *devices: int) -> list[Instruction]:
        return self.handle(DevicesLeft(list(devices)))

    def submit(
        self, shape: Shape, *, critical: bool = True, given: Plan | None = None, kept: Kept = (None, None)
    ) -> list[Instruction]:
        return self.submit_together(self.submission(shape, critical=critical, given=given, kept=kept))

    def submission(
        self, shape: Shape, *, critical: bool = True, given: Plan | None = None, kept: Kept = (None, None)
    ) -> Submission:
        job = len(self.accepted)
        self.shapes[job], self.critical[job], self.kept[job] = shape, critical, kept
        self.accepted[job] = np.zeros((shape.batch, shape.rows, shape.columns), np.int64)
        left_uses, right_uses = (1 if operand is None else 4 for operand in kept)
        return Submission(job, Request(shape, left_uses, right_uses), critical, given, kept)

    def submit_together(self, *submissions: Submission) -> list[Instruction]:
        return self.handle(JobsSubmitted(list(submissions)))

    def forget(self, *operands: int) -> list[Instruction]:
        return self.handle(OperandsForgotten(list(operands)))

    def answer(self, *answers: Answer) -> list[Instruction]:
        return self.handle(BlocksReturned(*columns(answers)))

    def fail(self, *answers: Answer) -> list[Instruction]:
        return self.handle(BlocksFailed(*columns(answers)))

    # ---- the world's own records

    def in_flight(self) -> list[Answer]:
        return [(device, job, block) for device, blocks in sorted(self.flying.items()) for job, block in blocks]

    def _forget(self, device: int) -> None:
        self.alive.discard(device)
        self.slabs.pop(device, None)
        self.past += [(device, job, block) for job, block in self.flying.pop(device, {})]

    # ---- instructions

    def _now_ns(self) -> int:
        return 0

    def _dispatch_s(self, at_ns: int) -> float:
        return 0.0

    def _send_blocks(self, instruction: SendBlocks, at_ns: int) -> None:
        queued = self._queued_critical()
        for sent in sends(instruction):
            assert sent.device in self.alive, f"device {sent.device} is gone and was sent a block"
            assert (sent.job, sent.block) not in self.flying[sent.device], "sent twice"
            if not self.critical[sent.job]:  # not while a critical block waits all along
                waited = self._queued_before.get(sent.device, set()) & queued[sent.device]
                assert not waited, f"device {sent.device}: deferred job {sent.job} first"
            self._send(sent)
            self._within_credit(sent.device)

    def _accept_blocks(self, returned: BlocksReturned, positions: list[int]) -> None:
        assert len(set(positions)) == len(positions)
        for position in positions:
            device, job, block = returned.devices[position], returned.jobs[position], returned.blocks[position]
            b, bs, r, rs, c, cs = self.flying[device].pop((job, block))  # it was sent and not yet answered
            self.accepted[job][b : b + bs, r : r + rs, c : c + cs] += 1
            self.worked.add(device)
            assert self.accepted[job].max() == 1, f"a cell of job {job} was accepted twice"
            self.past.append((device, job, block))

    def _job_finished(self, instruction: JobFinished) -> None:
        assert (self.accepted[instruction.job] == 1).all(), f"job {instruction.job} ended without some of its cells"
        del self.shapes[instruction.job]
        self.finished.append(instruction.job)

    def _suspend_device(self, instruction: SuspendDevice) -> None:
        self._forget(instruction.device)
        self.suspended.add(instruction.device)

    def _cancel_blocks(self, instruction: CancelBlocks) -> None:
        pytest.fail("no time passes here: no block is overdue")

    def _name_stragglers(self, instruction: NameStragglers) -> None:
        pytest.fail("no time passes here: no device is late")

    def _check_job(self, instruction: CheckJob) -> None:
        pytest.fail("this dispatcher does not verify")

    def _job_waits(self, instruction: JobWaits) -> None:
        pass  # tests look into the log

    def _blocks_lost(self, instruction: BlocksLost, at_ns: int, planned_ns: int) -> None:
        pass

    def _blocks_recovered(self, instruction: BlocksRecovered) -> None:
        pass

    # ---- what must be true

    def _look_at_new_blocks(self) -> None:
        new = []
        for job_id, job in self.dispatcher._state.jobs.items():
            for block, device in enumerate(job.device):
                if (job_id, block) not in self.owner:
                    new.append((job_id, job, block))
                elif self.owner[job_id, block] != device:
                    full = 4 * job.shape.inner * (_outer(job, block, 0) + _outer(job, block, 1))
                    assert job.down_bytes[block] == full, "a device that takes over a block has none of its slabs"
                    self.thefts += 1
                self.owner[job_id, block] = device
        self.charges.add(new)

    def _send(self, sent: Sent) -> None:
        device, inner = sent.device, self.shapes[sent.job].inner
        self.flying[device][sent.job, sent.block] = sent.box
        self.streamed += sent.chunk < inner
        for side, operand in enumerate(self.kept[sent.job]):
            if sent.kept >> side & 1:
                assert operand is not None
                assert sent.chunk == inner, "a streamed block keeps nothing on its device"
                if operand in self.dispatcher._assignments.slabs.of:  # not forgotten since
                    size = 4 * inner * sent.box[3 + 2 * side]
                    self.slabs[device][operand] = max(size, self.slabs[device].get(operand, 0))
        assert 2 * sum(self.slabs[device].values()) <= self.profiles[device].memory_bytes, f"device {device} keeps more"

    def _within_credit(self, device: int) -> None:
        profile, held = self.profiles[device], sum(self.slabs[device].values())
        for (job, _), (_, bs, _, rs, _, cs) in self.flying[device].items():
            inner = self.shapes[job].inner
            chunk = int(chunk_length(bs, rs, inner, cs, profile.memory_bytes // 2))
            assert chunk, f"device {device} was sent a block that it cannot hold"
            held += int(block_bytes(bs, rs, inner, cs, chunk))
        assert held <= profile.memory_bytes, f"device {device} was sent more bytes than it can hold"
        assert len(self.flying[device]) <= profile.credit_blocks, (
            f"device {device} was sent more blocks than its credit"
        )

    def _queued_critical(self) -> dict[int, set[Key]]:
        return {index: set(record.critical) for index, record in enumerate(self.dispatcher._state.devices)}

    def _nothing_waits_in_vain(self) -> None:
        """Every cell not yet accepted is in flight or queued, as long as one able device lives."""
        for job, shape in self.shapes.items():
            if any(self.profiles[d].memory_bytes >= one_cell_bytes(shape) for d in self.alive):
                cover = self.accepted[job].copy()
                record = self.dispatcher._state.jobs[job]
                for (b, bs, r, rs, c, cs), state in zip(record.boxes.tolist(), record.state, strict=True):
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
        memory_bytes=rng.choice([8, 60, 200, 1600, 2500, 8000, HUGE]),
        credit_blocks=rng.choice([1, 1, 2, 4]),
    )


def random_shape(rng: random.Random) -> Shape:
    inner = rng.choice([rng.randint(1, 6), rng.randint(1, 6), rng.randint(90, 400)])  # little memory: in chunks
    return Shape(rng.choice([1, 1, 1, 3]), rng.randint(1, 9), inner, rng.randint(1, 9))


@dataclass(frozen=True)
class Weight:
    """An operand that several jobs share; every use of it is of one kind, critical or deferred."""

    operand: int
    inner: int
    extent: int
    side: int
    critical: bool


def random_group(world: World, weights: list[Weight], rng: random.Random) -> list[Submission]:
    """Jobs that are ready together, some of them with weights that earlier jobs had."""
    group = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        shape, critical = random_shape(rng), rng.random() < 0.5
        kept: list[int | None] = [None, None]
        if weights and rng.random() < 0.5:
            weight = rng.choice(weights)
            others = rng.randint(1, 9)
            rows, columns = (weight.extent, others) if weight.side == 0 else (others, weight.extent)
            shape, critical = Shape(1, rows, weight.inner, columns), weight.critical
            kept[weight.side] = weight.operand
        elif rng.random() < 0.5:
            side = rng.choice([0, 1])
            extent = shape.rows if side == 0 else shape.columns
            weights.append(Weight(len(weights), shape.inner, extent, side, critical))
            kept[side] = len(weights) - 1
        group.append(world.submission(shape, critical=critical, kept=(kept[0], kept[1])))
    return group


def random_answers(world: World, rng: random.Random) -> list[Answer]:
    """Some due answers, in any order, among them duplicates, late ones and unsolicited ones."""
    flying = world.in_flight()
    answers = rng.sample(flying, rng.randint(0, min(len(flying), 6)))
    if answers and rng.random() < 0.3:
        answers.append(rng.choice(answers))
    answers += rng.choices(world.past, k=rng.randint(0, 2)) if world.past else []
    if rng.random() < 0.3:
        answers.append((rng.randint(-2, len(world.profiles) + 1), rng.randint(-1, 9), rng.randint(-1, 9)))
    if flying and rng.random() < 0.2:  # a block that is in flight on another device than the answer says
        answers.append((rng.randint(0, len(world.profiles) - 1), *rng.choice(flying)[1:]))
    rng.shuffle(answers)
    return answers


SEEDS = range(25)


@cache
def life(seed: int) -> World:
    return live(seed)


def live(seed: int, events: int = 80, reuse: bool = False) -> World:
    """A life of this number of events, after which all jobs are completed."""
    rng, world = random.Random(seed), World(reuse)
    weights: list[Weight] = []
    failures = rng.choice([0, 1, 6])
    if rng.random() < 0.7:
        world.join(*(random_profile(rng) for _ in range(rng.randint(1, 8))))
    for _ in range(events):
        match rng.choices(["join", "leave", "submit", "answer", "forget", "fail"], [1, 1, 3, 12, 1, failures])[0]:
            case "join":
                world.join(*(random_profile(rng) for _ in range(rng.randint(1, 4))))
            case "leave" if world.profiles:
                world.leave(*rng.sample(range(len(world.profiles)), rng.randint(1, min(2, len(world.profiles)))))
            case "submit" if len(world.shapes) < 5:
                world.submit_together(*random_group(world, weights, rng))
            case "forget" if weights:
                world.forget(*(w.operand for w in rng.sample(weights, rng.randint(1, min(2, len(weights))))))
            case "answer":
                world.answer(*random_answers(world, rng))
            case "fail":
                world.fail(*random_answers(world, rng))
    if not any(world.profiles[d].memory_bytes == HUGE for d in world.alive):
        world.join(COMMON)
    world.finish_everything(rng)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_cell_is_accepted_once_and_every_job_ends_whatever_devices_do(seed: int) -> None:
    world = life(seed)
    assert len(world.finished) == len(set(world.finished)) == len(world.accepted)
    assert all((cells == 1).all() for cells in world.accepted.values())


@cache
def life_with_few_numbers(seed: int) -> World:
    return live(seed, reuse=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reused_number_is_as_good_as_a_new_one(seed: int) -> None:
    world = life_with_few_numbers(seed)
    assert len(world.finished) == len(set(world.finished)) == len(world.accepted)
    assert all((cells == 1).all() for cells in world.accepted.values())


def test_many_numbers_are_used_again() -> None:
    worlds = [life_with_few_numbers(seed) for seed in SEEDS]
    assert sum(world.reused for world in worlds) > 40
    assert sum(len(world.worked) for world in worlds) > 100


def test_the_simulation_goes_everywhere() -> None:
    """Otherwise it would prove nothing."""
    worlds = [life(seed) for seed in SEEDS]
    seen = Counter(type(instruction) for world in worlds for instruction in world.log)
    assert set(seen) == {SendBlocks, AcceptBlocks, JobFinished, JobWaits, SuspendDevice, BlocksLost, BlocksRecovered}
    for world in worlds:  # every loss is repaired once
        lost = [i.loss for i in only(BlocksLost, world.log)]
        assert sorted(lost) == sorted(i.loss for i in only(BlocksRecovered, world.log))
    assert sum(world.dispatcher.stale for world in worlds) > 100
    assert sum(len(world.suspended) for world in worlds) > 2
    assert sum(len(world.finished) for world in worlds) > 100
    assert sum(world.streamed for world in worlds) > 50
    assert sum(world.charges.saved for world in worlds) > 20
    assert sum(world.thefts for world in worlds) > 20


def test_the_same_events_give_the_same_instructions() -> None:
    assert live(seed=3).log == live(seed=3).log


# ---- answers that do not count


def quarters() -> Plan:
    """For a product of 64 rows and 64 columns: 16 rows for each of the first four devices."""
    return plan_of([(0, 1, 16 * i, 16, 0, 64) for i in range(4)], [0, 1, 2, 3])


def busy_world() -> World:
    """Four devices of credit 2, and four jobs of a quarter each: every device has two blocks in flight, two queued."""
    world = World()
    world.join(*[COMMON] * 4)
    for _ in range(4):
        world.submit(Shape(1, 64, 64, 64), given=quarters())
    assert [len(world.flying[device]) for device in range(4)] == [2] * 4
    assert [len(record.critical) for record in world.dispatcher._state.devices] == [2] * 4
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
        lambda w: (0, *w.dispatcher._state.devices[0].critical[0]),
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


def test_of_two_equal_answers_in_one_message_only_one_counts() -> None:
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
        for job, record in world.dispatcher._state.jobs.items()
        for b, state in enumerate(record.state)
        if state == CUT
    }
    assert cut == {(job, 1) for job in range(4)}
    assert others <= set(world.in_flight())


def test_a_device_that_leaves_twice_counts_once() -> None:
    world = busy_world()
    world.leave(1, 1)
    assert world.leave(1) == []
    world.finish_everything()


def test_a_device_that_keeps_failing_is_suspended_and_gets_nothing_more() -> None:
    world = busy_world()
    suspensions = []
    while 0 not in world.suspended:
        answer = next(a for a in world.in_flight() if a[0] == 0)
        suspensions = only(SuspendDevice, world.fail(answer))
    assert suspensions == [SuspendDevice(0, f"it failed {NOW.refusals + 1} blocks")]
    world.submit(Shape(1, 64, 64, 64))
    world.finish_everything()
    assert not world.flying[0]


def test_a_device_that_fails_many_blocks_at_once_gets_none_of_them_back() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=NOW.refusals + 1))
    for _ in range(NOW.refusals + 1):
        world.submit(Shape(1, 8, 8, 8))
    failing = world.in_flight()
    assert len(failing) == NOW.refusals + 1
    instructions = world.fail(*failing)  # the world refuses blocks for a device that is gone
    assert SuspendDevice(0, f"it failed {NOW.refusals + 1} blocks") in instructions
    assert not only(SendBlocks, instructions)


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
    assert not only(JobWaits, instructions)
    world.finish_everything()


def test_a_lost_block_finds_the_one_able_device_among_many_idle_ones() -> None:
    """The least busy devices are those that cannot take it."""
    world, shape = World(), Shape(1, 64, 64, 64)
    unable = replace(COMMON, memory_bytes=one_cell_bytes(shape) - 1)
    world.join(*[COMMON] * 4, *[unable] * 200)
    world.submit(shape, given=quarters())
    instructions = world.leave(0, 1, 2)
    assert not only(JobWaits, instructions)
    world.finish_everything()


# ---- waiting for devices


def test_a_job_without_a_device_waits_and_a_joiner_resumes_it() -> None:
    world = World()
    (waits,) = world.submit(Shape(1, 8, 8, 8))
    assert isinstance(waits, JobWaits)
    assert waits.job == 0
    assert waits.reason
    assert only(SendBlocks, world.join(COMMON))
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


def test_a_job_whose_last_device_left_is_resumed_where_it_stopped() -> None:
    world = World()
    world.join(*[COMMON] * 3)
    world.submit(Shape(1, 64, 256, 64))
    world.answer(world.in_flight()[0])
    done = int(world.accepted[0].sum())
    instructions = world.leave(0, 1, 2)
    assert {type(i) for i in instructions} == {JobWaits, BlocksLost}
    world.join(COMMON)
    world.finish_everything()
    assert 0 < done < world.accepted[0].size


def test_a_loss_is_repaired_when_the_last_of_its_rectangles_is_done_again() -> None:
    world = World()
    world.join(*[COMMON] * 4)
    world.submit(Shape(1, 64, 16, 64), given=quarters())
    (lost,) = only(BlocksLost, world.leave(1))
    assert (lost.devices, lost.blocks) == ([1], 1)
    repairs = [answer for answer in world.in_flight() if answer[2] >= 4]
    assert repairs
    world.leave(repairs[0][0])  # one of the repairing devices is lost too
    answers = world.in_flight()
    recovered: list[int] = []
    while answers:
        assert not recovered or lost.loss not in recovered[:-1]
        recovered += [i.loss for i in only(BlocksRecovered, world.answer(answers[-1]))]
        answers = world.in_flight()
    assert recovered.count(lost.loss) == 1
    assert len(recovered) == 2


def checking() -> tuple[Dispatcher, list[Instruction]]:
    dispatcher = Dispatcher(Planner(), verify=True)
    dispatcher.handle(DevicesJoined(0, pack_profiles([COMMON] * 4)))
    dispatcher.handle(JobsSubmitted([Submission(0, Request(Shape(1, 64, 16, 64)), True, quarters())]))
    return dispatcher, dispatcher.handle(BlocksReturned([0, 1, 2, 3], [0] * 4, [0, 1, 2, 3]))


def test_a_job_is_finished_when_it_has_been_checked() -> None:
    dispatcher, instructions = checking()
    assert instructions == [AcceptBlocks([0, 1, 2, 3]), CheckJob(0)]
    dispatcher.check()
    assert dispatcher.handle(JobChecked(0, [])) == [JobFinished(0)]
    assert not dispatcher._state.jobs


def test_a_device_that_returned_a_wrong_block_is_suspended_and_others_compute_it_again() -> None:
    dispatcher, _ = checking()
    instructions = dispatcher.handle(JobChecked(0, [2]))
    dispatcher.check()
    assert instructions[0] == SuspendDevice(2, "what it returned was wrong")
    (sent,) = only(SendBlocks, instructions)
    assert 2 not in sent.devices
    assert dispatcher.handle(BlocksReturned(sent.devices, sent.jobs, sent.blocks))[-1] == CheckJob(0)
    assert dispatcher.handle(JobChecked(0, [])) == [JobFinished(0)]
    dispatcher.check()


def test_if_all_devices_were_wrong_the_job_waits_for_another() -> None:
    dispatcher, _ = checking()
    instructions = dispatcher.handle(JobChecked(0, [0, 1, 2, 3]))
    assert JobWaits in {type(i) for i in instructions}
    dispatcher.check()
    (sent,) = dispatcher.handle(DevicesJoined(4, pack_profiles([COMMON])))
    assert isinstance(sent, SendBlocks)
    assert set(sent.devices) == {4}


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


# ---- critical before deferred


def one_block_jobs(world: World, *kinds: bool) -> None:
    for critical in kinds:
        world.submit(Shape(1, 8, 8, 8), critical=critical)


def order_of(world: World) -> list[int]:
    """The jobs in the order in which a device of credit 1 gets them."""
    order = []
    while flying := world.in_flight():
        ((_, job, _),) = flying
        order.append(job)
        world.answer(*flying)
    return order


def test_critical_jobs_go_before_deferred_ones_on_the_same_device() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    one_block_jobs(world, True, False, True, False, True)
    assert order_of(world) == [0, 2, 4, 1, 3]


def test_critical_jobs_go_first_after_their_device_was_lost() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    one_block_jobs(world, False, False, True)  # the first is in flight already
    world.leave(0)
    world.join(replace(COMMON, credit_blocks=1))
    assert order_of(world) == [2, 0, 1]


def test_critical_jobs_go_first_when_they_move_to_a_survivor() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1))
    one_block_jobs(world, False, True)
    world.join(replace(COMMON, credit_blocks=1, up_bps=1.0))  # too slow to take a block while the other device lives
    world.leave(0)
    assert order_of(world) == [1, 0]


# ---- mistakes of the caller


def test_a_job_cannot_be_submitted_twice() -> None:
    world = busy_world()
    with pytest.raises(ValueError, match="job 0 was submitted twice"):
        world.dispatcher.handle(JobsSubmitted([Submission(0, Request(Shape(1, 1, 1, 1), 1, 1), critical=True)]))


def test_an_id_cannot_be_used_twice() -> None:
    world = busy_world()
    with pytest.raises(ValueError, match="got 3, expected 4"):
        world.dispatcher.handle(DevicesJoined(3, pack_profiles([COMMON])))


def test_the_number_of_a_device_that_is_present_or_has_worked_is_not_free() -> None:
    world = World()
    world.join(COMMON, COMMON)
    world.submit(Shape(1, 4, 4, 4), given=plan_of([(0, 1, 0, 4, 0, 4)], [1]))
    world.answer((1, 0, 0))
    world.leave(1)
    for taken in (0, 1):
        with pytest.raises(ValueError, match="one is there, or has returned a block"):
            world.dispatcher.handle(DevicesJoined(2, pack_profiles([COMMON]), [taken]))


def test_a_plan_made_for_an_earlier_device_with_that_number_is_not_used() -> None:
    """The next device with the number may have little memory: the old plan would give it blocks that it cannot hold."""
    dispatcher, shape = Dispatcher(Planner()), Shape(1, 64, 16, 64)
    dispatcher.handle(DevicesJoined(0, pack_profiles([COMMON] * 2)))
    plan = Submission(0, Request(shape), critical=True)
    sent = only(SendBlocks, dispatcher.handle(JobsSubmitted([plan])))
    assert {device for i in sent for device in i.devices} == {0, 1}
    for memory_bytes in (8 * one_cell_bytes(shape), 1):
        dispatcher.handle(DevicesLeft([1]))
        dispatcher.handle(DevicesJoined(2, pack_profiles([replace(COMMON, memory_bytes=memory_bytes)]), [1]))
        dispatcher.handle(JobsSubmitted([replace(plan, job=plan.job + memory_bytes)]))
        dispatcher.check()
        assert dispatcher._state.devices[1].in_flight_bytes <= memory_bytes


def test_a_given_plan_is_used_unchanged() -> None:
    world = World()
    world.join(*[COMMON] * 3)
    given = plan_of([(0, 1, 0, 4, 0, 3), (0, 1, 0, 4, 3, 5)], [2, 0])
    assert world.submit(Shape(1, 4, 7, 8), given=given) == [SendBlocks([2, 0], [0, 0], [0, 1])]
    world.finish_everything()


def test_a_given_plan_that_its_devices_cannot_hold_is_refused() -> None:
    world, shape = World(), Shape(1, 4, 7, 8)
    world.join(replace(COMMON, memory_bytes=one_cell_bytes(shape)))
    given = plan_of([(0, 1, 0, 4, 0, 8)], [0])
    with pytest.raises(ValueError, match="a block that it cannot hold"):
        world.submit(shape, given=given)


@pytest.mark.parametrize("named", [[1, 0, 1], [1, 1, 1]])
def test_what_a_given_plan_asks_of_a_device_that_has_left_is_done_by_the_others(named: list[int]) -> None:
    """A device may leave between the making of a plan and its submission."""
    world = World()
    world.join(*[COMMON] * 3)
    world.leave(1)
    boxes: list[tuple[int, ...]] = [(0, 1, 0, 4, 0, 3), (0, 1, 0, 4, 3, 2), (0, 1, 0, 4, 5, 3)]
    sent = only(SendBlocks, world.submit(Shape(1, 4, 7, 8), given=plan_of(boxes, named)))
    assert 1 not in {device for one in sent for device in one.devices}
    world.finish_everything()


def test_a_given_plan_waits_if_all_devices_have_left() -> None:
    world = World()
    world.join(COMMON)
    world.leave(0)
    assert only(JobWaits, world.submit(Shape(1, 4, 7, 8), given=plan_of([(0, 1, 0, 4, 0, 8)], [0])))
    world.join(COMMON)
    world.finish_everything()


# ---- jobs that are ready together


def test_jobs_submitted_together_are_planned_together_and_the_critical_ones_first() -> None:
    asked: list[list[Shape]] = []

    class Watched(Planner):
        def plan(self, requests: Sequence[Request] | Question, *rest: Any) -> list[Plan]:
            asked.append([request.shape for request in Question.of(requests).requests])
            return super().plan(requests, *rest)

    world = World(planner=Watched())
    world.join(*[COMMON] * 3)
    shapes = [Shape(1, 8, 8, 8 + i) for i in range(4)]
    kinds = [False, True, False, True]
    group = [world.submission(shape, critical=critical) for shape, critical in zip(shapes, kinds, strict=True)]
    world.submit_together(*group)
    assert asked == [[shapes[1], shapes[3], shapes[0], shapes[2]]]
    world.finish_everything()


def test_the_possible_jobs_of_a_group_continue() -> None:
    world, possible, impossible = World(), Shape(1, 4, 4, 4), Shape(1, 4, 400, 4)
    world.join(replace(COMMON, memory_bytes=one_cell_bytes(possible)))
    instructions = world.submit_together(*(world.submission(s) for s in (impossible, possible, impossible)))
    assert [i.job for i in only(JobWaits, instructions)] == [0, 2]
    while flying := world.in_flight():
        world.answer(*flying)
    assert world.finished == [1]
    world.join(COMMON)
    world.finish_everything()


# ---- slabs that devices keep

ROWS, INNER, COLUMNS = 64, 32, 48
LEFT_BYTES, RIGHT_BYTES = 4 * INNER * ROWS // 2, 4 * INNER * COLUMNS  # of one device's block, see halves()
WEIGHT = 7


def halves() -> Plan:
    """Half of the rows and all of the columns for each of two devices."""
    half = ROWS // 2
    return plan_of([(0, 1, 0, half, 0, COLUMNS), (0, 1, half, half, 0, COLUMNS)], [0, 1])


def charged(world: World, *, given: Plan | None = None, kept: Kept = (None, WEIGHT), inner: int = INNER) -> list[int]:
    """Submit a job and complete it; returns the charges of its blocks."""
    world.submit(Shape(1, ROWS, inner, COLUMNS), given=given or halves(), kept=kept)
    job = world.dispatcher._state.jobs[len(world.accepted) - 1]
    down_bytes = list(job.down_bytes)
    world.finish_everything()
    return down_bytes


def two_devices(memory_bytes: int = HUGE) -> World:
    world = World()
    world.join(*[replace(COMMON, memory_bytes=memory_bytes)] * 2)
    return world


def test_a_kept_slab_is_charged_once_until_it_is_forgotten() -> None:
    world = two_devices()
    assert charged(world) == [LEFT_BYTES + RIGHT_BYTES] * 2
    assert charged(world) == [LEFT_BYTES] * 2
    assert charged(world) == [LEFT_BYTES] * 2
    world.forget(WEIGHT)
    assert charged(world) == [LEFT_BYTES + RIGHT_BYTES] * 2
    assert charged(world) == [LEFT_BYTES] * 2


def test_either_side_can_be_kept_and_both() -> None:
    world = two_devices()
    assert charged(world, kept=(1, None)) == [LEFT_BYTES + RIGHT_BYTES] * 2
    assert charged(world, kept=(1, 2)) == [RIGHT_BYTES] * 2
    assert charged(world, kept=(1, 2)) == [0] * 2


def test_an_operand_that_is_not_kept_is_charged_every_time() -> None:
    world = two_devices()
    for _ in range(3):
        assert charged(world, kept=(None, None)) == [LEFT_BYTES + RIGHT_BYTES] * 2


def test_another_operand_is_not_taken_for_the_kept_one() -> None:
    world = two_devices()
    charged(world)
    assert charged(world, kept=(None, WEIGHT + 1)) == [LEFT_BYTES + RIGHT_BYTES] * 2
    assert charged(world, kept=(None, WEIGHT)) == [LEFT_BYTES] * 2


def test_forgetting_one_operand_leaves_the_others() -> None:
    world = two_devices()
    charged(world, kept=(1, 2))
    world.forget(2, 99)
    assert charged(world, kept=(1, 2)) == [RIGHT_BYTES] * 2


def test_a_part_of_a_kept_slab_costs_nothing_and_a_slab_beyond_it_is_charged_whole() -> None:
    world = two_devices()
    narrow = [(0, 1, 0, ROWS, 0, 16), (0, 1, 0, ROWS, 16, 32)]
    assert charged(world, given=plan_of(narrow, [0, 1])) == [4 * INNER * (ROWS + 16), 4 * INNER * (ROWS + 32)]
    inside = [(0, 1, 0, ROWS, 0, 16), (0, 1, 0, ROWS, 16, 8), (0, 1, 0, ROWS, 24, 24)]
    assert charged(world, given=plan_of(inside, [0, 1, 1])) == [4 * INNER * ROWS] * 3
    swapped = plan_of(narrow, [1, 0])
    assert charged(world, given=swapped) == [4 * INNER * (ROWS + 16), 4 * INNER * (ROWS + 32)]


def test_products_of_a_batch_keep_nothing() -> None:
    world = two_devices()
    for _ in range(2):
        world.submit(Shape(2, 8, INNER, 8), given=plan_of([(0, 2, 0, 8, 0, 8)], [0]), kept=(1, 2))
        assert world.dispatcher._state.jobs[len(world.accepted) - 1].down_bytes == [4 * INNER * 2 * 16]
        world.finish_everything()
    assert world.dispatcher._state.devices[0].kept_bytes == 0


def test_a_device_that_joins_later_has_no_kept_slabs() -> None:
    world = two_devices()
    charged(world)
    world.leave(1)
    world.join(COMMON)
    half = ROWS // 2
    later = plan_of([(0, 1, 0, half, 0, COLUMNS), (0, 1, half, half, 0, COLUMNS)], [0, 2])
    assert charged(world, given=later) == [LEFT_BYTES, LEFT_BYTES + RIGHT_BYTES]
    assert charged(world, given=later) == [LEFT_BYTES] * 2


def test_a_device_keeps_no_more_than_half_its_memory_and_is_charged_for_the_rest_every_time() -> None:
    room = 2 * RIGHT_BYTES + RIGHT_BYTES // 2  # two slabs and a half
    world = two_devices(memory_bytes=2 * max(room, LEFT_BYTES + RIGHT_BYTES + 2 * ROWS * COLUMNS))
    kept = min(room, world.profiles[0].memory_bytes // 2) // RIGHT_BYTES
    for operand in range(4):
        charged(world, kept=(None, operand))
    again = [charged(world, kept=(None, operand))[0] for operand in range(4)]
    assert again == [LEFT_BYTES] * kept + [LEFT_BYTES + RIGHT_BYTES] * (4 - kept)
    assert world.dispatcher._state.devices[0].kept_bytes == kept * RIGHT_BYTES
    world.forget(0)  # its room goes to the next operand
    assert charged(world, kept=(None, 3))[0] == LEFT_BYTES + RIGHT_BYTES
    assert charged(world, kept=(None, 3))[0] == LEFT_BYTES


def test_blocks_in_flight_and_kept_slabs_fit_the_memory_together() -> None:
    block = LEFT_BYTES + RIGHT_BYTES + 2 * ROWS * COLUMNS
    world = two_devices(memory_bytes=2 * block)
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=halves())
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=halves())
    assert [len(world.flying[d]) for d in (0, 1)] == [2, 2]
    world.finish_everything()
    charged(world)
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=halves())
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=halves())
    assert [len(world.flying[d]) for d in (0, 1)] == [1, 1]  # a kept slab takes the room of the second block
    world.forget(WEIGHT)
    world.finish_everything()
    assert [record.kept_bytes for record in world.dispatcher._state.devices] == [0, 0]


def test_a_streamed_block_is_charged_in_full_and_keeps_nothing() -> None:
    world, shape = World(), Shape(1, ROWS, 4000, COLUMNS)
    world.join(replace(COMMON, memory_bytes=1_000_000))
    given = plan_of([(0, 1, 0, ROWS, 0, COLUMNS)], [0])
    for _ in range(2):
        world.submit(shape, given=given, kept=(1, 2))
        job = world.dispatcher._state.jobs[len(world.accepted) - 1]
        assert 0 < job.chunk[0] < shape.inner
        assert job.down_bytes == [4 * shape.inner * (ROWS + COLUMNS)]
        world.finish_everything()
    assert world.dispatcher._state.devices[0].kept_bytes == 0


def test_a_stolen_block_is_charged_in_full() -> None:
    world = World()
    world.join(replace(COMMON, credit_blocks=1, latency_s=0.0))
    strip = [(0, 1, 0, ROWS, 12 * i, 12) for i in range(4)]
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=plan_of(strip, [0] * 4, [(1, 1), (0, 1), (0, 1), (0, 1)]))
    job = world.dispatcher._state.jobs[0]
    assert job.down_bytes == [4 * INNER * (ROWS + 12)] + [4 * INNER * 12] * 3
    world.join(replace(COMMON, latency_s=0.0))
    stolen = [block for block, device in enumerate(job.device) if device == 1]
    assert stolen
    assert all(job.down_bytes[block] == 4 * INNER * (ROWS + 12) for block in stolen)


def test_a_stolen_block_is_streamed_if_the_thief_has_less_memory() -> None:
    world, shape = World(), Shape(1, 8, 4000, 8)
    world.join(replace(COMMON, credit_blocks=1, latency_s=0.0))
    for _ in range(3):
        world.submit(shape, given=plan_of([(0, 1, 0, 8, 0, 8)], [0]))
    world.join(replace(COMMON, latency_s=0.0, memory_bytes=100_000))
    job = world.dispatcher._state.jobs[2]
    assert job.device == [1]
    assert 0 < job.chunk[0] < shape.inner  # check() has verified that it fits


def test_a_block_of_a_kept_slab_is_not_stolen() -> None:
    """Its owner has the slab, or will have it; another device would have to download it."""
    world = World()
    world.join(replace(COMMON, credit_blocks=1, latency_s=0.0))
    for _ in range(3):
        world.submit(Shape(1, 8, 8, 8), given=plan_of([(0, 1, 0, 8, 0, 8)], [0]), kept=(None, WEIGHT))
    assert world.join(replace(COMMON, latency_s=0.0)) == []
    world.finish_everything()


def test_a_strip_is_charged_once() -> None:
    """A device that gets several blocks with the same rows downloads those rows with the first of them."""
    world = two_devices()
    boxes = [(0, 1, 0, 32, 0, 16), (0, 1, 0, 32, 16, 16), (0, 1, 0, 32, 32, 16), (0, 1, 32, 32, 0, COLUMNS)]
    given = plan_of(boxes, [0, 0, 0, 1], [(1, 1), (0, 1), (0, 1), (1, 1)])
    assert charged(world, given=given, kept=(None, None)) == [
        4 * INNER * (32 + 16),
        4 * INNER * 16,
        4 * INNER * 16,
        4 * INNER * (32 + COLUMNS),
    ]


def test_a_strip_of_streamed_blocks_is_charged_every_time() -> None:
    world, inner = two_devices(memory_bytes=400_000), 4000
    boxes = [(0, 1, 0, 64, 0, 24), (0, 1, 0, 64, 24, 24)]
    assert charged(world, given=plan_of(boxes, [0, 0], [(1, 1), (0, 1)]), inner=inner) == [4 * inner * (64 + 24)] * 2


def test_a_lost_block_is_charged_in_full_where_it_goes() -> None:
    world = two_devices()
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=halves())
    world.leave(1)
    job = world.dispatcher._state.jobs[0]
    assert len(job.state) > 2
    for block in range(2, len(job.state)):
        _, _, _, rows, _, cols = job.boxes[block].tolist()
        assert job.down_bytes[block] == 4 * INNER * (rows + cols)


# ---- check() itself


def flying_key(d: Dispatcher, device: int = 0) -> Key:
    return sorted(d._state.devices[device].in_flight)[0]


def _stretch(d: Dispatcher) -> None:
    d._state.jobs[0].boxes[0, 3] += 1


def _shrink(d: Dispatcher) -> None:
    d._state.jobs[0].boxes[0, 3] -= 1


def _cut_for_nothing(d: Dispatcher) -> None:
    d._state.jobs[0].state[0] = CUT


def _in_flight_twice(d: Dispatcher) -> None:
    job, block = flying_key(d)
    d._state.devices[1].credit_blocks += 1
    d._state.devices[1].in_flight[job, block] = 1.0
    d._state.devices[1].in_flight_bytes += d._state.jobs[job].size_bytes[block]


def _queued_and_in_flight(d: Dispatcher) -> None:
    d._state.devices[1].critical.append(flying_key(d))
    d._state.waiting[1] += 1


def _queued_twice(d: Dispatcher) -> None:
    d._state.devices[0].critical.append(d._state.devices[0].critical[0])
    d._state.waiting[0] += 1


def _done_and_in_flight(d: Dispatcher) -> None:
    job, block = flying_key(d)
    d._state.jobs[job].state[block] = DONE


def _nowhere(d: Dispatcher) -> None:
    d._state.devices[0].critical.popleft()
    d._state.waiting[0] -= 1


def _wrong_owner(d: Dispatcher) -> None:
    job, block = flying_key(d)
    d._state.jobs[job].device[block] = 1


def _bytes_miscounted(d: Dispatcher) -> None:
    d._state.devices[0].in_flight_bytes -= 1


def _too_many_blocks(d: Dispatcher) -> None:
    d._state.devices[0].credit_blocks = 1


def _too_many_bytes(d: Dispatcher) -> None:
    d._state.devices[0].memory_bytes = d._state.devices[0].in_flight_bytes - 1


def _queue_miscounted(d: Dispatcher) -> None:
    d._state.waiting[0] += 1


def _dead_with_work(d: Dispatcher) -> None:
    d._state.devices[0].alive = False


def _job_forgotten_in_flight(d: Dispatcher) -> None:
    del d._state.jobs[flying_key(d)[0]]


def _job_forgotten_in_queues(d: Dispatcher) -> None:
    del d._state.jobs[d._state.devices[0].critical[-1][0]]


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


def _keeps_more_than_counted(d: Dispatcher) -> None:
    d._state.devices[0].kept_bytes -= 1


def _keeps_less_than_counted(d: Dispatcher) -> None:
    d._assignments.slabs.of[WEIGHT].high[0] = 0


def _no_room_for_what_it_keeps(d: Dispatcher) -> None:
    d._state.devices[0].memory_bytes = d._state.devices[0].in_flight_bytes + d._state.devices[0].kept_bytes - 1


@pytest.mark.parametrize(
    "corrupt",
    [_keeps_more_than_counted, _keeps_less_than_counted, _no_room_for_what_it_keeps],
    ids=lambda corrupt: corrupt.__name__.strip("_"),
)
def test_check_notices_corrupted_slabs(corrupt: Callable[[Dispatcher], Any]) -> None:
    world = two_devices()
    charged(world)
    world.submit(Shape(1, ROWS, INNER, COLUMNS), given=halves())
    corrupt(world.dispatcher)
    with pytest.raises(InvariantBroken):
        world.dispatcher.check()
