"""Trainings whose products are computed in this process, by a function that a benchmark provides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from agent.compute.kernels import Array
from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model, model_config
from ps.graph.text import batches, read_text
from ps.graph.trainer import train
from ps.planning.cost import Integers
from ps.planning.plans import Level
from ps.transport.jobs import Product
from ps.transport.operands import Operand

GPT2 = "gpt2-tiny"  # not one of the models that scenarios can name
MOST_BLOCKS = 2048  # per product, or small blocks would dominate


class Here:
    """An executor's engine that computes every product in this process."""

    def __init__(self, compute: Callable[[Product], None]) -> None:
        self._compute = compute

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        for product in products:
            self._compute(product)
            product.done()

    def forget(self, operands: Sequence[Operand]) -> None:
        pass

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        return [done.get()]


class Enough(Exception):
    """The requested number of blocks is reached."""


def _gpt2() -> Any:
    """GPT-2, as wide as the other tiny models."""
    import transformers

    return transformers.GPT2Config(
        n_embd=128,
        n_layer=2,
        n_head=4,
        vocab_size=256,
        n_positions=128,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


class _Captured:
    """A model whose products go through `compute`. Capturing takes seconds, so one capture serves many trainings."""

    def __init__(self, name: str) -> None:
        self.config = _gpt2() if name == GPT2 else model_config(name)
        if not name.endswith("tiny"):  # reduce to two layers, with bytes as the vocabulary
            self.config.num_hidden_layers, self.config.vocab_size = 2, 256
        self.model = build_model(self.config)
        self.compute: Callable[[Product], None] = plainly
        self.forward = distribute(self.model, Executor(Here(lambda product: self.compute(product))).run)

    def begin(self, seed: int, wide: float, constant: float | None) -> None:
        """Start with the weights of this seed, or with matrices of one number."""
        torch.manual_seed(seed)
        self.model.load_state_dict(build_model(self.config).state_dict())
        self.model.zero_grad()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter *= wide
                    if constant is not None:
                        parameter.fill_(constant)


_captured = functools.cache(lambda name, batch, sequence: _Captured(name))  # another shape is captured again


@dataclass(frozen=True, slots=True)
class Training:
    model: str
    learning_rate: float = 1e-3
    batch: int = 8
    sequence: int = 32
    wide: float = 1.0  # factor on the initial weights
    constant: float | None = None  # initial value of all matrix weights

    def run(
        self,
        compute: Callable[[Product], None],
        steps: int,
        seed: int = 1,
        each: Callable[[float], None] = lambda loss: None,
    ) -> list[float]:
        """Every product goes through `compute`. Returns the losses; `each` is called with every loss."""
        captured = _captured(self.model, self.batch, self.sequence)
        captured.compute = compute
        captured.begin(seed, self.wide, self.constant)
        trained = train(
            captured.model,
            captured.forward,
            batches(read_text("stdlib"), steps, self.batch, self.sequence, seed=seed),
            seed=seed,
            learning_rate=self.learning_rate,
            weight_decay=0.01,
            after_step=lambda step: each(step.loss),
        )
        return [step.loss for step in trained]


def plainly(product: Product) -> None:
    np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)


def random_boxes(shape: tuple[int, ...], rng: np.random.Generator, most: int = MOST_BLOCKS, least: int = 1) -> Integers:
    """Rectangles of one size (smaller at the edges) that tile the output: any size, but not too many."""
    batch, rows, columns = shape
    least = min(least, batch * rows * columns)
    while True:
        bs = int(rng.choice([1, batch]))
        rs, cs = (round(float(2 ** rng.uniform(0, np.log2(extent)))) for extent in (rows, columns))
        if least <= -(-batch // bs) * -(-rows // rs) * -(-columns // cs) <= most:
            break
    b, r, c = (x.ravel() for x in np.meshgrid(*_starts((batch, bs), (rows, rs), (columns, cs)), indexing="ij"))
    sizes = (np.minimum(s, e - x) for s, e, x in ((bs, batch, b), (rs, rows, r), (cs, columns, c)))
    bs_, rs_, cs_ = sizes
    return np.stack([b, bs_, r, rs_, c, cs_], axis=1).astype(np.int64)


def _starts(*extents: tuple[int, int]) -> list[Integers]:
    return [np.arange(0, extent, size) for extent, size in extents]


def cells_of(array: Array, box: Sequence[int]) -> Array:
    """A view of the box's cells."""
    b, bs, r, rs, c, cs = box
    return array[b : b + bs, r : r + rs, c : c + cs]
