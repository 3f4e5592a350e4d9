"""A small part of `make fuzz` in every test run: under seeded nonsense a real server stays alive, right and small."""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from agent.identity.invitation import parse_link
from agent.identity.keys import Keys
from agent.protocol.connection import next_event
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import ANSWER, Hello, Join, WireError, decode
from ps.access.access_file import AccessFile
from ps.access.admission import Caller, ConnectionAdmission, Refusals, Tickets
from ps.access.joining import JoinAdmission
from ps.planning.plans import Shape, whole
from ps.transport.records import Records
from ps.transport.roster import MOST_IDLE
from testbed.access.inviting import new_invitation
from testbed.faults.fuzz import AT_ONCE, KEY_BYTES, KINDS, PRODUCT_BYTES, Outcome, Rest, fuzz
from testbed.faults.memory import Memory, memory
from testbed.faults.mutations import mutated, valid_messages

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Start, Until

MESSAGES = 10_000


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_server_survives_nonsense_before_and_after_the_handshake() -> None:
    outcome = fuzz(MESSAGES, seed=1)
    assert outcome.wrong == []
    assert outcome.messages >= MESSAGES
    assert set(KINDS) <= set(outcome.sent)
    assert outcome.server["enrolled"] == outcome.sent["keys"] > 0  # they were admitted before they sent nonsense
    assert outcome.server["dropped"] > outcome.sent["joins"] / 2
    assert outcome.server["refused"] > 100
    refusals = sum(count for text, count in outcome.server["said"].items() if text.startswith("refused"))
    assert 0 < refusals <= 201  # not one line per message
    kept = outcome.server["kept"]
    assert kept["joined"] > outcome.sent["joins"] / 2
    assert kept["numbers"] <= min(kept["joined"], kept["worked"] + MOST_IDLE + AT_ONCE)


def at_rest(
    in_use: int, outside: int = 0, free: int = 0, keys: int = 0, products: int = 0, messages: int = 500_000
) -> Rest:
    return Rest(messages, keys, products, Memory(in_use, free, outside, in_use + outside + free))


def test_a_bad_outcome_says_so() -> None:
    well = {"products": 3, "wrong": 0, "waits": False, "error": None}
    many, full = 10**6, {"joined": 9000, "numbers": 7000, "worked": 1}
    cold, flat = at_rest(40 << 20, messages=50_000), [at_rest(50 << 20), at_rest(50 << 20)]
    busy = at_rest((51 << 20) + 300 * PRODUCT_BYTES + 200 * KEY_BYTES, keys=200, products=300)
    for last in (flat[0], at_rest(51 << 20), busy, at_rest(50 << 20, free=1 << 30)):
        assert Outcome(0, many, exit_code=0, server=well, rests=[cold, *flat, last]).wrong == []
    assert Outcome(0, 10**4, exit_code=0, server=well, rests=[at_rest(60 << 20, messages=10**4)]).wrong == []
    for outcome in (
        Outcome(0, exit_code=1, server=well),
        Outcome(0, exit_code=0, server=well | {"error": "ValueError()"}),
        Outcome(0, exit_code=0, server=well | {"wrong": 1}),
        Outcome(0, exit_code=0, server=well | {"products": 0}),
        Outcome(0, exit_code=0, server=well | {"waits": True}),
        Outcome(0, exit_code=0, server=well, tracebacks=1),
        Outcome(0, exit_code=0, server=well, blocks_to_strangers=1),
        Outcome(0, exit_code=0, server=well, left_open=5),
        Outcome(0, many, exit_code=0, server=well),  # no memory was measured
        Outcome(0, many, exit_code=0, server=well, rests=[*flat, at_rest((51 << 20) + 1)]),
        Outcome(0, many, exit_code=0, server=well, rests=[*flat, at_rest(52 << 20), *flat]),
        Outcome(0, many, exit_code=0, server=well, rests=[*flat, at_rest(50 << 20, outside=(1 << 20) + 1)]),
        Outcome(0, exit_code=0, server=well | {"kept": full}),
    ):
        assert len(outcome.wrong) == 1


def malloced_bytes(something: Callable[[], None]) -> int:
    """Bytes it keeps, in malloc's units of 16 bytes, each with 8 bytes of overhead."""
    tracemalloc.start()
    try:
        something()
        gc.collect()
        return sum(max(32, (trace.size + 8 + 15) // 16 * 16) for trace in tracemalloc.take_snapshot().traces)
    finally:
        tracemalloc.stop()


def test_a_product_costs_a_server_no_less_than_the_verdict_subtracts() -> None:
    records, many = Records(), 200

    def complete() -> None:
        shape = Shape(1, 32, 32, 32)
        for job in range(1000, 1000 + many):
            records.answered(np.zeros(1, ANSWER), [0], time.time_ns(), due_counts=False)
            records.finished(job, "product", 0, shape, whole(shape), np.zeros(1, np.uint64))

    kept = malloced_bytes(complete)
    assert PRODUCT_BYTES <= kept / many < 1.25 * PRODUCT_BYTES


def test_a_key_costs_a_server_no_less_than_the_verdict_subtracts(tmp_path: Path) -> None:
    access, refusals, many = AccessFile(tmp_path), Refusals(lambda text: None), 200
    admission = ConnectionAdmission(access.impatient(), Tickets(), refusals)
    joining = JoinAdmission(access.impatient(), admission, refusals)
    token = parse_link(new_invitation(access, 300, 3600.0, ["192.0.2.1:5555"]).link).token
    join = Join(pack_profiles([Profile(1e9, 0.0, 1e8, 1e8, 0.01, 1 << 30, 8)]), ["fuzz"], {})

    def come(count: int) -> None:
        for _ in range(count):
            key = Keys.new().public
            assert admission.hello(key, Hello("fuzz", token)) is None
            assert admission.user_id(b"encrypted", b"CURVE", [z85.decode(key)]) is not None
            assert joining.may_read_join(Caller(key, of_the_run=False), 100) is None
            assert joining.admit(Caller(key, of_the_run=False), join, 0) is None
        joining.write()
        assert len(admission.read().enrolled) >= count

    come(1)
    kept = malloced_bytes(lambda: come(many))
    assert KEY_BYTES <= kept / many < 1.25 * KEY_BYTES


def test_memory_of_malloc_and_other_memory_are_distinguished() -> None:
    before = memory()
    if before is None:
        pytest.skip("no glibc 2.33 or later")
    taken = b"x" * (8 << 20)
    with_bytes = memory()
    with mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.write(taken)
        with_mapping = memory()
    assert with_bytes is not None
    assert with_mapping is not None
    assert with_bytes.in_use_bytes - before.in_use_bytes == pytest.approx(8 << 20, rel=0.1)
    assert with_mapping.outside_bytes - with_bytes.outside_bytes == pytest.approx(8 << 20, rel=0.1)
    assert with_mapping.in_use_bytes - with_bytes.in_use_bytes < 1 << 20


def test_monitoring_connections_leaves_nothing_behind() -> None:
    """pyzmq's own function keeps an enum member for every descriptor number."""
    members = zmq.Event._value2member_map_
    with zmq.Context() as context, context.socket(zmq.PAIR) as told, context.socket(zmq.PAIR) as teller:
        told.bind("inproc://events")
        teller.connect("inproc://events")
        before = len(members)
        for descriptor in range(3000, 3100):
            happened = int(zmq.EVENT_ACCEPTED).to_bytes(2, "little") + descriptor.to_bytes(4, "little")
            teller.send_multipart([happened, b"tcp://127.0.0.1:1"])
            assert next_event(told) == (zmq.EVENT_ACCEPTED, descriptor)
        assert len(members) == before


def test_a_fuzz_that_is_killed_leaves_nothing_running(
    start: Start, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`start` looks for leftovers."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = start("testbed.faults.fuzz", "--messages", "1000000")
    until(lambda: len(psutil.Process(program.pid).children()) == 2, "the server and the agent have started")
    children = psutil.Process(program.pid).children()
    until(lambda: all(child.net_connections("tcp") for child in children), "both are connected")
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: not any(child.is_running() for child in children), "both have ended too", limit_s=5.0)


@given(st.integers(0, 2**32))
def test_a_mutated_message_is_decoded_or_refused_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    valid = valid_messages("x" * 22)
    for frames in valid:
        decode(frames)
        try:
            decode(mutated(frames, rng))
        except WireError as error:
            assert str(error)  # noqa: PT017
