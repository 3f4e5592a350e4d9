"""Block products: ONNX Runtime or NumPy, whichever this device measures as faster.

NumPy is a full fallback: on phones the ONNX Runtime package is sometimes missing or broken. The ONNX model is a single
node, encoded here byte by byte, so the `onnx` package is not needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Kernel(Protocol):
    name: str

    def product(self, left: Array, right: Array) -> Array:
        """left @ right, with or without a batch axis. Either may be a transposed view."""
        ...


class NumpyKernel:
    name = "numpy"

    def product(self, left: Array, right: Array) -> Array:
        result: Array = np.matmul(left, right)
        return result


class OnnxKernel:
    """One session per combination of operand layouts (four in all); shapes are dynamic."""

    name = "onnxruntime"

    def __init__(self, threads: int = 1) -> None:
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # else importing it writes an ID into the user's files
        import onnxruntime

        onnxruntime.disable_telemetry_events()  # a volunteer's phone sends nothing but results
        onnxruntime.set_default_logger_severity(3)
        self._ort = onnxruntime
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.inter_op_num_threads = 1
        self._sessions: dict[tuple[bool, bool], Any] = {}

    def product(self, left: Array, right: Array) -> Array:
        left, left_flipped = _as_stored(left)
        right, right_flipped = _as_stored(right)
        session = self._sessions.get((left_flipped, right_flipped))
        if session is None:
            session = self._ort.InferenceSession(
                matmul_model(left_flipped, right_flipped), self._options, providers=["CPUExecutionProvider"]
            )
            self._sessions[left_flipped, right_flipped] = session
        result: Array = session.run(None, {"A": left, "B": right})[0]
        return result


def _as_stored(array: Array) -> tuple[Array, bool]:
    """The array as laid out in memory, and whether that is its transpose."""
    if array.flags.c_contiguous:
        return array, False
    flipped = array.swapaxes(-1, -2)
    if flipped.flags.c_contiguous:
        return flipped, True
    return np.ascontiguousarray(array), False


class Abandoned(Exception):
    """The product was abandoned before it was complete."""


class InParts:
    """A kernel whose long products can be abandoned: it computes them in strips of rows and calls `abandoned` before
    each strip."""

    def __init__(self, kernel: Kernel, part_flops: float, abandoned: Callable[[], bool]) -> None:
        self.name = kernel.name
        self._kernel, self._part_flops, self._abandoned = kernel, part_flops, abandoned

    def product(self, left: Array, right: Array) -> Array:
        if self._abandoned():
            raise Abandoned
        rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        batch = left.shape[0] if left.ndim == 3 else 1
        if 2.0 * batch * rows * inner * columns <= self._part_flops:
            return self._kernel.product(left, right)
        if left.ndim == 3:
            whole = np.empty((batch, rows, columns), np.float32)  # np.stack would hold the output twice
            for index in range(batch):
                whole[index] = self.product(left[index], right[index])
            return whole
        height = max(1, int(self._part_flops / (2.0 * inner * columns)))
        if height >= rows:
            return self._kernel.product(left, right)
        out = np.empty((rows, columns), np.float32)
        for row in range(0, rows, height):
            out[row : row + height] = self.product(left[row : row + height], right)
        return out


def matmul_model(transpose_left: bool = False, transpose_right: bool = False) -> bytes:
    """A one-node ONNX model, C = A B, of any rank and size; either operand may be transposed."""

    def varint(value: int) -> bytes:
        out = b""
        while value > 0x7F:
            out += bytes([value & 0x7F | 0x80])
            value >>= 7
        return out + bytes([value])

    def number(tag: int, value: int) -> bytes:
        return varint(tag << 3) + varint(value)

    def chunk(tag: int, value: bytes | str) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return varint(tag << 3 | 2) + varint(len(raw)) + raw

    def attribute(name: str, value: int) -> bytes:
        return chunk(5, chunk(1, name) + number(3, value) + number(20, 2))

    def tensor(tag: int, name: str) -> bytes:
        return chunk(tag, chunk(1, name) + chunk(2, chunk(1, number(1, 1))))  # float32, shape left open

    node = chunk(1, "A") + chunk(1, "B") + chunk(2, "C") + chunk(4, "FusedMatMul")
    node += attribute("transA", int(transpose_left)) + attribute("transB", int(transpose_right))
    node += chunk(7, "com.microsoft")
    graph = chunk(1, node) + chunk(2, "block") + tensor(11, "A") + tensor(11, "B") + tensor(12, "C")
    opsets = chunk(8, chunk(1, "") + number(2, 13)) + chunk(8, chunk(1, "com.microsoft") + number(2, 1))
    return number(1, 8) + chunk(7, graph) + opsets


@dataclass(frozen=True, slots=True)
class Measured:
    kernel: Kernel
    flops: float
    overhead_s: float
    rejected: dict[str, str]  # kernel -> why it was not picked


def available_kernels(threads: int = 1, only: str | None = None) -> tuple[list[Kernel], dict[str, str]]:
    """The usable kernels, and why others were rejected. With `only` = numpy, ONNX Runtime is not imported: that takes
    45 MiB."""
    kernels: list[Kernel] = [NumpyKernel()]
    rejected: dict[str, str] = {}
    if only == NumpyKernel.name:
        return kernels, rejected
    try:
        onnx = OnnxKernel(threads)
        _self_test(onnx)
        kernels.append(onnx)
    except Exception as error:  # a broken installation may raise anything; fall back to NumPy
        rejected["onnxruntime"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return kernels, rejected


def pick_kernel(only: str | None = None, threads: int = 1, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Time each kernel briefly and pick the fastest, or time only the one asked for."""
    kernels, rejected = available_kernels(threads, only)
    if only is not None:
        kernels = [k for k in kernels if k.name == only]
        if not kernels:
            raise ValueError(f"kernel {only!r} cannot be used here: {rejected.get(only, 'there is no such kernel')}")
    rng = np.random.default_rng(0)
    large = rng.random((384, 384), dtype=np.float32), rng.random((384, 384), dtype=np.float32).T
    small = rng.random((1, 16), dtype=np.float32), rng.random((16, 1), dtype=np.float32)

    def best_s(kernel: Kernel, factors: tuple[Array, Array], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start = clock()
            kernel.product(*factors)
            times.append(clock() - start)
        return max(min(times), 1e-9)

    timed = [(best_s(k, large, 12), i, k) for i, k in enumerate(kernels)]
    seconds, _, kernel = min(timed)
    for other_s, _, other in timed:
        if other is not kernel:
            rejected[other.name] = f"measured {other_s / seconds:.2f}x slower"
    return Measured(kernel, 2 * 384**3 / seconds, best_s(kernel, small, 50), rejected)


def _self_test(kernel: Kernel) -> None:
    rng = np.random.default_rng(1)
    left, right = rng.random((2, 3, 5), dtype=np.float32), rng.random((2, 4, 5), dtype=np.float32).transpose(0, 2, 1)
    for one, two in ((left, right), (left[0], right[0])):
        if not np.allclose(kernel.product(one, two), one @ two, rtol=1e-5):
            raise ArithmeticError(f"{kernel.name} gives wrong products")
