"""Promises of ps.graph.trainer: a batch in micro-batches trains like the whole batch, here and on a fleet whose devices
keep weights in between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model
from ps.graph.trainer import Step, gradients, train
from ps.planning.plans import Level
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.runs.collecting import collecting_between_steps

CONFIGS: dict[str, Callable[..., Any]] = {
    "opt": lambda: transformers.OPTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=36, word_embed_proj_dim=16, vocab_size=29
    ),
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=29,
        attention_dropout=0.1,
    ),
}
BATCHES = [torch.randint(0, 29, (8, 7), generator=torch.Generator().manual_seed(i)) for i in range(3)]
SETTINGS: dict[str, Any] = {"seed": 5, "learning_rate": 1e-2, "weight_decay": 0.01}


class KeepingFleet:
    """An engine that computes at once. It multiplies with its kept copy, not with what it is given: a weight that
    changes without being forgotten gives a wrong product."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.reused = self.products = 0

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        for product in products:
            left, right = (self._copy(operand) for operand in (product.left, product.right))
            np.matmul(left, right.transpose(0, 2, 1), out=product.out)
            product.done()
        self.products += len(products)

    def _copy(self, operand: Operand) -> Any:
        if operand.uses == 1:
            return operand.array
        self.reused += operand.id in self.kept
        return self.kept.setdefault(operand.id, operand.array.copy())

    def forget(self, operands: Sequence[Operand]) -> None:
        for operand in operands:
            del self.kept[operand.id]

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        return [done.get_nowait()]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only get slower when threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def model_of(family: str) -> torch.nn.Module:
    config = CONFIGS[family]()
    config.use_cache = False
    torch.manual_seed(0)
    model: torch.nn.Module = build_model(config)
    return model


def gradients_of(model: torch.nn.Module, tokens: torch.Tensor, micro_batches: int) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = gradients(model, tokens, micro_batches)
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_micro_batches_give_the_gradients_and_loss_of_the_whole_batch(family: str, micro_batches: int) -> None:
    model = model_of(family).eval()  # no dropout: micro-batches draw random numbers in another order
    loss, whole = gradients_of(model, BATCHES[0], 1)
    loss_of_parts, parts = gradients_of(model, BATCHES[0], micro_batches)
    assert loss_of_parts == pytest.approx(loss, abs=1e-6)
    assert len(parts) == len(whole) == len(list(model.parameters()))
    for one, two in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)


def test_all_micro_batches_of_a_batch_are_one_step() -> None:
    parts: list[int] = []
    model = model_of("opt")

    def forward(**batch: torch.Tensor) -> Any:
        parts.append(len(batch["input_ids"]))
        return model(**batch)

    steps = train(model, forward, BATCHES, micro_batches=4, **SETTINGS)
    assert [step.number for step in steps] == [1, 2, 3]
    assert parts == [2] * 12


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_distributed_micro_batches_with_kept_weights_train_like_plain_pytorch(family: str) -> None:
    plain = model_of(family)
    expected = train(plain, plain, BATCHES, micro_batches=4, **SETTINGS)
    model, fleet = model_of(family), KeepingFleet()
    executor = Executor(fleet)
    executor.keep(model.parameters(), uses=4)
    kept: list[int] = []

    def before_step(number: int) -> None:
        executor.weights_changed()
        assert fleet.kept == {}

    def after_step(step: Step) -> None:
        kept.append(len(fleet.kept))

    forward = distribute(model, executor.run)
    steps = train(model, forward, BATCHES, micro_batches=4, before_step=before_step, after_step=after_step, **SETTINGS)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], abs=1e-5)
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not name.endswith("k_proj.bias"):  # softmax cancels it: its gradient is rounding, which Adam magnifies
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=name)
    assert kept[0] == kept[1] == kept[2] > 0
    assert fleet.reused == 3 * 3 * kept[0]  # per step, a weight is sent with the first micro-batch and used by all four


def test_garbage_is_collected_between_steps_and_not_during_them() -> None:
    with collecting_between_steps():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
