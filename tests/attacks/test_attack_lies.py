"""Attack: devices that lie by less than a tolerance; and its opposite, a check that accuses honest devices.

Real servers, pods and agents for what crosses sockets; whole trainings, computed here, for a lie's effect on the loss.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from processes import LIMIT_S, Multiplication, agents

from agent.compute.kernels import NumpyKernel
from ps.graph.models import build_model, model_config
from ps.graph.text import batches, read_text
from ps.graph.trainer import train
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server
from ps.verification.sketch import Expectation
from ps.verification.verifier import Verifier
from testbed.bench.here import GPT2, Enough, Training
from testbed.bench.honest import Flushing, Honest, Serial, all_kernels
from testbed.bench.lies import Block, Lie, Trial, cell_per_row, exactly, flipped_signs, holds, kinds, run
from testbed.runs.run import loss_difference

if TYPE_CHECKING:
    from conftest import Serve, Start

Array = NDArray[np.float32]
LIAR = 3


def lying_pod(start: Start, server: Server, devices: int, how: str) -> None:
    """One of its devices lies from the first block on."""
    fleet = {
        "profiles": [[50e9, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]] * devices,
        "labels": [f"emulated-{i}" for i in range(devices)],
        "pass": server.pod_pass,
    }
    order = {"do": "lie", "devices": [LIAR], "how": how}
    stdin = f"{json.dumps(fleet)}\n{json.dumps(order)}\n"
    start("emulator.pods.pod", "--ps", server.address, "--links", "off", stdin=stdin)
    assert server.wait_for_devices(devices, LIMIT_S)


# ---- over sockets


@pytest.mark.parametrize("how", ["bias", "signs"])
def test_a_device_with_small_lies_is_suspended_and_no_other(start: Start, serve: Serve, how: str) -> None:
    server = serve()
    lying_pod(start, server, 13, how)
    for seed in range(100):
        Multiplication(server, (1, 160, 128, 160), seed=seed).check()
        if server.suspended:
            break
    assert [server.labels[device] for device in server.suspended] == [f"emulated-{LIAR}"]
    assert "what it returned was wrong: " in next(iter(server.suspended.values()))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["numpy", "onnxruntime"])
def test_products_that_underflow_or_overflow_suspend_no_honest_agent(start: Start, serve: Serve, kernel: str) -> None:
    if importlib.util.find_spec(kernel) is None:
        pytest.skip(f"{kernel} is not installed")
    server = serve()
    agents(start, server, 2, "--kernel", kernel)
    rng = np.random.default_rng(0)
    for one, two in ((1e-22, 1e-22), (1e-38, 1.0), (1e-40, 1e-3), (1e-44, 1e30), (1e20, 1e18), (1e30, 1e30), (0, 1)):
        submit(server, scaled(rng, (1, 40, 64), one), scaled(rng, (1, 48, 64), two))
    left, right = scaled(rng, (1, 40, 64), 1.0), scaled(rng, (1, 48, 64), 1.0)
    left[0, 7, 3], left[0, 9, 5], right[0, 11, 2] = np.nan, np.inf, -np.inf
    submit(server, left, right)
    assert not server.suspended
    assert server.devices == 2


def scaled(rng: np.random.Generator, shape: tuple[int, ...], factor: float) -> Array:
    result: Array = (rng.standard_normal(shape) * factor).astype(np.float32)
    return result


def submit(server: Server, left: Array, right: Array) -> None:
    done = threading.Event()
    out = np.empty((left.shape[0], left.shape[1], right.shape[1]), np.float32)
    server.submit(Product(Operand(left), Operand(right), out, done.set))
    assert done.wait(LIMIT_S), f"not complete: suspended {server.suspended}"


# ---- effects of lies on a training


@pytest.fixture(scope="module")
def truth() -> list[float]:
    return Training("llama-tiny").run(exactly, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "one cell per row off by 0.001 of its size",
        "4.5% of the signs flipped",
        "0.2 of 4 eps sqrt(n), sign same",
        "0.2 of 4 eps sqrt(n), sign random",
        "0.7 of 4 eps sqrt(n), sign away from zero",
        "5 levels, sign random",
        "a quarter of the columns",
        "only long sums",
        "replay",
        "16 bits",
    ],
)
def test_a_lie_is_found_within_two_steps(truth: list[float], kind: str) -> None:
    result = run(Training("llama-tiny"), kind, liars=1, truth=truth, steps=3)
    assert result["told"] > 0
    assert result["found"] == 1, result
    assert result["last_found_step"] <= 2
    assert not result["honest_accused"]


@pytest.mark.slow
def test_a_coalition_with_one_bias_is_found_and_the_check_does_not_doubt_itself(truth: list[float]) -> None:
    result = run(Training("llama-tiny"), "0.7 of 4 eps sqrt(n), sign same", liars=5, truth=truth, steps=3)
    assert result["found"] == 5
    assert result["doubted"] == 0
    assert holds(result)


@pytest.mark.slow
def test_a_lie_as_small_as_rounding_does_nothing(truth: list[float]) -> None:
    result = run(Training("llama-tiny"), "0.5 levels, sign random", liars=5, truth=truth, steps=3)
    assert result["told"] > 0
    assert result["effect"] < 1e-5
    assert not result["honest_accused"]


@pytest.fixture(scope="module")
def truth_of_gpt2() -> list[float]:
    return Training(GPT2).run(exactly, 4)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [8, 11])
def test_a_coalition_that_pushes_the_cell_nearest_zero_of_each_block_is_found(
    truth_of_gpt2: list[float], levels: int
) -> None:
    """Below the limit of a single cell it moved the loss by 1.4e-5, and 0 to 13 of 25 liars were found."""
    kind = f"nearest to zero of a block off by {levels} levels"
    moved = run(Training(GPT2), kind, 25, truth_of_gpt2, steps=4)
    assert moved["found"] >= (25 if levels > 10 else 15)
    assert moved["effect"] < 1e-5
    assert not moved["honest_accused"]


def test_every_kind_of_lie_changes_the_result() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((1, extent, 300), dtype=np.float32) for extent in (40, 30))
    cells = left @ right.transpose(0, 2, 1)
    for name, lie in kinds().items():
        told = [lie(Block(left, right, cells + np.float32(i > 500), rng)) for i in range(1000 if "100" in name else 2)]
        expected = [cells + np.float32(i > 500) for i in range(len(told))]
        same = [np.array_equal(one, two, equal_nan=True) for one, two in zip(told, expected, strict=True)]
        assert not all(same) or name == "replay", name


# ---- long sums


@pytest.mark.parametrize("lie", [cell_per_row(1.2), cell_per_row(0.02), flipped_signs(0.045)])
def test_a_lie_in_one_cell_of_a_long_sum_is_caught_every_time(lie: Lie) -> None:
    """A tolerance that grows with sqrt(n) catches 0 of 60."""
    rng = np.random.default_rng(2)
    left, right = (rng.standard_normal((1, extent, 131_072), dtype=np.float32) for extent in (16, 32))
    honest = NumpyKernel().product(left, right.transpose(0, 2, 1))
    boxes = np.array([(0, 1, 0, 16, c, 16) for c in (0, 16)])
    for seed in range(4):
        expected, out = Expectation.of(left, right, boxes, seed), honest.copy()
        assert not Verifier(seed).check(left, right, honest, boxes, np.arange(2), expected, 2).wrong
        out[:, :, 16:] = lie(Block(left, right[:, 16:], honest[:, :, 16:], rng))
        assert not np.array_equal(out, honest)
        assert Verifier(seed).check(left, right, out, boxes, np.arange(2), expected, 2).wrong == [1]


# ---- honest devices


@pytest.mark.slow
@pytest.mark.parametrize(
    "training",
    [
        Training("llama-tiny", 3e-3),
        Training("opt-tiny", 1e-2),
        Training("opt-tiny", 10.0),
        Training("llama-tiny", 1e-3, wide=1e-4),
        Training("opt-tiny", 1e-3, wide=1e15),
        Training("llama-tiny", 1e-3, constant=0.02),
        Training(GPT2, 1e-3, constant=0.02),
    ],
    ids=str,
)
def test_no_honest_block_is_accused_in_any_training(training: Training) -> None:
    """The benchmark of the verification does the same with millions of blocks."""
    honest = Honest(all_kernels(), 8_000, np.random.default_rng(0))
    with contextlib.suppress(Enough):
        for seed in range(10):
            training.run(honest.compute, 3, seed)
    assert honest.blocks >= 8_000
    assert honest.accused == 0, honest.reasons
    assert honest.tiny + honest.special > 0


@pytest.mark.slow
def test_a_diverging_training_continues_like_plain_pytorch() -> None:
    training, steps = Training("opt-tiny", 1e30), 4
    trial = Trial(0, lambda block: block.cells)
    losses = training.run(trial.compute, steps)
    torch.manual_seed(1)
    model = build_model(model_config("opt-tiny"))
    data = batches(read_text("stdlib"), steps, training.batch, training.sequence, seed=1)
    plain = [one.loss for one in train(model, model, data, seed=1, learning_rate=1e30, weight_decay=0.01)]
    assert np.isnan(losses).any()
    assert loss_difference(losses, plain) < 1e-4
    assert not trial.suspended


def test_kernels_of_the_benchmark_are_honest_and_different() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 9, 300), dtype=np.float32), rng.standard_normal((2, 300, 8), dtype=np.float32)
    serial = Serial().product(left, right)
    np.testing.assert_allclose(serial, left @ right, rtol=1e-3, atol=1e-4)
    assert not np.array_equal(serial, left @ right)
    tiny = left * np.float32(1e-40)
    assert (left[..., :1] * np.float32(1e-40)).any()
    assert not Flushing().product(tiny, right).any()
