"""Ray on the benchmark's work, as its users would write it: one call per block, two worker processes.

Runs alone, in an interpreter that has NumPy, psutil and Ray: `python peer_ray.py [--repeats K] [--limit-s S]` prints
one line of JSON. Ray offers several ways, and which is fastest depends on the block, so all are tried and the best way
counts: tasks or one actor per worker (which skips Ray's scheduling; one actor per device would be one process per
device), and slabs put into the object store once or, if they are small enough for Ray to send them inside the call,
passed as arguments. Seconds run from the operands to the assembled result.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 2
REPEAT_LIMIT_S = 8.0  # a product is not repeated once it has taken this much time
INLINE_BELOW_BYTES = 100 * 1024  # Ray's own limit for arguments that travel inside the call
OBJECT_STORE_BYTES = 512 * 1024 * 1024

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

np: Any = importlib.import_module("numpy")
psutil: Any = importlib.import_module("psutil")
ray: Any = importlib.import_module("ray")

Call = Callable[[int, Any, Any], Any]


def multiply(a: Any, b: Any) -> Any:
    return a @ b


class Multiplier:
    def multiply(self, a: Any, b: Any) -> Any:
        return a @ b


def tasks() -> Call:
    task = ray.remote(multiply)
    return lambda _, a, b: task.remote(a, b)


def actors() -> Call:
    members = [ray.remote(Multiplier).options(num_cpus=1).remote() for _ in range(WORKERS)]
    return lambda block, a, b: members[block % WORKERS].multiply.remote(a, b)


def product(work: Any, a: Any, b: Any, call: Call, hand_over: Callable[[Any], Any]) -> Any:
    """A B: make every slab ready once, hand out every block, wait for all, assemble."""
    rectangles = work.rectangles().tolist()
    row_slabs, column_slabs = {}, {}
    for row, rows, column, columns in rectangles:
        if row not in row_slabs:
            row_slabs[row] = hand_over(a[row : row + rows])
        if column not in column_slabs:
            column_slabs[column] = hand_over(np.ascontiguousarray(b[:, column : column + columns]))
    answers = [call(i, row_slabs[row], column_slabs[column]) for i, (row, _, column, _) in enumerate(rectangles)]
    result = np.empty((work.m, work.q), dtype=np.float32)
    for (row, rows, column, columns), values in zip(rectangles, ray.get(answers), strict=True):
        result[row : row + rows, column : column + columns] = values
    return result


def measure(work: Any, repeats: int, once: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Best of several products, after one that warms up and is checked."""
    a, b = work.operands()
    begin = time.perf_counter()
    worst = float(np.abs(once(a, b) - a @ b).max())
    if not worst <= 1e-6 * work.n:
        raise RuntimeError(f"{work.name}: the result is off by {worst:.3g}")
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or time.perf_counter() - begin < REPEAT_LIMIT_S):
        start = time.perf_counter()
        once(a, b)
        seconds.append(time.perf_counter() - start)
    best_s = min(seconds)
    return {
        "seconds": best_s,
        "all_seconds": seconds,
        "blocks_per_s": work.blocks / best_s,
        "memory_bytes": memory_bytes(),
    }


def memory_bytes() -> int:
    """Memory of this process and its descendants; shared pages count once if the system reports them (Linux)."""
    total = 0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            memory = process.memory_full_info()
        except psutil.Error:
            continue  # the process has just ended
        total += getattr(memory, "pss", memory.rss)
    return total


def works() -> list[Any]:
    """W1, W2 and the rounds of W3, from work.py next to this file."""
    specification = importlib.util.spec_from_file_location("work", Path(__file__).with_name("work.py"))
    if specification is None or specification.loader is None:
        raise FileNotFoundError("work.py must stand beside this script")
    module: Any = importlib.util.module_from_spec(specification)
    sys.modules["work"] = module
    specification.loader.exec_module(module)
    return [module.W1, module.W2, module.round_of(1000), module.round_of(4000)]


def stop(number: int, _frame: object) -> None:
    sys.stderr.write(f"ended by {signal.Signals(number).name} before it was finished\n")
    raise SystemExit(1)


def measure_all(repeats: int, folder: str) -> dict[str, Any]:
    """Every work in every way: {work: figures of the best way, and of each way}."""
    ways: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in (tasks, actors):
        try:
            ray.init(
                num_cpus=WORKERS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
            )
            call = kind()
            for work in works():
                slab_bytes = 4 * work.n * max(work.block_rows, work.block_columns)
                for name, hand_over in (("slabs put", ray.put), ("slabs as arguments", lambda slab: slab)):
                    if hand_over is ray.put or slab_bytes < INLINE_BELOW_BYTES:
                        figures = measure(work, repeats, lambda a, b: product(work, a, b, call, hand_over))  # noqa: B023
                        ways.setdefault(work.name, {})[f"{kind.__name__}, {name}"] = figures
        finally:
            ray.shutdown()
    best = {name: min(tried, key=lambda way: tried[way]["seconds"]) for name, tried in ways.items()}
    return {name: {"way": best[name], **tried[best[name]], "ways": tried} for name, tried in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ray on the benchmark's work")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=int, default=400, help="give up after this many seconds")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(arguments.limit_s)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        measured = measure_all(arguments.repeats, folder)
        signal.alarm(0)
    report = {"version": ray.__version__, "python": platform.python_version(), "workers": WORKERS, "works": measured}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
