"""Promises about devices that are late: overdue is judged by what others took, others help, the first good
answer decides, and whoever was overtaken gets less until it delivers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import ANSWER
from ps.planning.planner import Planner
from ps.planning.plans import Plan, Request, Shape
from ps.scheduling.beliefs import CORRECTED_EVERY_S
from ps.scheduling.deadlines import (
    BEYOND,
    COLD_FLOOR_S,
    COLD_TIMES,
    ENOUGH,
    MOST_PATIENCE_S,
    TAIL,
    Deadlines,
    after_a_turn_s,
)
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
from ps.scheduling.slowness import ANSWERS
from ps.scheduling.standing import SUSPECTED_S
from ps.scheduling.stragglers import FEW, GRACE_S
from ps.transport.jobs import Live, Product
from ps.transport.operands import Operand
from ps.transport.records import Records

COMMON = Profile(1e9, 0.0, 1e7, 1e7, 0.01, 1 << 40, 4)
SHAPE = Shape(1, 64, 16, 64)


def anybody(device: int, key: tuple[int, int]) -> bool:
    return True


def test_before_enough_is_known_the_cost_model_alone_sets_deadlines() -> None:
    deadlines = Deadlines()
    deadlines.sent([(0, 0)], [0], now_s=10.0, expected_s=[2.0])
    assert deadlines.next_s == 10.0 + COLD_TIMES * 2.0 + COLD_FLOOR_S
    for _ in range(ENOUGH - 1):
        deadlines.returned([1.0], [1.0])
    assert deadlines.allowed_s(3.0) == COLD_TIMES * 3.0 + COLD_FLOOR_S
    assert deadlines.overdue(deadlines.next_s - 1e-9, anybody, most=10) == []
    assert deadlines.overdue(deadlines.next_s, anybody, most=10) == [(0, 0)]


def test_one_late_first_answer_does_not_multiply_the_floor_of_the_cold_start() -> None:
    """Found by the loop's world: a device that was stopped for 1.5 s answered its first block, expected in 16 ms, and
    the next overdue block waited 100 s for its speculative copy."""
    deadlines = Deadlines()
    deadlines.returned([94.0], [0.016])
    assert deadlines.allowed_s(0.016) == 94.0 * COLD_TIMES * 0.016 + COLD_FLOOR_S


def test_what_was_sent_before_enough_was_known_is_judged_like_the_rest_as_soon_as_it_is() -> None:
    deadlines = Deadlines()
    deadlines.sent([(0, 0)], [0], now_s=10.0, expected_s=[2.0])
    deadlines.returned([1.0] * ENOUGH, [1.0] * ENOUGH)
    assert deadlines.next_s == 10.0 + BEYOND * 2.0


def test_overdue_is_what_takes_longer_than_nearly_all_did() -> None:
    deadlines = Deadlines()
    for i in range(ENOUGH):
        deadlines.returned(
            [3.0 if i % 2 else 2.0], [2.0]
        )  # a host on which everything takes two or three times as long
    assert deadlines.margin(2.0) == BEYOND * 3.0
    deadlines.sent([(0, 0)], [7], now_s=10.0, expected_s=[2.0])
    assert deadlines.next_s == 10.0 + 2.0 * deadlines.margin(2.0)
    assert deadlines.overdue(deadlines.next_s - 1e-9, anybody, most=10) == []
    assert deadlines.overdue(deadlines.next_s, anybody, most=10) == [(0, 0)]
    assert deadlines.overdue(1e9, anybody, most=10) == [], "it is told once"


def test_many_slow_ones_are_not_what_is_normal() -> None:
    deadlines = Deadlines()
    deadlines.returned([1.0] * 80 + [10.0] * 20 + [1.0] * 80, [1.0] * 180)
    assert deadlines.margin(1.0) == BEYOND * TAIL


def test_blocks_are_compared_with_blocks_that_are_about_as_long() -> None:
    """A hitch of 50 ms is nothing to one of a second, and much to one of 10 ms."""
    deadlines = Deadlines()
    deadlines.returned([1.05, 6.0] * ENOUGH, [1.0, 0.01] * ENOUGH)
    assert deadlines.margin(0.9) == deadlines.margin(1.0) == BEYOND * 1.05
    assert deadlines.margin(0.01) == BEYOND * 6.0
    assert deadlines.margin(60.0) >= deadlines.margin(0.01), "of such long ones nothing is known: in doubt for them"


def test_after_a_hitch_of_its_own_the_server_waits_as_long_before_it_judges() -> None:
    assert after_a_turn_s(free_s=7.0, woke_s=7.0, now_s=7.25) == 7.5
    assert after_a_turn_s(free_s=7.0, woke_s=7.0, now_s=10.0) == 11.0, "a long one; not as long again"


@pytest.mark.parametrize("turn_s", [0.1, 0.7, 2.0])
def test_one_hitch_after_another_does_not_keep_it_from_judging(turn_s: float) -> None:
    woke_s = look_s = free_s = 0.0
    judged = 0
    for _ in range(100):
        if woke_s >= look_s:
            free_s = woke_s
            judged += 1
        look_s = max(look_s, after_a_turn_s(free_s, woke_s, woke_s + turn_s))
        woke_s += turn_s
    assert judged >= 100 * turn_s / (MOST_PATIENCE_S + 3 * turn_s)


class Clockwork:
    """A dispatcher with five devices that has seen enough to know what is normal: twice the expected time."""

    def __init__(self, *profiles: Profile) -> None:
        self.dispatcher = Dispatcher(Planner())
        self.now_s, self.job = 100.0, 0
        self.dispatcher.handle(DevicesJoined(0, pack_profiles(profiles or [COMMON] * 5)), self.now_s)
        for _ in range(ENOUGH):
            self.dispatcher._deadlines.returned([2.0], [1.0])
        for record in self.dispatcher._state.devices:
            record.worked = self.dispatcher._stragglers._answered = True  # those answers were theirs

    def submit(self, devices: list[int]) -> list[int]:
        """A product in as many equal parts; its blocks."""
        height = SHAPE.rows // len(devices)
        boxes = np.array([(0, 1, height * i, height, 0, SHAPE.columns) for i in range(len(devices))])
        plan = Plan(boxes, np.array(devices), np.ones((len(devices), 2), bool), 1.0)
        self.dispatcher.handle(JobsSubmitted([Submission(self.job, Request(SHAPE), True, plan)]), self.now_s)
        self.dispatcher.check()
        return list(range(len(devices)))

    def wait(self) -> list[object]:
        """Time passes until something is overdue."""
        out: list[object] = []
        while not out:  # what has come back since is overdue for nobody
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


def test_what_is_overdue_is_also_given_to_others_in_pieces_and_their_first_answer_decides() -> None:
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


def test_if_the_late_one_is_first_after_all_the_others_are_told_to_stop() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    stopped = CancelBlocks(sent.devices, sent.jobs, sent.blocks)
    assert world.answer(0, 0) == [AcceptBlocks([0]), JobFinished(0), stopped]
    assert all(device.idle for device in world.dispatcher._state.devices)
    assert world.answer(sent.devices[0], sent.blocks[0]) == [], "it changes nothing"


def test_all_that_a_late_device_was_sent_is_given_to_others_too_and_what_waits_for_it_goes_there() -> None:
    world = Clockwork(*[replace(COMMON, credit_blocks=2)] * 6)
    world.submit([0, 0, 0, 0])  # two of them are sent
    world.late()
    assert set(world.dispatcher._state.devices[0].in_flight) == {(0, 0), (0, 1)}
    assert not world.dispatcher._state.devices[0].critical
    assert {(0, 0), (0, 1)} == set(world.dispatcher._stragglers.copies)


def test_a_block_is_given_to_others_once_and_no_more() -> None:
    world = Clockwork()
    world.submit([0])
    world.late()
    assert world.dispatcher._stragglers.copies.begun == 1
    world.dispatcher.handle(TimePassed(), world.now_s + 1e-3)
    assert world.dispatcher._stragglers.copies.begun == 1


def test_pieces_of_a_late_block_are_not_late_at_the_first_hitch() -> None:
    world = Clockwork()
    world.submit([0])
    patience_s = world.dispatcher._state.jobs[0].expected_s[0]
    sent_s = world.now_s
    world.late()
    assert (
        world.dispatcher._deadlines.next_s >= world.now_s + world.dispatcher._deadlines.margin(patience_s) * patience_s
    )
    assert world.now_s > sent_s


def test_if_the_pieces_are_late_too_others_get_them_and_the_first_one_is_told_to_stop() -> None:
    world = Clockwork(*[COMMON] * 8)
    world.submit([0])
    pieces = world.late()
    out = world.wait()
    assert any(isinstance(i, CancelBlocks) and (0, 0, 0) in zip(i.devices, i.jobs, i.blocks, strict=True) for i in out)
    for device, block in zip(pieces.devices, pieces.blocks, strict=True):
        world.answer(device, block)
    assert not world.dispatcher._state.jobs, "the pieces' first answers decide, and they are enough"


def test_alone_it_is_asked_again_later() -> None:
    world = Clockwork(COMMON)
    world.submit([0])
    world.dispatcher.handle(TimePassed(), 1e3)
    assert world.dispatcher._stragglers.copies.begun == 0
    assert world.dispatcher._deadlines.next_s < float("inf")
    assert JobFinished(0) in world.answer(0, 0)


def test_the_pieces_count_when_the_late_one_is_lost() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    out = world.dispatcher.handle(DevicesLeft([0]), world.now_s)
    world.dispatcher.check()
    assert not any(isinstance(i, BlocksLost | SendBlocks) for i in out), "nothing was lost"
    *_, end = [world.answer(*piece) for piece in zip(sent.devices, sent.blocks, strict=True)]
    assert JobFinished(0) in end


def test_a_lost_piece_is_cut_again_and_the_late_one_is_told_to_stop() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    out = world.dispatcher.handle(DevicesLeft([sent.devices[0]]), world.now_s)
    world.dispatcher.check()
    assert {BlocksLost, SendBlocks, CancelBlocks} <= {type(i) for i in out}


def test_the_pieces_count_when_the_late_one_fails() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    assert world.dispatcher.handle(BlocksFailed([0], [0], [0]), world.now_s) == []
    world.dispatcher.check()
    *_, end = [world.answer(*piece) for piece in zip(sent.devices, sent.blocks, strict=True)]
    assert JobFinished(0) in end


def test_all_lost_is_a_loss() -> None:
    world = Clockwork()
    world.submit([0])
    sent = world.late()
    out = world.dispatcher.handle(DevicesLeft([0, sent.devices[0]]), world.now_s)
    world.dispatcher.check()
    assert {BlocksLost, SendBlocks} <= {type(i) for i in out}


def shares(world: Clockwork, shape: Shape) -> NDArray[np.int64]:
    """Cells of each device in the dispatcher's present plan of a product."""
    dispatcher = world.dispatcher
    dispatcher._beliefs.correct(world.now_s)
    (plan,) = dispatcher._planner.plan([Request(shape)], dispatcher.profiles, np.arange(6), dispatcher._beliefs.revised)
    return np.bincount(plan.device, plan.boxes[:, 3] * plan.boxes[:, 5], 6).astype(np.int64)


def overtake(world: Clockwork) -> None:
    """Device 0 is late with a block, and the others are not."""
    world.submit([0])
    sent = world.late()
    for piece in zip(sent.devices, sent.blocks, strict=True):
        world.answer(*piece)
    world.now_s += max(CORRECTED_EVERY_S, SUSPECTED_S)
    world.dispatcher.handle(TimePassed(), world.now_s)
    world.job += 1


def test_who_was_overtaken_gets_less_and_is_believed_again_when_it_delivers() -> None:
    world = Clockwork(*[replace(COMMON, latency_s=0.0)] * 6)
    shape = Shape(1, 600, 64, 600)
    before = shares(world, shape)
    overtake(world)
    after = shares(world, shape)
    assert after[0] < 0.5 * before[0]
    assert (after[1:] >= before[1:]).all()
    for _ in range(ANSWERS):
        world.submit([0])
        world.answer(0, 0)  # at once, much sooner than expected
        world.job += 1
    world.now_s += CORRECTED_EVERY_S
    world.dispatcher.handle(TimePassed(), world.now_s)
    assert (shares(world, shape)[0]) > after[0]


def test_who_is_overdue_gets_nothing_new_until_it_answers_or_some_time_has_passed() -> None:
    for lives in (True, False):
        world = Clockwork()
        world.submit([0])
        world.late()
        assert world.dispatcher._standing.able.tolist() == [1, 2, 3, 4]
        if lives:
            world.answer(0, 0)
        else:
            world.now_s += SUSPECTED_S
            world.dispatcher.handle(TimePassed(), world.now_s)
        world.dispatcher.check()
        assert 0 in world.dispatcher._standing.able


def test_if_many_are_late_it_is_not_them() -> None:
    """Otherwise a host that stalls would leave nobody to work with."""
    world = Clockwork(*[COMMON] * 8)
    world.submit([0, 1, 2, 3])
    world.dispatcher.handle(TimePassed(), 1e6)
    world.dispatcher.check()
    assert len(world.dispatcher._standing.able) >= 6


def test_if_many_are_late_at_once_they_get_a_moment_more_and_no_second_one() -> None:
    """A hitch of the host between them and us is over by then."""
    for many in (FEW, 2 * FEW):
        world = Clockwork(*[COMMON] * 40)
        blocks = world.submit(list(range(many)))
        world.now_s = world.dispatcher._deadlines.next_s
        out = world.dispatcher.handle(TimePassed(), world.now_s)
        assert bool(out) == (many == FEW)
    graced_s = world.now_s
    world.now_s += GRACE_S / 2
    world.answer(0, blocks[0])
    assert world.dispatcher.handle(TimePassed(), world.now_s) == [], "nor is anybody late before it is over"
    world.late()
    assert world.now_s == graced_s + GRACE_S
    assert set(world.dispatcher._standing.suspects) == set(range(1, many)), "who has answered meanwhile is not late"


def test_a_suspect_that_is_lost_does_not_come_back() -> None:
    world = Clockwork()
    world.submit([0])
    world.late()
    world.dispatcher.handle(DevicesLeft([0]), world.now_s)
    world.dispatcher.handle(TimePassed(), world.now_s + SUSPECTED_S)
    world.dispatcher.check()
    assert 0 not in world.dispatcher._standing.able


def test_a_suspect_works_when_nobody_else_can() -> None:
    """Otherwise work would wait for a newcomer although an able device is there."""
    small = replace(COMMON, memory_bytes=8)  # not even one value of each operand
    for submitted_first in (True, False):
        world = Clockwork(COMMON, *[small] * 4, COMMON)
        world.submit([0])
        assert set(world.late().devices) == {5}
        assert 0 not in world.dispatcher._standing.able
        other = Submission(1, Request(SHAPE), True)
        if submitted_first:  # the helper has it, and loses it
            world.dispatcher.handle(JobsSubmitted([other]), world.now_s)
            out = world.dispatcher.handle(DevicesLeft([5]), world.now_s)
        else:
            world.dispatcher.handle(DevicesLeft([5]), world.now_s)
            out = world.dispatcher.handle(JobsSubmitted([other]), world.now_s)
        world.dispatcher.check()
        (sent,) = [i for i in out if isinstance(i, SendBlocks)]
        assert set(sent.devices) == {0}
        assert 1 in sent.jobs


def test_pieces_that_were_never_sent_are_in_nobodys_way_in_the_records() -> None:
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
    assert len(job.boxes) > 4, "all are busy: pieces wait"
    records = Records()
    answers = np.zeros(2, ANSWER)
    answers["job"] = [0, 1]
    records.answered(answers, [0, 1, 2, 3], 9)
    records.finished(0, "product", 1, SHAPE, job.boxes, live.stamps(len(job.boxes)))
    records.finished(1, "product", 1, SHAPE, job.boxes[:1], np.full(1, 5, np.uint64))
    assert records.columns()["sent_s"].tolist() == [0.0, 0.0]


def test_what_a_given_plan_queues_at_a_suspect_is_done_by_others() -> None:
    """A suspect is not fed, and once its blocks in flight were overtaken it has no answer to come: what was queued for
    it waited for ever."""
    slow = replace(COMMON, credit_blocks=1)  # by the model it is always too late to take a block of the fast one
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


def test_of_a_firm_plan_nobody_gets_what_another_is_to_do_while_that_one_lives() -> None:
    """However slow it looks, and whoever is idle: it is for comparisons."""
    boxes = np.array([(0, 1, 10 * i, 10, 0, SHAPE.columns) for i in range(6)] + [(0, 1, 60, 4, 0, SHAPE.columns)])
    plan = Plan(boxes, np.array([0] * 6 + [1]), np.ones((7, 2), bool), 1.0)

    def sent(out: list[object]) -> list[tuple[int, int]]:
        return [key for i in out if isinstance(i, SendBlocks) for key in zip(i.devices, i.blocks, strict=True)]

    def submitted(firm: bool) -> tuple[Clockwork, list[tuple[int, int]]]:
        world = Clockwork(*[replace(COMMON, up_bps=1e3)] * 5)  # an answer takes tens of seconds
        given = Submission(0, Request(SHAPE), True, replace(plan, firm=firm))
        return world, sent(list(world.dispatcher.handle(JobsSubmitted([given]), world.now_s)))

    assert submitted(firm=False)[1] == [(0, 0), (0, 1), (1, 6)], "otherwise the rest would wait until it is needed"
    world, first = submitted(firm=True)
    assert first == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 6)], "as much as it has credit for"
    assert sent(world.answer(1, 6)) == [], "an idle one takes nothing"
    assert world.dispatcher.handle(TimePassed(), 1e6) == [], "nothing is overdue"
    assert sent(world.answer(0, 0)) == [(0, 4)]
    out = world.dispatcher.handle(DevicesLeft([0]), world.now_s)
    world.dispatcher.check()
    others = {device for device, _ in sent(list(out))}
    assert others, "then it is done all the same"
    assert others <= {1, 2, 3, 4}
