"""What the server's thread checks itself, what it hands over, and that neither changes a verdict."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from ps.outside import BackgroundThread, Done
from ps.scheduling.events import JobChecked, Work
from ps.transport.checking import GLANCED_AT_BYTES, Checking
from ps.transport.jobs import Live, Product, Totals
from ps.transport.operands import Operand
from ps.verification.glance import FIRST

LIMIT_S = 20.0


class Later:
    """Work that waits until it is asked for."""

    def __init__(self) -> None:
        self.busy, self.waiting = 0, list[tuple[int, Callable[[], None]]]()

    def do(self, work: Callable[[], Done], then: Callable[[Done], None], rank: int = 0) -> None:
        self.waiting.append((rank, lambda: then(work())))

    def finish(self) -> None:
        while self.waiting:
            self.waiting.pop(0)[1]()

    def end(self) -> None: ...


class Server:
    """As much of one as the check needs. The products at the beginning of a run are all sketched; they are over."""

    def __init__(self) -> None:
        self.jobs, self.totals, self.later = dict[int, Live](), Totals(), Later()
        self.checking = Checking(self.jobs, self.totals, self.later, lambda: 8, chance=random.Random(3))
        self.told: list[JobChecked] = []
        for job in range(10 * (FIRST // 10 + 1)):
            self.complete(job, 4)
        self.later.finish()
        self.told.clear()

    def complete(self, job: int, side: int, critical: bool = True, wrong: bool = False) -> None:
        made = np.random.default_rng(job)
        left, right = (made.standard_normal((1, side, side), np.float32) for _ in range(2))
        out = left @ right.transpose(0, 2, 1)
        if wrong:
            out[0, 0, 0] += 1.0
        self.jobs[job] = Live(Product(Operand(left), Operand(right), out, lambda: None, critical=critical))
        boxes = np.array([[0, 1, 0, side, 0, side]])
        self.checking.prepare([(job, boxes)])
        self.checking.check(job, Work(boxes, np.array([0]), np.array([5])), self.told.append)


def drawn(server: Server, side: int, job: int = 1000) -> tuple[int, int]:
    """The first job from this number on that is not sketched, and the first that is."""
    plain = sketched = -1
    while plain < 0 or sketched < 0:
        server.complete(job, side)
        if server.jobs[job].drawn:
            sketched = job
        else:
            plain = job
        job += 1
    return plain, sketched


LARGE_SIDE = int((GLANCED_AT_BYTES / 12) ** 0.5) + 1  # two operands and an output of four bytes per value


def test_a_glance_at_a_small_product_is_done_at_once() -> None:
    server = Server()
    plain, sketched = drawn(server, 8)
    at_once = [checked.job for checked in server.told]
    assert plain in at_once
    assert sketched not in at_once
    server.later.finish()
    assert {checked.job for checked in server.told} >= {plain, sketched}
    assert all(not checked.wrong for checked in server.told)


def test_a_large_product_is_not_checked_in_the_server_s_thread() -> None:
    server = Server()
    server.complete(1, LARGE_SIDE)
    assert not server.told
    assert server.jobs[1].glance is None
    server.later.finish()
    assert server.told == [JobChecked(1, [], {})]
    assert server.totals.check_background_s > 0


@pytest.mark.parametrize("side", [8, LARGE_SIDE])
def test_a_wrong_block_is_found_wherever_it_is_checked(side: int) -> None:
    server = Server()
    server.complete(1, side, wrong=True)
    server.later.finish()
    (checked,) = server.told
    assert checked.wrong == [0]
    assert set(checked.why) == {5}
    assert server.totals.wrong_blocks == 1


def test_what_others_wait_for_is_checked_first() -> None:
    server = Server()
    for job, critical in ((1, False), (2, True)):
        server.complete(job, LARGE_SIDE, critical)
    deferred_prepared, deferred, prepared, complete = (rank for rank, _ in server.later.waiting)
    assert complete < prepared < deferred < deferred_prepared


# ---- the thread


def test_work_is_done_in_another_thread_by_rank_and_handed_back() -> None:
    handed: list[Callable[[], None]] = []
    all_there, go = threading.Event(), threading.Event()
    results: list[Any] = []

    def hand_back(call: Callable[[], None]) -> None:
        handed.append(call)
        if len(handed) == 4:
            all_there.set()

    thread = BackgroundThread("test", hand_back)
    thread.do(lambda: go.wait(LIMIT_S), results.append)
    for rank in (2, 0, 1):
        thread.do(lambda rank=rank: (rank, threading.current_thread().name), results.append, rank)  # type: ignore[misc]
    assert thread.busy == 4
    go.set()
    assert all_there.wait(LIMIT_S)
    for call in handed:
        call()
    assert thread.busy == 0
    assert results == [True, (0, "test"), (1, "test"), (2, "test")]
    thread.end()


def test_an_error_of_the_work_is_raised_where_the_result_was_wanted() -> None:
    handed = SimpleQueue[Callable[[], None]]()
    thread = BackgroundThread("test", handed.put)
    thread.do(lambda: 1 // 0, lambda result: None)
    with pytest.raises(ZeroDivisionError):
        handed.get(timeout=LIMIT_S)()
    thread.end()


def test_at_the_end_no_further_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.outside.END_S", 0.0)
    begun, go = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> bool:
        begun.set()
        return go.wait(LIMIT_S)

    thread = BackgroundThread("ends now", lambda call: None)
    thread.do(first, lambda result: None)
    thread.do(lambda: done.append(1), lambda result: None)
    assert begun.wait(LIMIT_S)
    (running,) = (one for one in threading.enumerate() if one.name == "ends now")
    thread.end()
    go.set()
    running.join(LIMIT_S)
    assert not running.is_alive()
    assert done == []
