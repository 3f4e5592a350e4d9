"""Yardsticks for the work of one thread: fixed programs of plain Python and of NumPy on small arrays.

They do no part of the project's work. They only take longer on a slower machine, a slower Python or a slower NumPy, as
the dispatcher, the planner and the emulator do. Processor time, so that other programs of the machine hardly count.
"""

from __future__ import annotations

import heapq
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

EVENTS = 40_000
PENDING = 1_000
SIZE = 1_024  # as many entries as devices that are planned for
ROUNDS = 1_500


def processor_s(work: Callable[[], object]) -> float:
    """Processor seconds of this process."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def events() -> int:
    """A queue of events in plain Python: a heap of tuples, records in dictionaries, short lists."""
    queue = [(float(number), number, number % 97) for number in range(PENDING)]
    heapq.heapify(queue)
    held: dict[tuple[int, int], float] = {}
    done: list[int] = []
    for number in range(PENDING, PENDING + EVENTS):
        due, first, owner = heapq.heappop(queue)
        held[owner, first] = due
        if len(held) > PENDING:
            done += [first for _, first in held][:8]
            held.clear()
        heapq.heappush(queue, (due + 1.0 + (first * 31 % 101) / 7.0, number, (owner + first) % 97))
    return len(done)


def small_arrays() -> float:
    """What planning consists of: sorting, adding up and searching arrays of a fleet's size."""
    values = np.random.default_rng(0).uniform(0.1, 1.0, SIZE)
    total = 0.0
    for number in range(ROUNDS):
        order = np.argsort(values, kind="stable")
        sums = np.cumsum(values[order])
        share = np.maximum(values * (1.0 + number % 7), 0.3) / sums[-1]
        found = np.searchsorted(sums, share * sums[-1])
        total += float(np.bincount(found, values, SIZE + 1).max())
        values = np.roll(values, 1)
    return total


def bare_process_bytes() -> int:
    """Resident memory of a Python process that has only imported NumPy and pyzmq."""
    program = "import numpy, psutil, zmq; print(psutil.Process().memory_info().rss)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)
