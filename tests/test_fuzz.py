"""A small part of `make fuzz`, every time: a real server under seeded nonsense stays alive, right and small."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire import WireError, decode
from testbed.fuzz import Outcome, fuzz
from testbed.mutations import mutated, valid_messages

MESSAGES = 10_000


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_server_survives_nonsense_before_and_after_the_handshake() -> None:
    outcome = fuzz(MESSAGES, seed=1)
    assert outcome.wrong == []
    assert outcome.messages >= MESSAGES
    assert {"raw", "stranger", "invited", "plain"} <= set(outcome.sent)
    assert outcome.server["enrolled"] == outcome.sent["keys"] > 0  # they were in before they went wrong
    assert outcome.server["dropped"] > MESSAGES / 4
    refusals = sum(count for text, count in outcome.server["said"].items() if text.startswith("refused"))
    assert 0 < refusals <= 201  # not a line a message


def test_an_outcome_that_is_not_well_says_so() -> None:
    well = {"products": 3, "wrong": 0, "waits": False, "error": None}
    assert Outcome(0, exit_code=0, server=well, memory_bytes=[50 << 20] * 10).wrong == []
    for outcome in (
        Outcome(0, exit_code=1, server=well),
        Outcome(0, exit_code=0, server=well | {"error": "ValueError()"}),
        Outcome(0, exit_code=0, server=well | {"wrong": 1}),
        Outcome(0, exit_code=0, server=well | {"products": 0}),
        Outcome(0, exit_code=0, server=well | {"waits": True}),
        Outcome(0, exit_code=0, server=well, tracebacks=1),
        Outcome(0, exit_code=0, server=well, blocks_to_strangers=1),
        Outcome(0, exit_code=0, server=well, memory_bytes=[50 << 20] * 9 + [90 << 20]),
    ):
        assert len(outcome.wrong) == 1


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
