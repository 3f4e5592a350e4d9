"""Promises about late devices: what others took decides what is overdue, others get speculative copies, the first good
answer decides, and an overtaken device gets less until it delivers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import ANSWER
from ps.planning.planner import Planner
from ps.planning.plans import Plan, Request, Shape
from ps.scheduling.deadlines import Deadlines, after_a_turn_s
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    AcceptBlocks,
    BlocksFailed,
    BlocksLost,
    BlocksReturned,
    CancelBlocks,
    DevicesJoined,
    DevicesLeft,
    JobFinished,
    JobsSubmitted,
    SendBlocks,
    Submission,
    TimePassed,
)
from ps.scheduling.settings import NOW
from ps.scheduling.slowness import Slowness
from ps.transport.jobs import Live, Product
from ps.transport.operands import Operand
from ps.transport.records import Records

COMMON = Profile(1e9, 0.0, 1e7, 1e7, 0.01, 1 << 40, 4)
SHAPE = Shape(1, 64, 16, 64)


def any_device(device: int, key: tuple[int, int]) -> bool:
    return True


def test_before_enough_is_known_the_cost_model_alone_sets_deadlines() -> None:
    deadlines = Deadlines()
    deadlines.sent([(0, 0)], [0], now_s=10.0, expected_s=[2.0])
    assert deadlines.next_s == 10.0 + NOW.far * 2.0 + NOW.hitch_s
    for _ in range(NOW.enough - 1):
        deadlines.returned([1.0])
    assert deadlines.allowed_s(3.0) == NOW.far * 3.0 + NOW.hitch_s
    assert deadlines.overdue(deadlines.next_s - 1e-9, any_device, most=10) == []
    assert deadlines.overdue(deadlines.next_s, any_device, most=10) == [(0, 0)]


def test_one_late_first_answer_does_not_multiply_the_floor_of_the_cold_start() -> None:
    """Found by the loop world: a device that was stopped for 1.5 s answered its first block, expected in 16 ms, and the
    next overdue block waited 100 s for its speculative copy."""
    deadlines = Deadlines()
    deadlines.returned([94.0])
    assert deadlines.allowed_s(0.016) == 94.0 * NOW.far * 0.016 + NOW.hitch_s


def test_blocks_sent_during_the_cold_start_are_judged_like_the_rest_once_enough_is_known() -> None:
    deadlines = Deadlines()
    deadlines.sent([(0, 0)], [0], now_s=10.0, expected_s=[2.0])
    deadlines.returned([1.0] * NOW.enough)
    assert deadlines.next_s == 10.0 + NOW.margin * 2.0


def test_a_block_is_overdue_if_it_takes_longer_than_nearly_all_others_did() -> None:
    deadlines = Deadlines()
    for i in range(NOW.enough):
        deadlines.returned([3.0 if i % 2 else 2.0])  # a host on which everything takes two or three times as long
    assert deadlines.margin == NOW.margin * 3.0
    deadlines.sent([(0, 0)], [7], now_s=10.0, expected_s=[2.0])
    assert deadlines.next_s == 10.0 + 2.0 * deadlines.margin
    assert deadlines.overdue(deadlines.next_s - 1e-9, any_device, most=10) == []
    assert deadlines.overdue(deadlines.next_s, any_device, most=10) == [(0, 0)]
    assert deadlines.overdue(1e9, any_device, most=10) == [], "a block is reported once"


def test_devices_that_are_faster_than_expected_are_not_held_to_the_expectation_exactly() -> None:
    """Chaos, loop world 10808: a block 1 us beyond its expected time counted as overdue, since all others had taken 0.4
    of theirs."""
    deadlines = Deadlines()
    deadlines.returned([0.4] * NOW.enough)
    assert deadlines.margin == NOW.margin


def test_many_slow_answers_do_not_decide_what_is_normal() -> None:
    deadlines = Deadlines()
    deadlines.returned([1.0] * 80 + [10.0] * 20 + [1.0] * 80)
    assert deadlines.margin == NOW.margin * NOW.tail


def test_short_blocks_on_a_busy_host_are_not_overdue_before_they_are_later_than_the_others() -> None:
    """Two local agents and the server on two cores: blocks of 10 ms were 20 ms late, as all were, and the copies of
    hundreds of them made the rest later."""
    deadlines = Deadlines()
    deadlines.returned([1.0] * NOW.enough, lateness_s=[0.02] * NOW.enough)
    assert deadlines.allowed_s(0.01) == 0.01 + NOW.margin * 0.02
    assert deadlines.allowed_s(1.0) == NOW.margin * 1.0, "longer blocks are judged by their ratio"


def test_lateness_in_seconds_cannot_be_taught_by_a_minority_nor_exceed_a_hitch() -> None:
    taught, late = Deadlines(), Deadlines()
    taught.returned([1.0] * 200, lateness_s=[0.001] * 160 + [60.0] * 40)
    assert taught.late_s == NOW.margin * NOW.tail * 0.001
    late.returned([1.0] * NOW.enough, lateness_s=[60.0] * NOW.enough)
    assert late.allowed_s(0.01) == 0.01 + NOW.far_s


def test_a_busy_host_takes_no_work_from_a_device_that_was_corrected_before() -> None:
    """It was compared with the model, all others with what is usual: so it alone got less while all were late."""
    deadlines, slowness = Deadlines(), Slowness()
    devices = [0, 1, 2] * NOW.enough
    deadlines.returned([1.0] * len(devices), devices)
    slowness.overtaken(0, NOW.far)
    assert slowness.take_changes() == {0: NOW.far}
    for _ in range(4):
        deadlines.returned([2.0] * len(devices), devices)
    for _ in range(NOW.answers):
        slowness.answered(0, 2.0 / deadlines.typical.ratio)
    assert slowness.take_changes() == {}


def test_after_a_hitch_of_its_own_the_server_waits_as_long_before_it_checks_deadlines() -> None:
    assert after_a_turn_s(free_s=7.0, woke_s=7.0, now_s=7.25) == 7.5
    assert after_a_turn_s(free_s=7.0, woke_s=7.0, now_s=10.0) == 11.0, "after a long turn, less than its length"


@pytest.mark.parametrize("turn_s", [0.1, 0.7, 2.0])
def test_repeated_hitches_do_not_stop_deadline_checks(turn_s: float) -> None:
    woke_s = look_s = free_s = 0.0
    judged = 0
    for _ in range(100):
        if woke_s >= look_s:
            free_s = woke_s
            judged += 1
        look_s = max(look_s, after_a_turn_s(free_s, woke_s, woke_s + turn_s))
        woke_s += turn_s
    assert judged >= 100 * turn_s / (NOW.hitch_s + 3 * turn_s)


class Clockwork:
    """A dispatcher with five devices that has seen enough to know what is normal: twice the expected time."""

    def __init__(self, *profiles: Profile) -> None:
        self.dispatcher = Dispatcher(Planner())
        self.now_s, self.job = 100.0, 0
        self.dispatcher.handle(DevicesJoined(0, pack_profiles(profiles or [COMMON] * 5)), self.now_s)
        for _ in range(NOW.enough):
            self.dispatcher._deadlines.returned([2.0])
        for record in self.dispatcher._state.devices:
            record.worked = self.dispatcher._stragglers._answered = True  # they gave those answers

    def submit(self, devices: list[int]) -> list[int]:
        """A product in as many equal parts as devices; its blocks."""
        height = SHAPE.rows // len(devices)
        boxes = np.array([(0, 1, height * i, height, 0, SHAPE.columns) for i in range(len(devices))])
        plan = Plan(boxes, np.array(devices), np.ones((len(devices), 2), bool), 1.0)
        self.dispatcher.handle(JobsSubmitted([Submission(self.job, Request(SHAPE), True, plan)]), self.now_s)
        self.dispatcher.check()
        return list(range(len(devices)))

    def wait(self) -> list[object]:
        """Advance the clock until a block is overdue."""
        out: list[object] = []
        while not out:  # blocks that were returned meanwhile are not overdue
            self.now_s = max(self.now_s, self.dispatcher._deadlines.next_s)
            assert self.now_s < float("inf")
            out += self.dispatcher.handle(TimePassed(), self.now_s)
            self.dispatcher.check()
        return out

    def late(self) -> SendBlocks:
        return next(instruction for instruction in self.wait() if isinstance(instruction, SendBlocks))

    def answer(self, device: int, block: int) -> list[object]:
        out = self.dispatcher.handle(BlocksReturned([device], [self.job], [block]), self.now_s)
        self.dispatcher.check()
        return list(out)


def test_an_overdue_block_is_copied_to_others_in_pieces_and_the_first_answer_decides() -> None:
    world = Clockwork()
    world.submit([0, 1])
    world.answer(1, 1)
    sent = world.late()
    assert len(sent.blocks) > 1
    assert 0 not in sent.devices
    pieces = list(zip(sent.devices, sent.blocks, strict=True))
    assert world.answer(*pieces[0]) == [AcceptBlocks([0]), CancelBlocks([0], [0], [0])]
    assert world.answer(0, 0) == [], "too late"
    assert world.dispatcher.stale == 1
    *_, end = [world.answer(*piece) for piece in pieces[1:]]
    assert end == [AcceptBlocks([0]), JobFinished(0)]


@pytest.mark.parametrize("unheard_s", [0.0, 1.0])
def test_the_delay_of_a_server_that_did_not_read_makes_no_device_slow(unheard_s: float) -> None:
    """Otherwise a busy server believes its devices to be slow, makes all plans anew, and is busy with that."""
    world = Clockwork()
    beliefs = world.dispatcher._beliefs
    for world.job in range(2 * NOW.enough):
        (block,) = world.submit([0])
        job = world.dispatcher._state.jobs[world.job]
        world.now_s = job.sent_s[block] + job.expected_s[block] + NOW.far_s * NOW.far
        answer = BlocksReturned([0], [world.job], [block], unheard_s)
        world.dispatcher.handle(answer, world.now_s)
    assert (beliefs.slowness.factor.get(0, 1.0) > NOW.far) == (unheard_s == 0.0)


def test_a_device_that_is_late_by_more_than_the_server_did_not_read_is_slow_by_the_rest() -> None:
    world = Clockwork()
    (block,) = world.submit([0])
    job = world.dispatcher._state.jobs[0]
    expects_s = job.expected_s[block]
    heard: list[float] = []
    world.dispatcher._stragglers.answered = lambda device, job_id, ratio, expected_s: heard.append(ratio)  # type: ignore[method-assign]
    world.now_s = job.sent_s[block] + expects_s + 3.0
    world.dispatcher.handle(BlocksReturned([0], [0], [block], unheard_s=0.5), world.now_s)
    assert heard == [pytest.approx((expects_s + 2.5) / expects_s)]


def test_if_the_late_device_answers_first_the_others_are_told_to_stop() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    stopped = CancelBlocks(sent.devices, sent.jobs, sent.blocks)
    assert world.answer(0, 0) == [AcceptBlocks([0]), JobFinished(0), stopped]
    assert all(device.idle for device in world.dispatcher._state.devices)
    assert world.answer(sent.devices[0], sent.blocks[0]) == [], "a later answer changes nothing"


def test_all_blocks_of_a_late_device_are_copied_to_others_and_its_queued_ones_move() -> None:
    world = Clockwork(*[replace(COMMON, credit_blocks=2)] * 6)
    world.submit([0, 0, 0, 0])  # two are sent
    world.late()
    assert set(world.dispatcher._state.devices[0].in_flight) == {(0, 0), (0, 1)}
    assert not world.dispatcher._state.devices[0].critical
    assert {(0, 0), (0, 1)} == set(world.dispatcher._stragglers.copies)


def test_a_block_is_copied_to_others_only_once() -> None:
    world = Clockwork()
    world.submit([0])
    world.late()
    assert world.dispatcher._stragglers.copies.begun == 1
    world.dispatcher.handle(TimePassed(), world.now_s + 1e-3)
    assert world.dispatcher._stragglers.copies.begun == 1


def test_copies_of_a_late_block_are_not_late_at_the_first_hitch() -> None:
    world = Clockwork()
    world.submit([0])
    patience_s = world.dispatcher._state.jobs[0].expected_s[0]
    sent_s = world.now_s
    world.late()
    assert world.dispatcher._deadlines.next_s >= world.now_s + world.dispatcher._deadlines.margin * patience_s
    assert world.now_s > sent_s


def test_if_the_copies_are_late_too_others_get_them_and_the_first_device_is_told_to_stop() -> None:
    world = Clockwork(*[COMMON] * 8)
    world.submit([0])
    pieces = world.late()
    out = world.wait()
    assert any(isinstance(i, CancelBlocks) and (0, 0, 0) in zip(i.devices, i.jobs, i.blocks, strict=True) for i in out)
    for device, block in zip(pieces.devices, pieces.blocks, strict=True):
        world.answer(device, block)
    assert not world.dispatcher._state.jobs, "the first answers to the copies decide, and they are enough"


def test_a_late_block_of_the_only_device_is_judged_again_later() -> None:
    world = Clockwork(COMMON)
    world.submit([0])
    world.dispatcher.handle(TimePassed(), 1e3)
    assert world.dispatcher._stragglers.copies.begun == 0
    assert world.dispatcher._deadlines.next_s < float("inf")
    assert JobFinished(0) in world.answer(0, 0)


def test_the_copies_count_when_the_late_device_is_lost() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    out = world.dispatcher.handle(DevicesLeft([0]), world.now_s)
    world.dispatcher.check()
    assert not any(isinstance(i, BlocksLost | SendBlocks) for i in out), "nothing was lost"
    *_, end = [world.answer(*piece) for piece in zip(sent.devices, sent.blocks, strict=True)]
    assert JobFinished(0) in end


def test_a_lost_copy_is_cut_again_and_the_late_device_is_told_to_stop() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    out = world.dispatcher.handle(DevicesLeft([sent.devices[0]]), world.now_s)
    world.dispatcher.check()
    assert {BlocksLost, SendBlocks, CancelBlocks} <= {type(i) for i in out}


def test_the_copies_count_when_the_late_device_fails() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    assert world.dispatcher.handle(BlocksFailed([0], [0], [0]), world.now_s) == []
    world.dispatcher.check()
    *_, end = [world.answer(*piece) for piece in zip(sent.devices, sent.blocks, strict=True)]
    assert JobFinished(0) in end


def test_a_block_whose_copies_are_all_lost_is_lost() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    out = world.dispatcher.handle(DevicesLeft([0, sent.devices[0]]), world.now_s)
    world.dispatcher.check()
    assert {BlocksLost, SendBlocks} <= {type(i) for i in out}


def shares(world: Clockwork, shape: Shape) -> NDArray[np.int64]:
    """Cells of each device in the dispatcher's current plan of a product."""
    dispatcher = world.dispatcher
    dispatcher._beliefs.correct(world.now_s)
    (plan,) = dispatcher._planner.plan(
        [Request(shape)], dispatcher.profiles, np.arange(6), dispatcher._beliefs.revision
    )
    return np.bincount(plan.device, plan.boxes[:, 3] * plan.boxes[:, 5], 6).astype(np.int64)


def overtake(world: Clockwork) -> None:
    """Device 0 is late with a block; the others are not."""
    world.submit([0])
    sent = world.late()
    for piece in zip(sent.devices, sent.blocks, strict=True):
        world.answer(*piece)
    world.now_s += max(NOW.hitch_s, NOW.suspected_s)
    world.dispatcher.handle(TimePassed(), world.now_s)
    world.job += 1


def test_an_overtaken_device_gets_less_until_it_delivers_again() -> None:
    world = Clockwork(*[replace(COMMON, latency_s=0.0)] * 6)
    shape = Shape(1, 600, 64, 600)
    before = shares(world, shape)
    overtake(world)
    after = shares(world, shape)
    assert after[0] < 0.5 * before[0]
    assert (after[1:] >= before[1:]).all()
    for _ in range(NOW.answers):
        world.submit([0])
        world.answer(0, 0)  # at once, much sooner than expected
        world.job += 1
    world.now_s += NOW.hitch_s
    world.dispatcher.handle(TimePassed(), world.now_s)
    assert (shares(world, shape)[0]) > after[0]


def test_an_overdue_device_gets_nothing_new_until_it_answers_or_a_pause_ends() -> None:
    for lives in (True, False):
        world = Clockwork()
        world.submit([0])
        world.late()
        assert world.dispatcher._standing.able.tolist() == [1, 2, 3, 4]
        if lives:
            world.answer(0, 0)
        else:
            world.now_s += NOW.suspected_s
            world.dispatcher.handle(TimePassed(), world.now_s)
        world.dispatcher.check()
        assert 0 in world.dispatcher._standing.able


def test_if_many_devices_are_late_none_is_suspected() -> None:
    """Otherwise a host that stalls would leave no device to work with."""
    world = Clockwork(*[COMMON] * 8)
    world.submit([0, 1, 2, 3])
    world.dispatcher.handle(TimePassed(), 1e6)
    world.dispatcher.check()
    assert len(world.dispatcher._standing.able) >= 6


def test_a_suspect_that_is_lost_does_not_return() -> None:
    world = Clockwork()
    world.submit([0])
    world.late()
    world.dispatcher.handle(DevicesLeft([0]), world.now_s)
    world.dispatcher.handle(TimePassed(), world.now_s + NOW.suspected_s)
    world.dispatcher.check()
    assert 0 not in world.dispatcher._standing.able


def test_a_suspect_works_when_no_other_device_can() -> None:
    """Otherwise work would wait for a newcomer although an able device is present."""
    small = replace(COMMON, memory_bytes=8)  # less than one value of each operand
    for submitted_first in (True, False):
        world = Clockwork(COMMON, *[small] * 4, COMMON)
        world.submit([0])
        assert set(world.late().devices) == {5}
        assert 0 not in world.dispatcher._standing.able
        other = Submission(1, Request(SHAPE), True)
        if submitted_first:  # the helper has the block, and loses it
            world.dispatcher.handle(JobsSubmitted([other]), world.now_s)
            out = world.dispatcher.handle(DevicesLeft([5]), world.now_s)
        else:
            world.dispatcher.handle(DevicesLeft([5]), world.now_s)
            out = world.dispatcher.handle(JobsSubmitted([other]), world.now_s)
        world.dispatcher.check()
        (sent,) = [i for i in out if isinstance(i, SendBlocks)]
        assert set(sent.devices) == {0}
        assert 1 in sent.jobs


def test_copies_that_were_never_sent_do_not_disturb_the_records() -> None:
    world = Clockwork(*[replace(COMMON, credit_blocks=1)] * 4)
    world.submit([0, 1, 2, 3])
    job = world.dispatcher._state.jobs[0]
    operand = Operand(np.zeros((1, SHAPE.rows, SHAPE.inner), np.float32))
    other = Operand(np.zeros((1, SHAPE.columns, SHAPE.inner), np.float32))
    product = Product(operand, other, np.zeros((1, SHAPE.rows, SHAPE.columns), np.float32), lambda: None)
    live = Live(product)
    live.sent(np.arange(4, dtype=np.uint32), 5)
    world.now_s = world.dispatcher._deadlines.next_s
    world.dispatcher.handle(TimePassed(), world.now_s)
    assert len(job.boxes) > 4, "all devices are busy: copies wait"
    records = Records()
    answers = np.zeros(2, ANSWER)
    answers["job"] = [0, 1]
    records.answered(answers, [0, 1, 2, 3], 9)
    records.finished(0, "product", 1, SHAPE, job.boxes, live.stamps(len(job.boxes)))
    records.finished(1, "product", 1, SHAPE, job.boxes[:1], np.full(1, 5, np.uint64))
    assert records.columns()["sent_s"].tolist() == [0.0, 0.0]


def test_blocks_that_a_given_plan_queues_at_a_suspect_are_computed_by_others() -> None:
    """A suspect is not fed, and once its blocks in flight were overtaken it has no answer to come: without this, blocks
    queued for it waited for ever."""
    slow = replace(COMMON, credit_blocks=1)  # by the model it is always too slow to take a block of the fast device
    fast = replace(slow, flops=1e13, overhead_s=0.0, down_bps=1e12, up_bps=1e12, latency_s=0.0)
    world = Clockwork(fast, slow, slow)
    world.submit([0, 1])
    world.late()
    assert 0 in world.dispatcher._standing.suspects
    world.job = 1
    world.submit([0, 0, 0, 1])
    for _ in range(100):
        flying = [(d, *key) for d in (1, 2) for key in world.dispatcher._state.devices[d].in_flight]
        if flying:
            devices, jobs, blocks = map(list, zip(*flying, strict=True))
            world.dispatcher.handle(BlocksReturned(devices, jobs, blocks), world.now_s)
            world.dispatcher.check()
        elif world.dispatcher._state.jobs:
            world.wait()
    assert not world.dispatcher._state.jobs


def test_in_a_firm_plan_no_device_gets_blocks_of_another_while_that_one_lives() -> None:
    """However slow a device looks, and whichever others are idle: firm plans are for comparisons."""
    boxes = np.array([(0, 1, 10 * i, 10, 0, SHAPE.columns) for i in range(6)] + [(0, 1, 60, 4, 0, SHAPE.columns)])
    plan = Plan(boxes, np.array([0] * 6 + [1]), np.ones((7, 2), bool), 1.0)

    def sent(out: list[object]) -> list[tuple[int, int]]:
        return [key for i in out if isinstance(i, SendBlocks) for key in zip(i.devices, i.blocks, strict=True)]

    def submitted(firm: bool) -> tuple[Clockwork, list[tuple[int, int]]]:
        world = Clockwork(*[replace(COMMON, up_bps=1e3)] * 5)  # an answer takes tens of seconds
        given = Submission(0, Request(SHAPE), True, replace(plan, firm=firm))
        return world, sent(list(world.dispatcher.handle(JobsSubmitted([given]), world.now_s)))

    assert submitted(firm=False)[1] == [(0, 0), (0, 1), (1, 6)], "otherwise the rest waits until it is needed"
    world, first = submitted(firm=True)
    assert first == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 6)], "as much as it has credit for"
    assert sent(world.answer(1, 6)) == [], "an idle device takes nothing"
    assert world.dispatcher.handle(TimePassed(), 1e6) == [], "nothing is overdue"
    assert sent(world.answer(0, 0)) == [(0, 4)]
    out = world.dispatcher.handle(DevicesLeft([0]), world.now_s)
    world.dispatcher.check()
    others = {device for device, _ in sent(list(out))}
    assert others, "after its loss others compute it"
    assert others <= {1, 2, 3, 4}
