"""Does verification accuse the honest, and does it catch those who lie?

Real training steps, real activations and gradients. Every product is computed in blocks of many sizes as devices would,
by NumPy and by ONNX Runtime if it is there, whole or streamed in chunks, and checked as the server does it: none of
these blocks may be called wrong. Then a training in which one block of every product is a lie, as large as the values
themselves or down to a millionth of that: what is found is put right, what is not stays, and the loss has to be that of
the honest training all the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from agent.kernels import Array, Kernel, NumpyKernel, OnnxKernel
from emulator.faults import LIES, Liar
from ps.capture import distribute
from ps.cost import Integers
from ps.executor import Executor
from ps.jobs import Product
from ps.models import build_model, model_config
from ps.operands import Operand
from ps.plans import Level
from ps.text import batches, read_text
from ps.trainer import train
from ps.verify import Expectation, wrong_blocks

BLOCKS = 1_000_000
MODELS = ("opt-tiny", "llama-tiny", "opt-125m")  # of the last one two layers, and bytes as its vocabulary
SHARES = (0.45, 0.45, 0.10)  # of the blocks
BATCH, SEQUENCE = 8, 32
MOST_BLOCKS = 2048  # a product, or the small ones would be most of them
LYING_STEPS = 12
SMALLEST = 1e-6  # of a lie as pods tell them


class Here:
    """An executor's engine that has every product computed, and looked at, on the spot."""

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
    """So many blocks were asked for."""


@dataclass
class Honest:
    """Computes products in blocks and counts what the check says about them."""

    kernels: list[Kernel]
    limit: int
    rng: np.random.Generator
    blocks: int = 0
    products: int = 0
    accused: int = 0  # blocks called wrong
    suspected_rows: int = 0  # that failed the check of the whole product, and were confirmed
    margin: float = 0.0  # largest difference, as a share of what is allowed
    by_kernel: Counter[str] = field(default_factory=Counter)
    inner: Counter[int] = field(default_factory=Counter)

    def compute(self, product: Product) -> None:
        left, right = product.left.array, product.right.array
        tiles = random_tiles(product.out.shape, self.rng)
        for tile in tiles.tolist():
            self._block(left, right, product.out, tile)
        expected = Expectation.of(left, right, self.products)
        self.accused += len(wrong_blocks(left, right, product.out, tiles, expected))
        self.suspected_rows += int(expected.suspicious_rows(product.out).sum())
        difference, allowed = np.abs(product.out @ expected.vector - expected.image), expected.allowed
        self.margin = max(self.margin, float((difference[allowed > 0] / allowed[allowed > 0]).max(initial=0.0)))
        self.blocks += len(tiles)
        self.products += 1
        self.inner[left.shape[2]] += len(tiles)
        if self.blocks >= self.limit:
            raise Enough

    def _block(self, left: Array, right: Array, out: Array, tile: list[int]) -> None:
        b, bs, r, rs, c, cs = tile
        kernel = self.kernels[int(self.rng.integers(len(self.kernels)))]
        one, two = left[b : b + bs, r : r + rs], right[b : b + bs, c : c + cs].transpose(0, 2, 1)
        inner = left.shape[2]
        chunk = inner if inner < 8 or self.rng.random() < 0.75 else int(self.rng.integers(inner // 8, inner))
        cells = out[b : b + bs, r : r + rs, c : c + cs]
        cells[:] = kernel.product(one[..., :chunk], two[:, :chunk])
        for start in range(chunk, inner, chunk):
            cells += kernel.product(one[..., start : start + chunk], two[:, start : start + chunk])
        self.by_kernel[kernel.name] += 1


@dataclass
class Lying:
    """One block of every product is a lie, of each kind in turn; what the check does not find stays."""

    rng: np.random.Generator
    small: bool
    liar: Liar = field(default_factory=Liar)
    told: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)  # "lies" that are the truth, bit by bit
    accused: int = 0  # honest blocks called wrong
    largest_missed: float = 0.0  # change of a cell, as a share of |a_i| |B|

    def compute(self, product: Product) -> None:
        left, right, out = product.left.array, product.right.array, product.out
        np.matmul(left, right.transpose(0, 2, 1), out=out)
        kind = self.told.total() % len(LIES)
        self.liar.begin(kind, LIES[kind])
        tiles = random_tiles(out.shape, self.rng)
        chosen = int(self.rng.integers(len(tiles)))
        b, bs, r, rs, c, cs = tiles[chosen].tolist()
        cells = out[b : b + bs, r : r + rs, c : c + cs]
        truth = cells.copy()
        cells[:] = self.liar.answer(kind, truth).reshape(truth.shape)
        if self.small:
            cells[:] = truth + (cells - truth) * np.float32(SMALLEST ** self.rng.random())
        self.told[LIES[kind]] += 1
        found = wrong_blocks(left, right, out, tiles, Expectation.of(left, right, (1, self.told.total())))
        self.accused += len(set(found) - {chosen})
        if chosen in found:
            self.caught[LIES[kind]] += 1
            cells[:] = truth
        elif np.array_equal(cells, truth):
            self.same[LIES[kind]] += 1
        else:
            rows = np.linalg.norm(left[b : b + bs, r : r + rs], axis=2)
            whole = np.linalg.norm(right[b : b + bs], axis=(1, 2))
            size = np.maximum(rows * whole[:, None], np.finfo(np.float32).tiny)[:, :, None]
            self.largest_missed = max(self.largest_missed, float((np.abs(cells - truth) / size).max()))


def random_tiles(shape: tuple[int, ...], rng: np.random.Generator) -> Integers:
    """Rectangles of one size (smaller at the edges) that tile the output: any size, but not too many of them."""
    batch, rows, columns = shape
    while True:
        bs = int(rng.choice([1, batch]))
        rs, cs = (round(float(2 ** rng.uniform(0, np.log2(extent)))) for extent in (rows, columns))
        if -(-batch // bs) * -(-rows // rs) * -(-columns // cs) <= MOST_BLOCKS:
            break
    return np.array(
        [
            (b, min(bs, batch - b), r, min(rs, rows - r), c, min(cs, columns - c))
            for b in range(0, batch, bs)
            for r in range(0, rows, rs)
            for c in range(0, columns, cs)
        ],
        np.int64,
    )


def measure(blocks: int = BLOCKS, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    kernels: list[Kernel] = [NumpyKernel()]
    try:
        kernels.append(OnnxKernel())
    except ImportError as error:
        say(f"without ONNX Runtime: {error}")
    begun = time.monotonic()
    honest = Honest(kernels, 0, np.random.default_rng(0))
    for model, share in zip(MODELS, SHARES, strict=True):
        honest.limit += round(blocks * share)
        try:
            train_here(model, honest.compute, steps=1000)
        except Enough:
            say(f"{model}: {honest.blocks:,} blocks so far, {honest.accused} called wrong")
    lies = {}
    for model in MODELS[:2]:
        lies[f"large lies, {model}"] = _lies(model, small=False)
        lies[f"small lies, {model}"] = _lies(model, small=True)
    return {
        "blocks": honest.blocks,
        "products": honest.products,
        "accused": honest.accused,
        "suspected_rows": honest.suspected_rows,
        "margin": honest.margin,
        "blocks_by_kernel": dict(honest.by_kernel),
        "inner": [min(honest.inner), max(honest.inner)],
        "seconds": time.monotonic() - begun,
        "lies": lies,
    }


def _lies(model: str, small: bool) -> dict[str, Any]:
    lying = Lying(np.random.default_rng(1), small)
    losses = train_here(model, lying.compute, LYING_STEPS)
    truth = train_here(model, _plainly, LYING_STEPS)
    return {
        "told": dict(lying.told),
        "caught": dict(lying.caught),
        "same_as_the_truth": dict(lying.same),
        "honest_accused": lying.accused,
        "largest_missed": lying.largest_missed,
        "loss_max_abs_diff": float(np.abs(np.subtract(losses, truth)).max()),
    }


def _plainly(product: Product) -> None:
    np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)


def train_here(name: str, compute: Callable[[Product], None], steps: int) -> list[float]:
    """A training of which every product goes through `compute`; the losses."""
    config = model_config(name)
    if not name.endswith("tiny"):
        config.num_hidden_layers, config.vocab_size = 2, 256
    torch.manual_seed(1)
    model = build_model(config)
    forward = distribute(model, Executor(Here(compute)).run)
    data = batches(read_text("stdlib"), steps, BATCH, SEQUENCE, seed=1)
    return [step.loss for step in train(model, forward, data, seed=1, learning_rate=1e-3, weight_decay=0.01)]
