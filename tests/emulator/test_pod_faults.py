"""Promises of emulator.pods.faults and emulator.pods.pod: every ordered fault happens, is counted and reported, and its
effect is visible at the server's end of the socket."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil
import pytest
import zmq
from numpy.typing import NDArray

from agent.protocol.connection import SILENT_AFTER
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    BLOCK,
    OUTER_MAJOR,
    PIECE,
    Heartbeat,
    Join,
    Leave,
    Message,
    Refused,
    Result,
    Welcome,
    WireError,
    Work,
    decode,
    encode,
)
from emulator.model.fleet import Fleet
from emulator.pods.faults import LIES, DeviceNumbers, Liar, Order, OrderError
from testbed.launch.pods import LaunchError
from testbed.launch.processes import Pods

if TYPE_CHECKING:
    from conftest import Until

LIMIT_S = 30.0
PROFILE = Profile(
    flops=1e9, overhead_s=1e-3, down_bps=8e6, up_bps=8e6, latency_s=0, memory_bytes=2**30, credit_blocks=4
)
RNG = np.random.default_rng(5)
LEFT = RNG.standard_normal((6, 8), dtype=np.float32)
RIGHT = RNG.standard_normal((5, 8), dtype=np.float32)  # columns, inner
TRUTH = LEFT @ RIGHT.T

Kind = TypeVar("Kind", bound=Message)


class PodLine:
    """The server's end of one pod's line, and the pod's orders; the test plays the server."""

    def __init__(self, devices: int, links: str, heartbeat_s: float, absent: tuple[int, ...]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        fleet = Fleet(pack_profiles([PROFILE] * devices), ["phone"] * devices, ["line"] * devices, {})
        self.pods = Pods(fleet, 1, f"tcp://127.0.0.1:{port}", links, absent)
        self._heartbeat_s = heartbeat_s
        self._piece = 0
        self.identity = b""
        self.heard: list[Message] = []
        self.reports: list[dict[str, Any]] = []

    def welcome(self) -> Join:
        join = self.next(Join)
        self.send(Welcome(self._heartbeat_s, "test"))
        return join

    def send(self, message: Message) -> None:
        self._router.send_multipart([self.identity, *(bytes(frame) for frame in encode(message))])

    def next(self, kind: type[Kind], limit_s: float = LIMIT_S) -> Kind:
        """The next message of this kind; others are kept in `heard`, an invalid one is a WireError."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.identity:
                self.send(Heartbeat())  # so that the pod does not miss us
            if not self._router.poll(20):
                self.pods.check()
                continue
            self.identity, *frames = self._router.recv_multipart()
            message = decode(frames)
            if isinstance(message, kind):
                return message
            self.heard.append(message)
        pytest.fail(f"no {kind.__name__} came; heard: {self.heard}")

    def order(self, do: str, *devices: int, **details: Any) -> dict[str, Any]:
        """Give an order and wait until it is carried out; the pod's report."""
        self.pods.order(0, {"do": do, "devices": list(devices), **details})
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for _, report in self.pods.exchange(0.05):
                assert report["do"] == do
                return report
            self.pods.check()
        pytest.fail(f"the order {do} was not reported")

    def work(self, *devices: int) -> int:
        """Send the same block to each of these indices of the connection; returns the stamp."""
        stamp_ns = time.monotonic_ns()
        one, two = self._piece, self._piece + 1
        self._piece += 2
        blocks = [(d, one, d, one, two, 0, 0, 0, 0, 1, 6, 5, 0, 1, 10_000) for d in devices]
        pieces = [(one, OUTER_MAJOR, 1, 6, 8), (two, OUTER_MAJOR, 1, 5, 8)]
        self.send(
            Work(
                stamp_ns,
                np.empty(0, np.uint32),
                np.array(pieces, dtype=PIECE),
                np.array(blocks, dtype=BLOCK),
                [LEFT.tobytes(), RIGHT.tobytes()],
            )
        )
        return stamp_ns

    def answers(self, count: int) -> list[tuple[int, int, NDArray[np.float32]]]:
        """The next `count` answers in order of arrival: index in the connection, due time, cells."""
        got: list[tuple[int, int, NDArray[np.float32]]] = []
        while len(got) < count:
            result = self.next(Result)
            cells = np.frombuffer(result.data, np.float32).reshape(-1, 6, 5)
            for row, product in zip(result.answers, cells, strict=True):
                got.append((int(row["device"]), int(row["due_ns"]), product))
        return got

    def close(self) -> None:
        self.pods.kill(0)
        self.pods.stop()
        self._context.destroy(linger=0)


OpenLine = Callable[..., PodLine]


@pytest.fixture
def open_line(nothing_left_behind: None) -> Iterator[OpenLine]:
    with contextlib.ExitStack() as stack:

        def opened(
            devices: int = 2, links: str = "off", heartbeat_s: float = 10.0, absent: tuple[int, ...] = ()
        ) -> PodLine:
            open_line = PodLine(devices, links, heartbeat_s, absent)
            stack.callback(open_line.close)
            return open_line

        yield opened


def test_a_device_that_leaves_says_so_and_answers_no_more(open_line: OpenLine) -> None:
    server = open_line()
    server.welcome()
    report = server.order("leave", 1)
    assert (report["devices"], report["count"]) == ([1], 1)
    assert server.next(Leave).devices.tolist() == [1]
    server.work(1, 0)
    ((device, _, product),) = server.answers(1)
    assert device == 0
    np.testing.assert_allclose(product, TRUTH, rtol=1e-5)
    server.work(0)
    assert [device for device, _, _ in server.answers(1)] == [0]  # and no answer of device 1 before it


def test_an_absent_device_cannot_leave_again(open_line: OpenLine) -> None:
    server = open_line()
    server.welcome()
    server.order("leave", 1)
    report = server.order("leave", 0, 1)
    assert (report["devices"], report["count"]) == ([0], 2)
    report = server.order("vanish", 0, 1)
    assert (report["devices"], report["count"]) == ([], 0)


def test_a_returning_device_joins_on_the_same_connection_under_a_new_index(open_line: OpenLine) -> None:
    server = open_line(devices=3)
    first = server.welcome()
    before = server.identity
    server.order("leave", 1)
    report = server.order("return", 1, 2)
    assert report["devices"] == [1]  # 2 is present
    back = server.next(Join)
    assert server.identity == before
    assert back.labels == [first.labels[1]]
    assert back.profiles.tolist() == [first.profiles[1].tolist()]
    server.work(1, 3)  # the old index, which is no longer valid, and the new one
    assert [device for device, _, _ in server.answers(1)] == [3]


def test_a_device_absent_at_first_joins_when_told(open_line: OpenLine) -> None:
    server = open_line(devices=3, absent=(0, 2))
    assert len(server.welcome().labels) == 1
    server.order("return", 0)
    assert len(server.next(Join).labels) == 1
    server.work(0, 1)
    assert {device for device, _, _ in server.answers(2)} == {0, 1}


def test_a_pod_without_devices_connects_with_the_first_that_joins(open_line: OpenLine) -> None:
    server = open_line(devices=2, absent=(0, 1))
    server.order("return", 1)
    (label,) = server.welcome().labels
    assert label == "phone/line/1"
    server.work(0)
    assert len(server.answers(1)) == 1


def test_a_vanished_device_never_answers_and_is_reported_when_a_server_would_miss_it(open_line: OpenLine) -> None:
    server = open_line(heartbeat_s=0.05)
    server.welcome()
    server.work(0, 1)
    server.answers(2)  # the pod has received the welcome
    report = server.order("vanish", 0)
    server.work(0, 1)
    assert [device for device, _, _ in server.answers(1)] == [1]
    missed = server.next(Leave)
    assert time.monotonic_ns() >= report["at_ns"] + 1e9 * SILENT_AFTER * 0.05  # never before
    assert missed.devices.tolist() == [0]
    assert missed.reason == "silent (emulated)"
    assert not any(isinstance(message, Result) for message in server.heard)


@pytest.mark.slow
def test_a_device_that_returns_before_it_is_missed_counts_twice_until_then(open_line: OpenLine) -> None:
    server = open_line(heartbeat_s=0.25)
    server.welcome()
    server.work(0)
    server.answers(1)
    server.order("vanish", 0)
    server.order("return", 0)
    server.next(Join)
    server.work(0, 2)
    assert [device for device, _, _ in server.answers(1)] == [2]
    assert server.next(Leave).devices.tolist() == [0]


@pytest.mark.slow
def test_answers_of_frozen_devices_come_when_the_freeze_ends(open_line: OpenLine) -> None:
    server = open_line()
    server.welcome()
    until_ns = server.order("freeze", 0, seconds=2.0)["at_ns"] + 2e9
    server.work(0, 1)
    ((first, _, _),) = server.answers(1)
    assert first == 1
    longer_ns = server.order("freeze", 0, seconds=2.25)["at_ns"] + 2.25e9  # work in progress waits too
    ((second, due_ns, product),) = server.answers(1)
    assert (second, due_ns) == (0, longer_ns)
    assert due_ns > until_ns
    assert time.monotonic_ns() >= due_ns - 1e6
    np.testing.assert_allclose(product, TRUTH, rtol=1e-5)


def test_a_device_frozen_beyond_the_silence_limit_is_lost_and_returns_when_the_freeze_ends(open_line: OpenLine) -> None:
    server = open_line(heartbeat_s=0.05)
    server.welcome()
    server.work(0, 1)
    server.answers(2)  # the pod has received the welcome
    report = server.order("freeze", 0, seconds=1.0)
    assert (report["devices"], report["count"]) == ([0], 1)
    server.work(0, 1)
    assert [device for device, _, _ in server.answers(1)] == [1]
    missed = server.next(Leave)
    assert time.monotonic_ns() >= report["at_ns"] + 1e9 * SILENT_AFTER * 0.05
    assert (missed.devices.tolist(), missed.reason) == ([0], "silent (emulated)")
    assert server.next(Join).labels == ["phone/line/0"]
    assert time.monotonic_ns() >= report["at_ns"] + 1e9
    server.work(0, 2)  # its old work is forgotten: it is a new device
    assert [device for device, _, _ in server.answers(1)] == [2]
    assert not any(isinstance(message, Result) for message in server.heard)


def test_a_frozen_device_that_leaves_stays_away_and_one_told_to_return_does_so_at_once(open_line: OpenLine) -> None:
    server = open_line(devices=3, heartbeat_s=0.05)
    server.welcome()
    server.work(0)
    server.answers(1)
    assert server.order("freeze", 0, 1, seconds=0.75)["devices"] == [0, 1]
    assert server.order("leave", 0)["devices"] == [0]
    assert server.order("leave", 0)["devices"] == []
    assert server.order("freeze", 2, seconds=3600.0)["devices"] == [2]
    assert server.order("return", 2)["devices"] == [2]
    joined = server.next(Join).labels + server.next(Join).labels
    assert joined == ["phone/line/2", "phone/line/1"]
    server.work(3, 4)
    assert {device for device, _, _ in server.answers(2)} == {3, 4}


def test_a_pod_with_all_devices_frozen_when_its_line_breaks_reconnects_when_the_first_thaws(
    open_line: OpenLine,
) -> None:
    server = open_line(devices=1, heartbeat_s=0.05)
    server.welcome()
    server.work(0)
    server.answers(1)
    server.order("freeze", 0, seconds=1.0)
    server.send(Refused("who are you?", final=False))
    assert server.welcome().labels == ["phone/line/0"]
    server.work(0)
    assert len(server.answers(1)) == 1


def test_slowed_devices_take_longer_by_the_factor_and_become_fast_again(open_line: OpenLine) -> None:
    server = open_line(links="model")
    server.welcome()

    def takes_ns() -> int:
        stamp_ns = server.work(0)
        return server.answers(1)[0][1] - stamp_ns

    normal = takes_ns()
    assert server.order("slow", 0, factor=4.0)["devices"] == [0]
    assert takes_ns() == pytest.approx(4 * normal, rel=1e-3)
    server.order("slow", 0, factor=2.0)
    assert takes_ns() == pytest.approx(2 * normal, rel=1e-3)  # relative to the profile, not to the previous speed
    server.order("slow", 0, factor=1.0)
    assert takes_ns() == pytest.approx(normal, rel=1e-3)


@pytest.mark.parametrize("how", LIES)
def test_a_liar_answers_wrongly_and_the_others_do_not(open_line: OpenLine, how: str) -> None:
    server = open_line()
    server.welcome()
    assert server.order("lie", 0, how=how)["count"] == 1
    server.work(0, 1)
    products = {device: product for device, _, product in server.answers(2)}
    np.testing.assert_allclose(products[1], TRUTH, rtol=1e-5)
    assert not np.allclose(products[0], TRUTH, rtol=1e-7 if how == "bias" else 1e-2)


def test_after_nonsense_and_refusal_the_pod_joins_again_with_its_present_devices(open_line: OpenLine) -> None:
    server = open_line(devices=3)
    server.welcome()
    first = server.identity
    server.order("leave", 1)
    server.next(Leave)
    assert server.order("corrupt")["devices"] == [0, 2]
    with pytest.raises(WireError):
        server.next(Result)
    server.send(Refused("that makes no sense", final=False))
    join = server.welcome()
    assert server.identity != first
    assert join.labels == ["phone/line/0", "phone/line/2"]
    server.work(0, 1)
    assert {device for device, _, _ in server.answers(2)} == {0, 1}
    server.order("return", 1)
    server.next(Join)
    server.work(2)
    assert server.answers(1)[0][0] == 2


def test_successive_orders_are_each_counted_and_carry_their_number(open_line: OpenLine) -> None:
    server = open_line()
    server.welcome()
    reports = [server.order("slow", 0, factor=2.0, number=n) for n in (7, 8, 9)]
    assert [(r["count"], r["number"]) for r in reports] == [(1, 7), (2, 8), (3, 9)]
    assert reports[0]["at_ns"] < reports[1]["at_ns"] < reports[2]["at_ns"]


def test_a_paused_pod_is_silent_until_it_is_resumed(open_line: OpenLine, until: Until) -> None:
    server = open_line()
    server.welcome()
    server.work(0)
    server.answers(1)
    server.pods.pause(0)
    process = psutil.Process(server.pods.pids[0])
    until(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped")
    server.work(0, 1)
    server.pods.check()  # it is alive
    server.pods.resume(0)
    assert {device for device, _, _ in server.answers(2)} == {0, 1}


def test_a_pod_killed_on_purpose_is_no_failure_and_any_other_is(open_line: OpenLine, until: Until) -> None:
    server = open_line()
    server.welcome()
    server.pods.kill(0)
    until(lambda: server.pods.codes[0] is not None, "the pod is dead")
    server.pods.check()
    other = open_line()
    other.welcome()
    os.kill(other.pods.pids[0], signal.SIGKILL)
    until(lambda: other.pods.codes[0] is not None, "the pod is dead")
    with pytest.raises(LaunchError):
        other.pods.check()


def test_an_invalid_order_ends_the_pod_with_a_reason(open_line: OpenLine, until: Until) -> None:
    server = open_line()
    server.welcome()
    server.pods.order(0, {"do": "dance"})
    server.pods.exchange()
    until(lambda: server.pods.codes[0] is not None, "the pod has ended")
    with pytest.raises(LaunchError, match="an order must be one of leave"):
        server.pods.check()


# ---- the parts


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("leave 3", "not JSON"),
        ('{"do": "dance"}', "must be one of"),
        ('{"do": "leave", "devices": [2]}', "beyond the 2"),
        ('{"do": "leave", "devices": [-1]}', "beyond the 2"),
        ('{"do": "leave", "devices": 1}', "does not add up"),
        ('{"do": "slow", "devices": [0], "factor": 0}', "factor of 0"),
        ('{"do": "freeze", "devices": [0], "seconds": -1}', "frozen for -1"),
        ('{"do": "lie", "devices": [0], "how": "kindly"}', "noise, element, stale, zeros, nan, signs, bias"),
    ],
)
def test_a_wrong_order_is_reported(line: str, told: str) -> None:
    with pytest.raises(OrderError, match=told):
        Order.parse(line, 2)


def test_an_index_of_the_connection_is_never_used_twice() -> None:
    roster = DeviceNumbers(3, absent=[1])
    assert roster.device.tolist() == [0, 2]
    assert roster.dismiss([2]).tolist() == [1]
    roster.admit([1, 2])
    assert roster.device.tolist() == [0, 2, 1, 2]
    assert roster.answering.tolist() == [True, False, True, True]
    assert roster.present == [0, 1, 2]
    roster.dismiss([0])
    assert roster.renumber() == [1, 2]
    assert roster.device.tolist() == [1, 2]


def test_each_lie_is_wrong_in_its_own_way() -> None:
    told: dict[str, NDArray[np.float32]] = {}
    for device, how in enumerate(LIES):
        liar = Liar()
        assert not liar
        liar.begin(device, how)
        assert liar.answer(device + 1, TRUTH) is TRUTH
        told[how] = liar.answer(device, TRUTH)
    assert (told["noise"] != TRUTH).all()
    assert (told["element"] != TRUTH).sum() == 1
    assert not told["zeros"].any()
    assert np.isnan(told["nan"]).sum() == 1
    assert ((told["signs"] != TRUTH) == (told["signs"] == -TRUTH)).all()
    assert (told["bias"] >= TRUTH).all()
    np.testing.assert_allclose(told["bias"], TRUTH, atol=2e-5 * np.abs(TRUTH).max())


def test_a_stale_answer_repeats_the_previous_block_whatever_its_shape() -> None:
    liar = Liar()
    liar.begin(0, "stale")
    liar.answer(0, TRUTH)
    np.testing.assert_array_equal(liar.answer(0, TRUTH[:2]), TRUTH[:2])
    larger = np.full((7, 5), 3, np.float32)
    assert liar.answer(0, larger).shape == larger.shape
    np.testing.assert_array_equal(liar.answer(0, TRUTH), 3)
