"""Chaos must find a bug that was planted: the search for it, and the test that chaos prints about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from testbed.faults.chaos import DISPATCHER, Failure, Kind, Tally, as_test, failure_of, live_one
from testbed.faults.chaos_world import Operation

Plant = Callable[[pytest.MonkeyPatch], None]


def first_failure(kind: Kind = DISPATCHER, most: int = 200, begin: int = 0) -> tuple[int, list[Operation], Failure]:
    """The first seed whose world breaks a promise, and how."""
    for seed in range(begin, begin + most):
        if broken := live_one(seed, Tally(), kind):
            return seed, *broken
    raise AssertionError(f"{most} worlds, and the bug was not found")


def printed_test_fails_alike(
    smallest: Sequence[Operation], failure: Failure, seed: int, kind: Kind = DISPATCHER
) -> Callable[[], None]:
    """The test that chaos prints about these operations; it has failed with the same text. To be called once more
    without the bug: then it must pass."""
    shrunk = failure_of(smallest, kind=kind)
    assert shrunk is not None
    assert shrunk.kind == failure.kind
    namespace: dict[str, Any] = {}
    exec(as_test(smallest, shrunk, seed, kind), namespace)
    test: Callable[[], None] = namespace[f"test_the_world_of_seed_{seed}"]
    with pytest.raises(Exception) as caught:  # noqa: PT011 what it raises is compared below
        test()
    assert f"{type(caught.value).__name__}: {caught.value}" == shrunk.text
    return test
