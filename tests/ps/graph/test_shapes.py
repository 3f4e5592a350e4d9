"""Promises of ps.graph.shapes: a step without values submits what the captured step submits, in the same groups; and a
deep model is made of its layers exactly as if it had been captured whole."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

import ps.graph.capture
from ps.graph.capture import Program, distribute
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


class Captured:
    """A model's step with and without values; captured once, since that takes seconds."""

    def __init__(self, name: str, heavy_values: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ps.graph.capture, "HEAVY_VALUES", heavy_values)
            config = model_config(name)
            self.programs, self.weights = step_shapes(config, BATCH, SEQUENCE)
            torch.manual_seed(0)
            self._tokens = torch.randint(256, (BATCH, SEQUENCE))
            self._executor = Executor(Submissions())
            self._forward = distribute(build_model(config).train(), self._run)
            self.with_values(early=False)

    def _run(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        return self._executor.run(program, inputs)

    def with_values(self, early: bool) -> Submissions:
        engine = Submissions()
        self._executor = Executor(engine, early)
        self._forward(input_ids=self._tokens, labels=self._tokens).loss.backward()
        return engine

    def without_values(self, early: bool) -> Submissions:
        engine = Submissions()
        executor = Executor(engine, early)
        for program in self.programs:
            executor.run_shapes(program)
        return engine


MODELS = ("opt-tiny", "llama-tiny")


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest) -> Captured:
    """Some local operations are slow."""
    return Captured(request.param, BATCH * SEQUENCE * 128)


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_step_without_values_submits_the_same_products_together(captured: Captured, early: bool) -> None:
    """Also where local operations are slow, and products go out before them."""
    assert any(part.shape is None for program in captured.programs for part in program.parts)
    assert captured.without_values(early).groups == captured.with_values(early).groups


@pytest.mark.slow
def test_a_step_without_slow_operations_submits_the_same_products_together() -> None:
    captured = Captured("llama-tiny", 1 << 22)
    assert all(part.shape is not None for program in captured.programs for part in program.parts)
    assert captured.without_values(early=True).groups == captured.with_values(early=True).groups


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_deep_model_is_made_of_the_layers_of_shallow_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = model_config(name)
    deep.num_hidden_layers = 4
    whole, same_weights = step_shapes(deep, BATCH, SEQUENCE)
    monkeypatch.setattr("ps.graph.shapes.FEW_LAYERS", 3)
    made, weights = step_shapes(deep, BATCH, SEQUENCE)
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
def test_weights_are_the_same_operands_until_they_change(captured: Captured) -> None:
    programs, weights = captured.programs, captured.weights
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
