"""The yardstick: pyzmq and NumPy alone on the same messages, and NumPy without messages.

One ROUTER here and worker processes with one BLAS thread each, over TCP on the loopback. A block is one message and its
result is one message; large frames are sent without a copy; each worker has a few blocks in flight. No planning, no
checks, no emulation and no batching of blocks: what a ZeroMQ expert would write by hand. Two variants: each worker gets
a slab once (the harder yardstick), or with every block that needs it.

A worker reads its standard input only to notice its end: when this process ends, however it ends, so does the worker.
`python -m testbed.bench.yardsticks.raw` prints a table.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from testbed.bench.yardsticks.work import W1, W2, Matrix, Work

# product, block, row slab, column slab, rows, inner length, columns, which slabs follow
HEADER = struct.Struct("<8I")
BLOCK_NUMBER = struct.Struct("<I")
ROW_SLAB_FOLLOWS, COLUMN_SLAB_FOLLOWS = 1, 2
READY, STOP = b"ready", b"stop"

COPY_BELOW_BYTES = 64 * 1024
WINDOW_BYTES = 16 * 1024 * 1024
WINDOW_BLOCKS = (2, 128)
SILENCE_LIMIT_S = 60.0
DEATH_LIMIT_S = 5.0  # from the end of a connection to the end of its process; microseconds unless a core is contended
NUMPY_LIMIT_S = 300.0
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class RawWorkers:
    """Worker processes and their ROUTER; use in a `with` block, which ends all workers."""

    def __init__(self, workers: int = 2) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._identities: list[bytes] = []
        self._products = 0
        try:
            self._start(workers)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"RawWorkers(pids={self.pids}, products={self._products})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, workers: int) -> None:
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the window bounds what is in flight
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.RCVTIMEO, 1000)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(workers):
            self._processes.append(_python("worker", f"tcp://127.0.0.1:{port}", threads=1))
        while len(self._identities) < workers:
            self._identities.append(self._next_sender())
            self._socket.recv()  # READY

    def _next_sender(self) -> bytes:
        """The first frame of the next message; raises if a worker has died or all are silent."""
        for _ in range(int(SILENCE_LIMIT_S)):
            try:
                return self._socket.recv()
            except zmq.Again:
                self._complain_of_the_dead()
        raise RuntimeError(f"no raw ZeroMQ worker has spoken for {SILENCE_LIMIT_S:.0f} s; is the machine overloaded?")

    def _wait_for_a_death(self) -> None:
        """Return when a worker has ended, or after a time limit."""
        until = time.monotonic() + DEATH_LIMIT_S
        while time.monotonic() < until and all(process.poll() is None for process in self._processes):
            time.sleep(0.01)

    def _complain_of_the_dead(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"raw ZeroMQ worker {process.pid} ended with code {process.returncode}")

    def multiply(self, work: Work, a: Matrix, b: Matrix, *, slab_once: bool = True) -> Matrix:
        """A B over the workers, from the submitted product to the assembled result."""
        self._products += 1
        socket, product, inner, more = self._socket, self._products, work.n, zmq.SNDMORE
        copy_result = 4 * work.block_rows * work.block_columns < COPY_BELOW_BYTES
        rectangles: list[list[int]] = work.rectangles().tolist()
        result = np.empty((work.m, work.q), dtype=np.float32)
        # Column by column, one worker from the front and the other from the back: each needs half of the column slabs,
        # and the faster worker takes more blocks.
        todo = deque(sorted(range(len(rectangles)), key=lambda block: (rectangles[block][2], rectangles[block][0])))
        take = {identity: (todo.popleft, todo.pop)[i % 2] for i, identity in enumerate(self._identities)}
        row_slabs: dict[int, zmq.Frame] = {}
        column_slabs: dict[int, zmq.Frame] = {}
        rows_sent: dict[bytes, set[int]] = {identity: set() for identity in self._identities}
        columns_sent: dict[bytes, set[int]] = {identity: set() for identity in self._identities}

        def send(identity: bytes, block: int) -> None:
            row, rows, column, columns = rectangles[block]
            follows = 0
            if not slab_once or row not in rows_sent[identity]:
                rows_sent[identity].add(row)
                follows |= ROW_SLAB_FOLLOWS
            if not slab_once or column not in columns_sent[identity]:
                columns_sent[identity].add(column)
                follows |= COLUMN_SLAB_FOLLOWS
            try:
                socket.send(identity, more)
            except zmq.ZMQError:  # that worker's connection has ended, and the kernel may still be ending its process
                self._wait_for_a_death()
                self._complain_of_the_dead()
                raise
            header = HEADER.pack(product, block, row, column, rows, inner, columns, follows)
            socket.send(header, more if follows else 0)
            if follows & ROW_SLAB_FOLLOWS:
                slab = row_slabs.get(row)
                if slab is None:
                    slab = row_slabs[row] = _frame(a[row : row + rows])
                socket.send(slab, more if follows & COLUMN_SLAB_FOLLOWS else 0, copy=False)
            if follows & COLUMN_SLAB_FOLLOWS:
                slab = column_slabs.get(column)
                if slab is None:
                    slab = column_slabs[column] = _frame(b[:, column : column + columns])
                socket.send(slab, copy=False)

        for _ in range(_window(work)):
            for identity in self._identities:
                if todo:
                    send(identity, take[identity]())
        for _ in rectangles:
            identity = self._next_sender()
            (block,) = BLOCK_NUMBER.unpack(socket.recv())
            values = socket.recv() if copy_result else socket.recv(copy=False).buffer
            if todo:
                send(identity, take[identity]())
            row, rows, column, columns = rectangles[block]
            data = np.frombuffer(values, np.float32)
            result[row : row + rows, column : column + columns] = data.reshape(rows, columns)
        return result

    def close(self) -> None:
        for identity in self._identities:
            with suppress(zmq.ZMQError):  # the worker has already gone
                self._socket.send_multipart([identity, STOP], zmq.NOBLOCK)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._identities, self._processes = [], []
        self._socket.close(0)
        self._context.term()


def raw_zmq(work: Work, *, slab_once: bool = True, repeats: int = 5, workers: int = 2) -> float:
    """Seconds of the best of several products, after one that warms up and is checked."""
    a, b = work.operands()
    with RawWorkers(workers) as pool:
        check(work, pool.multiply(work, a, b, slab_once=slab_once), a, b)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            pool.multiply(work, a, b, slab_once=slab_once)
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def numpy_in_process(work: Work, threads: int, repeats: int = 5) -> float:
    """Seconds of A @ B, best of several, in a process of its own: BLAS reads its number of threads when it starts."""
    sizes = [str(size) for size in (work.m, work.n, work.q, work.block_rows, work.block_columns)]
    with _python("numpy", *sizes, str(repeats), threads=threads) as process:
        limit = threading.Timer(NUMPY_LIMIT_S, process.kill)
        limit.start()
        try:
            # Not communicate(): closing standard input would end the process.
            answer = process.stdout.read() if process.stdout else b""
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"NumPy with {threads} threads ended with code {process.returncode}; its error is above")
    return float(answer)


def check(work: Work, result: Matrix, a: Matrix, b: Matrix) -> None:
    """Raise unless the result is A B up to the rounding of float32."""
    worst = float(np.abs(result - a @ b).max())
    if not worst <= 1e-6 * work.n:
        raise RuntimeError(f"{work.name}: the assembled result is off by {worst:.3g}: these seconds measure nothing")


def _window(work: Work) -> int:
    """Blocks in flight per worker: two large blocks hide the link, many small blocks hide the round trip."""
    fewest, most = WINDOW_BLOCKS
    return max(fewest, min(most, WINDOW_BYTES // (4 * work.n * (work.block_rows + work.block_columns))))


def _frame(slab: Matrix) -> zmq.Frame:
    return zmq.Frame(np.ascontiguousarray(slab), copy=False, track=False)


def _python(*arguments: str, threads: int) -> subprocess.Popen[bytes]:
    """This module in another process with this many BLAS threads; it ends when its standard input does."""
    environment = dict(os.environ, **dict.fromkeys(BLAS_THREADS, str(threads)))
    root = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "testbed.bench.yardsticks.raw", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _end_with_parent() -> None:
    def wait_for_the_end() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=wait_for_the_end, daemon=True).start()


def _work_for(endpoint: str) -> None:
    """The worker: receive a block, multiply, send the result, until told to stop."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        socket.send(READY)
        current = 0
        row_slabs: dict[int, Matrix] = {}
        column_slabs: dict[int, Matrix] = {}
        while (message := socket.recv()) != STOP:
            product, block, row, column, rows, inner, columns, follows = HEADER.unpack(message)
            if product != current:
                current = product
                row_slabs.clear()
                column_slabs.clear()
            if follows & ROW_SLAB_FOLLOWS:
                row_slabs[row] = np.frombuffer(socket.recv(copy=False).buffer, np.float32).reshape(rows, inner)
            if follows & COLUMN_SLAB_FOLLOWS:
                column_slabs[column] = np.frombuffer(socket.recv(copy=False).buffer, np.float32).reshape(inner, columns)
            values = row_slabs[row] @ column_slabs[column]
            socket.send(BLOCK_NUMBER.pack(block), zmq.SNDMORE)
            socket.send(values.data, 0, values.nbytes < COPY_BELOW_BYTES)


def _time_numpy(work: Work, repeats: int) -> float:
    a, b = work.operands()
    a @ b
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["worker", endpoint]:
            _end_with_parent()
            _work_for(endpoint)
        case ["numpy", *sizes, repeats]:
            _end_with_parent()
            m, n, q, block_rows, block_columns = map(int, sizes)
            sys.stdout.write(f"{_time_numpy(Work('numpy', m, n, q, block_rows, block_columns), int(repeats))}\n")
        case _:
            for work in (W1, W2):
                sys.stdout.write(
                    f"{work.name}: NumPy 1 thread {numpy_in_process(work, 1):.4f} s, 2 threads"
                    f" {numpy_in_process(work, 2):.4f} s; raw ZeroMQ, slab once per worker {raw_zmq(work):.4f} s,"
                    f" slab with every block {raw_zmq(work, slab_once=False):.4f} s\n"
                )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
