"""Promises of agent.compute.kernels: every kernel multiplies operands in any memory layout, and NumPy is always
available."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from places import ROOT

from agent.compute import kernels
from agent.compute.kernels import Array, Kernel, NumpyKernel, OnnxKernel, available_kernels, matmul_model, pick_kernel

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test

KERNELS: dict[str, Callable[[], Kernel]] = {"numpy": NumpyKernel, "onnxruntime": OnnxKernel}


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "onnxruntime":
        pytest.importorskip("onnxruntime")
    return KERNELS[request.param]()


def _sliced(x: Array) -> Array:
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 2), (3, 1)])[..., 1:-2, 3:-1]


# the same numbers in different memory layouts
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "plain": np.ascontiguousarray,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "sliced": _sliced,
    "sliced and transposed": lambda x: _sliced(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "every other": lambda x: np.repeat(np.repeat(x, 2, axis=-1), 2, axis=-2)[..., ::2, ::2],
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
}
sizes = st.one_of(st.just(1), st.integers(1, 70))


def assert_product(kernel: Kernel, left: Array, right: Array) -> None:
    got = kernel.product(left, right)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    # error bound for a float32 sum of `inner` terms in any order
    bound = (left.shape[-1] + 1) * np.finfo(np.float32).eps * (np.abs(left).astype(float) @ np.abs(right).astype(float))
    assert got.dtype == np.float32
    assert got.shape == exact.shape
    assert (np.abs(got - exact) <= bound).all()


@settings(calm, max_examples=120)
@given(
    batch=st.one_of(st.none(), st.integers(1, 4)),
    rows=sizes,
    inner=sizes,
    columns=sizes,
    left_layout=st.sampled_from(sorted(LAYOUTS)),
    right_layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 2**32 - 1),
)
@example(batch=None, rows=1, inner=1, columns=1, left_layout="plain", right_layout="plain", seed=0)
@example(batch=3, rows=1, inner=70, columns=1, left_layout="transposed", right_layout="transposed", seed=0)
def test_a_kernel_agrees_with_double_precision(
    kernel: Kernel,
    batch: int | None,
    rows: int,
    inner: int,
    columns: int,
    left_layout: str,
    right_layout: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    front = () if batch is None else (batch,)
    left = LAYOUTS[left_layout](rng.standard_normal((*front, rows, inner)).astype(np.float32))
    right = LAYOUTS[right_layout](rng.standard_normal((*front, inner, columns)).astype(np.float32))
    assert_product(kernel, left, right)


def test_a_kernel_takes_operands_repeated_along_the_batch(kernel: Kernel) -> None:
    rng = np.random.default_rng(0)
    left = np.broadcast_to(rng.standard_normal((1, 5, 7)).astype(np.float32), (3, 5, 7))
    assert_product(kernel, left, rng.standard_normal((3, 7, 4)).astype(np.float32))


def test_a_kernel_takes_read_only_operands(kernel: Kernel) -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (7, 4)))
    frozen = [np.frombuffer(x.tobytes(), np.float32).reshape(x.shape) for x in (left, right)]
    assert not frozen[0].flags.writeable
    assert_product(kernel, *frozen)


def test_a_product_is_new_memory(kernel: Kernel) -> None:
    one = np.eye(4, dtype=np.float32)
    first = kernel.product(one, one)
    kernel.product(2 * one, one)
    assert np.array_equal(first, one)


# ---- the model written byte by byte


@pytest.mark.parametrize("transpose_left", [False, True])
@pytest.mark.parametrize("transpose_right", [False, True])
def test_the_onnx_model_multiplies_as_its_name_says(transpose_left: bool, transpose_right: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(
        matmul_model(transpose_left, transpose_right), providers=["CPUExecutionProvider"]
    )
    assert [(x.name, x.type) for x in session.get_inputs()] == [("A", "tensor(float)"), ("B", "tensor(float)")]
    assert [(x.name, x.type) for x in session.get_outputs()] == [("C", "tensor(float)")]
    rng = np.random.default_rng(0)
    for front in ((), (2,), (2, 3)):  # one session takes any rank and size
        left = rng.random((*front, 3, 5), dtype=np.float32)
        right = rng.random((*front, 5, 4), dtype=np.float32)
        stored = {
            "A": np.ascontiguousarray(left.swapaxes(-1, -2)) if transpose_left else left,
            "B": np.ascontiguousarray(right.swapaxes(-1, -2)) if transpose_right else right,
        }
        np.testing.assert_allclose(session.run(["C"], stored)[0], left @ right, rtol=1e-5)


# ---- choice of the kernel


def test_onnxruntime_is_offered_if_it_works() -> None:
    pytest.importorskip("onnxruntime")
    offered, rejected = available_kernels()
    assert [k.name for k in offered] == ["numpy", "onnxruntime"]
    assert rejected == {}


def test_numpy_is_used_if_onnxruntime_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # the import fails, as without the package
    measured = pick_kernel()
    assert measured.kernel.name == "numpy"
    assert "onnxruntime" in measured.rejected["onnxruntime"]
    assert "Error" in measured.rejected["onnxruntime"]


def test_numpy_is_used_if_onnxruntime_cannot_load_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("cannot load libonnxruntime\nmore lines that are not shown")

    fake = SimpleNamespace(
        disable_telemetry_events=lambda: None,
        set_default_logger_severity=lambda level: None,
        SessionOptions=SimpleNamespace,
        InferenceSession=broken,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    measured = pick_kernel()
    assert measured.kernel.name == "numpy"
    assert measured.rejected["onnxruntime"] == "RuntimeError: cannot load libonnxruntime"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda left, right: np.zeros((*left.shape[:-1], right.shape[-1]), np.float32),
        lambda left, right: np.full((*left.shape[:-1], right.shape[-1]), np.nan, np.float32),
        lambda left, right: (left @ right) * np.float32(1.001),
        lambda left, right: (left @ right).swapaxes(-1, -2),
    ],
    ids=["zeros", "nan", "a little off", "transposed"],
)
def test_numpy_is_used_if_onnxruntime_multiplies_wrongly(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Array, Array], Array]
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(OnnxKernel, "product", lambda self, left, right: wrong(left, right))
    measured = pick_kernel()
    assert measured.kernel.name == "numpy"
    assert measured.rejected["onnxruntime"]


class Paced:
    """A kernel that takes a given time, on its own clock."""

    def __init__(self, name: str, seconds: float, clock: list[float]) -> None:
        self.name, self._seconds, self._clock = name, seconds, clock

    def product(self, left: Array, right: Array) -> Array:
        self._clock[0] += self._seconds
        return NumpyKernel().product(left, right)


@pytest.mark.parametrize("fast", ["numpy", "onnxruntime"])
def test_the_faster_kernel_is_chosen_with_its_measured_speed(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    now = [0.0]
    both: list[Kernel] = [Paced(name, 0.5 if name == fast else 1.0, now) for name in ("numpy", "onnxruntime")]
    monkeypatch.setattr(kernels, "available_kernels", lambda threads, only: (both, {}))
    measured = pick_kernel(clock=lambda: now[0])
    (slow,) = {"numpy", "onnxruntime"} - {fast}
    assert measured.kernel.name == fast
    assert measured.rejected == {slow: "measured 2.00x slower"}
    assert measured.flops == 2 * 384**3 / 0.5
    assert measured.overhead_s == 0.5


def test_the_requested_kernel_is_chosen() -> None:
    assert pick_kernel("numpy").kernel.name == "numpy"


def test_an_unknown_kernel_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="kernel 'cuda' cannot be used here: there is no such kernel"):
        pick_kernel("cuda")


def test_a_kernel_that_does_not_work_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"kernel 'onnxruntime' cannot be used here: \w*Error: .*onnxruntime"):
        pick_kernel("onnxruntime")


def test_onnx_runtime_writes_no_user_files_and_numpy_alone_does_not_load_it(tmp_path: Path) -> None:
    """Its telemetry would create an identity for the device as soon as it is loaded, unless switched off."""
    load = "from agent.compute.kernels import pick_kernel"
    code = f"import sys\n{load}\npick_kernel(%r)\nprint('onnxruntime' in sys.modules)"
    for only, loaded in (("onnxruntime", "True"), ("numpy", "False")):
        done = subprocess.run(
            [sys.executable, "-c", code % only],
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == loaded, done.stderr
    assert list(tmp_path.iterdir()) == []


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.floats(1, 1e4), st.booleans())
def test_a_product_in_parts_equals_the_whole_product(
    batch: int, rows: int, inner: int, columns: int, part_flops: float, batched: bool
) -> None:
    rng = np.random.default_rng(0)
    left = rng.standard_normal((batch, rows, inner), dtype=np.float32)
    right = rng.standard_normal((batch, columns, inner), dtype=np.float32).transpose(0, 2, 1)
    parts = kernels.InParts(NumpyKernel(), part_flops, lambda: False)
    one, two = (left, right) if batched else (left[0], right[0])
    np.testing.assert_allclose(parts.product(one, two), one @ two, rtol=1e-5, atol=1e-5)


def test_a_cancelled_product_ends_after_the_part_under_way() -> None:
    done: list[int] = []

    class Counting(NumpyKernel):
        def product(self, left: Array, right: Array) -> Array:
            done.append(len(left))
            return super().product(left, right)

    ones = np.ones((100, 10), np.float32)
    parts = kernels.InParts(Counting(), 2 * 10 * 10 * 7.0, lambda: len(done) >= 3)
    with pytest.raises(kernels.Abandoned):
        parts.product(ones, ones[:10])
    assert done == [7, 7, 7]
