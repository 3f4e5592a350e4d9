"""Promises of ps.graph.shapes: a step without values submits what the captured step submits, in the same groups; and a
deep model is made of its layers exactly as if it had been captured whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

import ps.graph.capture
from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model, model_config
from ps.graph.shapes import Part, ShapesProgram, deepened, step_shapes
from ps.planning.plans import Level, Shape
from ps.transport.jobs import Product
from ps.transport.operands import Operand

BATCH, SEQUENCE = 2, 8


class Submissions:
    """An engine that finishes one product at a time, in the order of submission, and notes what came together."""

    def __init__(self) -> None:
        self.groups: list[tuple[list[tuple[Shape, bool]], tuple[Level, ...]]] = []
        self.forgotten: list[int] = []
        self.kept: list[tuple[int | None, int | None]] = []
        self._in_flight: list[Product] = []

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        self.groups.append(([(product.shape, product.critical) for product in products], ahead))
        self.kept += [product.kept for product in products]
        self._in_flight += products

    def forget(self, operands: Sequence[Operand]) -> None:
        self.forgotten += [operand.id for operand in operands]

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        product = self._in_flight.pop(0)
        if product.out.flags.writeable:
            np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)
        product.done()
        return [done.get()]


@pytest.fixture(params=["opt-tiny", "llama-tiny"])
def config(request: pytest.FixtureRequest) -> Any:
    return model_config(request.param)


def with_values(config: Any, early: bool) -> Submissions:
    engine = Submissions()
    torch._dynamo.reset()
    torch.manual_seed(0)
    tokens = torch.randint(256, (BATCH, SEQUENCE))
    forward = distribute(build_model(config).train(), Executor(engine, early).run)
    forward(input_ids=tokens, labels=tokens).loss.backward()
    return engine


def without_values(config: Any, early: bool) -> Submissions:
    engine = Submissions()
    executor = Executor(engine, early)
    for program in step_shapes(config, BATCH, SEQUENCE)[0]:
        executor.run_shapes(program)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(("early", "heavy_values"), [(True, 1 << 22), (False, BATCH * SEQUENCE * 128)])
def test_a_step_without_values_submits_the_same_products_together(
    config: Any, early: bool, heavy_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where local operations are slow, and products go out before them."""
    monkeypatch.setattr(ps.graph.capture, "HEAVY_VALUES", heavy_values)
    assert without_values(config, early).groups == with_values(config, early).groups


@pytest.mark.slow
def test_a_deep_model_is_made_of_the_layers_of_shallow_ones(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = copy.deepcopy(config)
    deep.num_hidden_layers = 5
    made, weights = step_shapes(deep, BATCH, SEQUENCE)
    monkeypatch.setattr("ps.graph.shapes.FEW_LAYERS", 5)
    whole, same_weights = step_shapes(deep, BATCH, SEQUENCE)
    assert [program.name for program in made] == [program.name for program in whole] == ["forward", "backward"]
    for one, other in zip(made, whole, strict=True):
        assert len(one.parts) == len(other.parts)
        assert all(a.alike(b) for a, b in zip(one.parts, other.parts, strict=True))
        assert (one.ahead, one.behind, one.flops) == (other.ahead, other.behind, other.flops)
    assert [weight.shape for weight in weights] == [weight.shape for weight in same_weights]
    assert all(weight.is_meta for weight in weights), "weights take no memory"
    names = [part.name for program in made for part in program.parts]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_weights_are_the_same_operands_until_they_change(config: Any) -> None:
    programs, weights = step_shapes(config, BATCH, SEQUENCE)
    engine = Submissions()
    executor = Executor(engine)
    executor.keep(weights, uses=2)
    for _ in range(2):
        for program in programs:
            executor.run_shapes(program)
    first, second = engine.kept[: len(engine.kept) // 2], engine.kept[len(engine.kept) // 2 :]
    assert first == second
    assert any(right is not None for _, right in first)
    executor.weights_changed()
    assert set(engine.forgotten) == {one for kept in first for one in kept if one is not None}


SMALL, LARGE = Shape(1, 4, 4, 4), Shape(1, 8, 8, 8)


def chain(*shapes: Shape) -> list[ShapesProgram]:
    parts = [Part(f"forward/mm_{i}", (1,) if i else (), shape) for i, shape in enumerate(shapes)]
    return [ShapesProgram("forward", tuple(parts))]


def test_layers_that_repeat_are_inserted() -> None:
    two, three = chain(SMALL, LARGE, LARGE, SMALL), chain(SMALL, LARGE, LARGE, LARGE, SMALL)
    made = deepened(two, three, 5)
    assert made is not None
    assert [part.shape for part in made[0].parts] == [SMALL, *[LARGE] * 5, SMALL]
    assert made[0].inputs == [[], *([i] for i in range(6))]


def test_layers_that_differ_are_not_guessed() -> None:
    assert deepened(chain(SMALL, LARGE), chain(SMALL, LARGE, SMALL, SMALL, LARGE), 5) is None
    assert deepened(chain(SMALL, SMALL), chain(SMALL, SMALL), 5) is None
