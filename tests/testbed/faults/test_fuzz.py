"""A small part of `make fuzz`, every time: a real server under seeded nonsense stays alive, right and small."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.wire import WireError, decode
from ps.transport.roster import MOST_IDLE
from testbed.faults.fuzz import AT_ONCE, KINDS, Outcome, fuzz
from testbed.faults.mutations import mutated, valid_messages

if TYPE_CHECKING:
    from conftest import Start, Until

MESSAGES = 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_server_survives_nonsense_before_and_after_the_handshake() -> None:
    outcome = fuzz(MESSAGES, seed=1)
    assert outcome.wrong == []
    assert outcome.messages >= MESSAGES
    assert set(KINDS) <= set(outcome.sent)
    assert outcome.server["enrolled"] == outcome.sent["keys"] > 0  # they were in before they went wrong
    assert outcome.server["dropped"] > outcome.sent["joins"] / 2
    assert outcome.server["refused"] > 100
    refusals = sum(count for text, count in outcome.server["said"].items() if text.startswith("refused"))
    assert 0 < refusals <= 201  # not a line a message
    kept = outcome.server["kept"]
    assert kept["joined"] > outcome.sent["joins"] / 2
    assert kept["numbers"] <= min(kept["joined"], kept["worked"] + MOST_IDLE + AT_ONCE)


def test_an_outcome_that_is_not_well_says_so() -> None:
    well = {"products": 3, "wrong": 0, "waits": False, "error": None}
    many = 10**6
    warm, flat, full = [40 << 20] * 10, [50 << 20] * 90, {"joined": 9000, "numbers": 7000, "worked": 1}
    assert Outcome(0, many, exit_code=0, server=well, memory_bytes=[*warm, *flat, 52 << 20]).wrong == []
    assert Outcome(0, 10**4, exit_code=0, server=well, memory_bytes=[*warm, *flat, 60 << 20]).wrong == []
    for outcome in (
        Outcome(0, exit_code=1, server=well),
        Outcome(0, exit_code=0, server=well | {"error": "ValueError()"}),
        Outcome(0, exit_code=0, server=well | {"wrong": 1}),
        Outcome(0, exit_code=0, server=well | {"products": 0}),
        Outcome(0, exit_code=0, server=well | {"waits": True}),
        Outcome(0, exit_code=0, server=well, tracebacks=1),
        Outcome(0, exit_code=0, server=well, blocks_to_strangers=1),
        Outcome(0, many, exit_code=0, server=well, memory_bytes=[*warm, *flat, (52 << 20) + 4096]),
        Outcome(0, many, exit_code=0, server=well, memory_bytes=[*warm, *flat, 53 << 20, 50 << 20]),
        Outcome(0, exit_code=0, server=well | {"kept": full}),
    ):
        assert len(outcome.wrong) == 1


@pytest.mark.slow
def test_a_fuzz_that_is_killed_leaves_nothing_running(
    start: Start, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`start` looks for what is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = start("testbed.faults.fuzz", "--messages", "1000000")
    until(lambda: len(psutil.Process(program.pid).children()) == 2, "it has a server and an agent")
    children = psutil.Process(program.pid).children()
    until(lambda: all(child.net_connections("tcp") for child in children), "they are at work")
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: not any(child.is_running() for child in children), "they are gone, too", limit_s=5.0)


@given(st.integers(0, 2**32))
def test_a_mutated_message_is_one_or_is_refused_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    valid = valid_messages("x" * 22)
    for frames in valid:
        decode(frames)
        try:
            decode(mutated(frames, rng))
        except WireError as error:
            assert str(error)  # noqa: PT017
