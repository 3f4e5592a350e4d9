"""Promises of testbed.models.comparison: a step is judged from the fleet's own weights, so that a long run is exact as
long as every step is, and one wrong product is found in its step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ps.graph.capture import Program, distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model
from ps.graph.trainer import Step, train
from ps.planning.plans import Level
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.models.comparison import Compared, StepComparison, every, judged, largest_difference, told_of

STEPS = 300


def model_of(family: str) -> torch.nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    config = {
        "opt": lambda: transformers.OPTConfig(ffn_dim=32, word_embed_proj_dim=16, **sizes),  # dropout, and a kink
        "llama": lambda: transformers.LlamaConfig(intermediate_size=32, **sizes),
    }[family]()
    config.use_cache = False
    torch.manual_seed(0)
    model: torch.nn.Module = build_model(config)
    return model


class Here:
    """An engine that computes each product at once, in NumPy, as a device does."""

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        for product in products:
            np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)
            product.done()

    def forget(self, operands: Sequence[Operand]) -> None: ...

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        return [done.get_nowait()]


class Faulty(Executor):
    """Runs graphs as the executor does; one product of one step is wrong by a thousandth."""

    wrong_step = 0

    def run(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        result = super().run(program, inputs)
        if self.wrong_step and self.step == self.wrong_step and program.name == "backward":
            for value in result:
                if isinstance(value, torch.Tensor) and value.ndim == 2:
                    value.mul_(1 + 1e-3)
                    break
        return result


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def trained(family: str, learning_rate: float, wrong_step: int = 0) -> tuple[list[Step], list[Compared]]:
    model, executor = model_of(family), Faulty(Here())
    executor.wrong_step = wrong_step
    comparison = StepComparison(model_of(family), model, every(STEPS) if not wrong_step else 1, 1)

    def before_step(number: int) -> None:
        executor.step = number
        comparison.before(number)

    generator = torch.Generator().manual_seed(1)
    steps = train(
        model,
        distribute(model, executor.run),
        [torch.randint(0, 32, (2, 8), generator=generator) for _ in range(STEPS)],
        seed=1,
        learning_rate=learning_rate,
        weight_decay=0.01,
        before_step=before_step,
        after_gradients=comparison.after_gradients,
    )
    return steps, comparison.compared


@pytest.mark.slow
@pytest.mark.parametrize(("family", "learning_rate"), [("opt", 1e-3), ("llama", 1e-2)])
def test_300_steps_are_those_of_plain_pytorch_at_any_learning_rate(family: str, learning_rate: float) -> None:
    steps, compared = trained(family, learning_rate)
    assert len(steps) == STEPS
    assert [one.step for one in compared] == list(range(1, STEPS + 1, every(STEPS)))
    assert judged(compared) == []
    assert told_of(compared)["wrong"] == 0


@pytest.mark.slow
def test_a_product_wrong_by_a_thousandth_is_found_in_its_step() -> None:
    _, compared = trained("llama", 1e-3, wrong_step=200)
    assert [one.step for one in compared if not one.exact] == [200]
    assert judged(compared)[0].startswith("step 200 is not the step of plain PyTorch from the same weights: loss ")


@pytest.mark.slow
def test_comparing_changes_no_bit_of_the_training() -> None:
    """Dropout draws the same numbers with and without it."""
    model, tokens = model_of("opt"), torch.arange(16).view(2, 8)
    settings: dict[str, Any] = {"seed": 1, "learning_rate": 1e-2, "weight_decay": 0.0}
    alone = train(model, model, [tokens] * 3, **settings)
    again = model_of("opt")
    comparison = StepComparison(model_of("opt"), again, 1, 1)
    compared = train(
        again,
        again,
        [tokens] * 3,
        before_step=comparison.before,
        after_gradients=comparison.after_gradients,
        **settings,
    )
    assert [step.loss for step in compared] == [step.loss for step in alone]
    assert [one.gradient for one in comparison.compared] == [0.0, 0.0, 0.0]


def test_short_runs_are_compared_at_every_step_and_long_ones_at_about_fifty() -> None:
    assert [every(steps) for steps in (1, 50, 51, 300, 10_000)] == [1, 1, 2, 6, 200]


def differing(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, str]:
    theirs = {"a": torch.ones(10), "b": torch.full((10,), 1e-6)}
    return largest_difference(theirs | {"a": change(theirs["a"])}, theirs)


def test_a_gradient_is_judged_by_its_norm() -> None:
    off, where = differing(lambda a: a * 1.001)
    assert off == pytest.approx(1e-3, rel=1e-3)
    assert where == "a"
    assert differing(lambda a: a) == (0.0, "a")
    assert differing(lambda a: a * math.nan) == (math.inf, "a")


def test_a_gradient_that_is_rounding_only_is_judged_by_all_of_them() -> None:
    theirs = {"a": torch.ones(10), "b": torch.full((10,), 1e-9)}
    difference, _ = largest_difference(theirs | {"b": -theirs["b"]}, theirs)
    assert difference < 1e-5


def test_a_missing_gradient_is_found() -> None:
    assert largest_difference({}, {"a": torch.ones(1)}) == (math.inf, "a")


def test_a_step_that_diverged_alike_is_the_same_step() -> None:
    both = {"a": torch.tensor([math.nan, math.inf, 1.0])}
    assert largest_difference(both, both)[0] == 0.0
    assert Compared(1, math.nan, math.nan, 0.0, "a", 0.0).exact
    assert not Compared(1, math.nan, 1.0, 0.0, "a", 0.0).exact


def test_a_step_is_allowed_what_one_rounding_moves_in_plain_pytorch() -> None:
    def exact(rounding: float) -> bool:
        return Compared(1, 1.0, 1.0, 1e-3, "a", rounding).exact

    assert Counter(exact(rounding) for rounding in (0.0, 1e-5, 1e-3)) == {False: 2, True: 1}
