"""What the server records of every block."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np

from agent.protocol.wire import ANSWER, DONE
from ps.transport.records import Records


def test_answers_that_do_not_count_cost_no_memory() -> None:
    """Found by the fuzzer: every unsolicited answer left 250 bytes behind."""
    records = Records()
    answers = np.array([(0, 7, 3, DONE, 1, 0.0, 0)], ANSWER)
    tracemalloc.start()
    records.answered(answers, [0], 1, counted=set())
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(1000):
        records.answered(answers, [0], 1, counted=set())
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000
    assert records.columns() == {}
