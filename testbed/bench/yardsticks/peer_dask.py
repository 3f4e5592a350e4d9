"""Dask on the benchmark's work, as its users would write it: slabs scattered once, one task per block, two workers.

Runs alone, in an interpreter that has NumPy, psutil and dask.distributed: `python peer_dask.py [--repeats K] [--limit-s
S]` prints one line of JSON. Slabs and results go directly between this process and the workers, not through the
scheduler: the fastest way tried (broadcast slabs, slabs as arguments and Dask's actors were not faster). Seconds run
from the operands to the assembled result.
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
from pathlib import Path
from typing import Any

WORKERS = 2
REPEAT_LIMIT_S = 20.0  # a product is not repeated once it has taken this much time

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

np: Any = importlib.import_module("numpy")
psutil: Any = importlib.import_module("psutil")
distributed: Any = importlib.import_module("distributed")


def multiply(a: Any, b: Any) -> Any:
    return a @ b


def product(client: Any, work: Any, a: Any, b: Any) -> Any:
    """A B: scatter each slab once, hand out every block, wait for all, assemble."""
    rectangles = work.rectangles().tolist()
    rows_of = {row: a[row : row + rows] for row, rows, _, _ in rectangles}
    columns_of = {column: (column, column + columns) for _, _, column, columns in rectangles}
    packed = [np.ascontiguousarray(b[:, first:end]) for first, end in columns_of.values()]
    row_slabs = dict(zip(rows_of, client.scatter(list(rows_of.values()), hash=False, direct=True), strict=True))
    column_slabs = dict(zip(columns_of, client.scatter(packed, hash=False, direct=True), strict=True))
    answers = client.map(
        multiply,
        [row_slabs[row] for row, _, _, _ in rectangles],
        [column_slabs[column] for _, _, column, _ in rectangles],
        pure=False,
    )
    result = np.empty((work.m, work.q), dtype=np.float32)
    for (row, rows, column, columns), values in zip(rectangles, client.gather(answers, direct=True), strict=True):
        result[row : row + rows, column : column + columns] = values
    return result


def measure(client: Any, work: Any, repeats: int) -> dict[str, Any]:
    """Best of several products, after one that warms up and is checked."""
    a, b = work.operands()
    begin = time.perf_counter()
    worst = float(np.abs(product(client, work, a, b) - a @ b).max())
    if not worst <= 1e-6 * work.n:
        raise RuntimeError(f"{work.name}: the result is off by {worst:.3g}")
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or time.perf_counter() - begin < REPEAT_LIMIT_S):
        start = time.perf_counter()
        product(client, work, a, b)
        seconds.append(time.perf_counter() - start)
    best_s = min(seconds)
    return {
        "way": "tasks, slabs scattered",
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Dask on the benchmark's work")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=int, default=400, help="give up after this many seconds")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(arguments.limit_s)
    with (
        tempfile.TemporaryDirectory(prefix="dask-", ignore_cleanup_errors=True) as folder,
        distributed.LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=folder,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        measured = {work.name: measure(client, work, arguments.repeats) for work in works()}
        signal.alarm(0)
    report = {
        "version": distributed.__version__,
        "python": platform.python_version(),
        "workers": WORKERS,
        "works": measured,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
