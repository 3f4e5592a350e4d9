"""False alarms of the verification: real kernels on real activations and gradients, in blocks of many sizes.

Trainings of OPT and Llama with learning rates from 1e-4 to 10, some of which diverge, and with initial weights that are
too wide; inner lengths up to 131,072 from the weight gradients of a large batch. Products are also scaled, whole or row
by row, until values are subnormal, vanish or overflow. Some products have repeated rows, columns or values, and some
trainings start with matrices of one number: then many cells share one error. Kernels: NumPy and ONNX Runtime, whole or
in chunks, terms summed one by one, and NumPy on a processor that flushes subnormal numbers to zero.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent.compute.kernels import Array, Kernel, NumpyKernel, OnnxKernel
from ps.transport.jobs import Product
from ps.verification.glance import Glance
from ps.verification.recompute import one_after_the_other
from ps.verification.rounding import TINY
from ps.verification.sketch import Energies, Expectation
from ps.verification.verifier import Verifier
from testbed.bench.here import GPT2, Enough, Training, cells_of, plainly, random_boxes

DEVICES = 100
STEPS = 12  # per seed; then the next seed
LEAST_BLOCKS = 256  # per product, for most products; the others have any number
LONG, LONG_CELLS, LONG_TIMES = 131_072, 24, 4
SCALED_SHARE = 0.2  # of the products
REPEATED_SHARE = 0.05  # of the products, computed again with repeated operands
BLOCK_BY_BLOCK = 0.05  # share of products with one kernel call per block; else one per column of blocks
TRAININGS = (
    *(Training(model, rate) for rate in (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0) for model in ("opt-tiny", "llama-tiny")),
    *(Training(model, 1e-3, wide=wide) for wide in (1e-4, 30.0) for model in ("opt-tiny", "llama-tiny")),
    *(Training(model, 1e-3, constant=0.02) for model in ("opt-tiny", "llama-tiny", GPT2)),
    Training("llama-tiny", 3e-3),
    Training("opt-125m", 1e-3),
)


class Serial:
    """Terms summed one by one: the worst order that counts as honest."""

    name = "serial"

    def product(self, left: Array, right: Array) -> Array:
        out = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
        for k in range(left.shape[-1]):
            out += left[..., k, None] * right[..., k, None, :]
        return out


class Flushing:
    """NumPy on a processor that treats subnormal numbers as zero, in its input and its output."""

    name = "flushing"

    def product(self, left: Array, right: Array) -> Array:
        return flushed(np.matmul(flushed(left), flushed(right)))


def flushed(array: Array) -> Array:
    return np.where(np.abs(array) < TINY, np.float32(0), array)


def all_kernels(say: Callable[[str], None] = lambda text: None) -> list[Kernel]:
    kernels: list[Kernel] = [NumpyKernel(), Flushing(), Serial()]
    try:
        kernels.append(OnnxKernel())
    except ImportError as error:
        say(f"without ONNX Runtime: {error}")
    return kernels


@dataclass
class Honest:
    """Computes products in blocks and counts the verdicts of the check."""

    kernels: list[Kernel]
    limit: int
    rng: np.random.Generator
    blocks: int = 0
    products: int = 0
    special: int = 0  # blocks of products with values that are not finite, or may overflow
    tiny: int = 0  # blocks of products in which flushing to zero matters
    repeated: int = 0  # blocks of products with repeated operands
    suspicious: int = 0  # products that the quick glance suspects; here all products are sketched, not one in ten
    accused: int = 0  # blocks called wrong
    doubted: int = 0  # products in which the check doubted itself
    examined: int = 0  # devices whose cells were recomputed
    loudest: float = 0.0  # largest energy of a block of at least 16 patches, in multiples of honest rounding's level
    check_s: float = 0.0
    by_kernel: Counter[str] = field(default_factory=Counter)
    inner: Counter[int] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    verifier: Verifier = field(default_factory=Verifier)
    _kept: dict[tuple[str, tuple[int, ...]], list[tuple[Array, Array]]] = field(default_factory=dict)

    def compute(self, product: Product) -> None:
        plainly(product)
        left, right = product.left.array, product.right.array
        self.look(left, right)
        if self.rng.random() < SCALED_SHARE:
            self.look(*self._scaled(left, right))
        if self.rng.random() < REPEATED_SHARE:
            self.repeated += self.look(self._repeating(left), self._repeating(right))
        if self.blocks >= self.limit:
            raise Enough

    def lengthen(self, product: Product) -> None:
        """Join a few rows and columns of several batches' weight gradients into that of one long batch."""
        plainly(product)
        left, right = product.left.array, product.right.array
        if left.shape[0] > 1 or left.shape[2] < 4096:
            return
        kept = self._kept.setdefault((product.name, left.shape), [])
        kept.append((left[:, :LONG_CELLS].copy(), right[:, :LONG_CELLS].copy()))
        if sum(one.shape[2] for one, _ in kept) >= LONG:
            one, two = (np.concatenate([pair[side] for pair in kept], axis=2) for side in (0, 1))
            for _ in range(LONG_TIMES):
                self.look(one, two)
                self.look(*self._scaled(one, two))
            kept.clear()

    def look(self, left: Array, right: Array) -> int:
        """Compute all blocks of this product with random kernels, and check them. Returns the number of blocks."""
        out = np.full((left.shape[0], left.shape[1], right.shape[1]), np.nan, np.float32)
        boxes = random_boxes(out.shape, self.rng, least=LEAST_BLOCKS if self.rng.random() < 0.8 else 1)
        whole = self.rng.random() >= BLOCK_BY_BLOCK or left.shape[2] > 4096
        with np.errstate(all="ignore"):
            for box in _columns(boxes, out.shape) if whole else boxes.tolist():
                self._block(left, right, out, box)
        begun = time.perf_counter()
        self.suspicious += Glance.of(left, right, self.products).suspicious(out)
        expected = Expectation.of(left, right, boxes, self.products)
        devices = np.arange(len(boxes)) % DEVICES
        found = self.verifier.check(left, right, out, boxes, devices, expected, DEVICES)
        self.check_s += time.perf_counter() - begun
        self.accused += len(found.wrong)
        self.reasons += [f"{left.shape} x {right.shape}: {why}" for why in found.why.values()]
        self.doubted += bool(found.doubted)
        self.examined += found.examined
        if not expected.special and self.products % 16 == 0:
            energies = Energies.of(expected, out, boxes)
            many = energies.patches >= 16
            self.loudest = max(self.loudest, float((energies.total / energies.patches)[many].max(initial=0.0)))
        self.special += len(boxes) * expected.special
        self.tiny += len(boxes) * (expected.flushed is not None and not expected.special)
        self.blocks += len(boxes)
        self.products += 1
        self.inner[left.shape[2]] += len(boxes)
        return len(boxes)

    def _block(self, left: Array, right: Array, out: Array, box: list[int]) -> None:
        b, bs, r, rs, c, cs = box
        inner = left.shape[2]
        kernel = self.kernels[int(self.rng.integers(len(self.kernels)))]
        if isinstance(kernel, Serial) and (inner > 512 or self.rng.random() < 0.9):  # slow
            kernel = self.kernels[0]
        one, two = left[b : b + bs, r : r + rs], right[b : b + bs, c : c + cs].transpose(0, 2, 1)
        chunk = inner if inner < 8 or self.rng.random() < 0.75 else int(self.rng.integers(inner // 8, inner))
        cells = cells_of(out, box)
        if inner > 4096 and rs * cs * bs <= 4 and self.rng.random() < 0.5:
            cells[:] = one_after_the_other(one[:, :, None, :], two.transpose(0, 2, 1)[:, None])
            self.by_kernel["serial"] += 1
            return
        cells[:] = kernel.product(one[..., :chunk], two[:, :chunk])
        for start in range(chunk, inner, chunk):
            cells += kernel.product(one[..., start : start + chunk], two[:, start : start + chunk])
        self.by_kernel[kernel.name] += 1

    def _scaled(self, left: Array, right: Array) -> tuple[Array, Array]:
        """Scale so that values vanish or overflow: the whole operand, or each of its rows by its own factor."""
        with np.errstate(all="ignore"):
            return self._scale(left), self._scale(right)

    def _scale(self, array: Array) -> Array:
        shape = (1, 1, 1) if self.rng.random() < 0.7 else (array.shape[0], array.shape[1], 1)
        least, most = (-44, -15) if self.rng.random() < 0.6 else (-5, 30)
        exponent = self.rng.uniform(least, most, shape)
        scaled: Array = (array.astype(np.float64) * 10.0**exponent).astype(np.float32)
        return scaled

    def _repeating(self, array: Array) -> Array:
        """The array itself, or repeats of one row, one number per row, one number, or one number and its negative."""
        one = array[:, :1, :1] if array[:, :1, :1].any() else np.full_like(array[:, :1, :1], 0.3)
        match int(self.rng.integers(5)):
            case 0:
                repeated = array
            case 1:
                repeated = array[:, :1]
            case 2:
                repeated = array[:, :, :1]
            case 3:
                repeated = one
            case _:
                repeated = np.where(np.arange(array.shape[2]) < array.shape[2] // 2, one, -one)
        return np.ascontiguousarray(np.broadcast_to(repeated, array.shape))


def _columns(boxes: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """One box for all boxes that share columns and batches, to call kernels less often."""
    kinds = np.unique(boxes[:, [0, 1, 4, 5]], axis=0).tolist()
    return [[b, bs, 0, shape[1], c, cs] for b, bs, c, cs in kinds]


def measure(blocks: int, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    begun = time.monotonic()
    honest = Honest(all_kernels(say), 0, np.random.default_rng(0))
    ended: dict[str, str] = {}
    for model in ("opt-tiny", "llama-tiny"):
        Training(model, batch=512).run(honest.lengthen, LONG // (512 * 32))
    say(f"inner length {LONG:,}: {honest.blocks:,} blocks, {honest.accused} called wrong")
    begins = honest.blocks
    for index, training in enumerate(TRAININGS):
        honest.limit = begins + round((blocks - begins) * (index + 1) / len(TRAININGS))
        losses: list[float] = []
        seed = 0
        while honest.blocks < honest.limit:
            seed += 1
            try:
                training.run(honest.compute, STEPS, seed, losses.append)
            except Enough:
                break
        weights = f"x{training.wide:g}" if training.constant is None else f"all {training.constant:g}"
        name = f"{training.model}, learning rate {training.learning_rate:g}, weights {weights}"
        ended[name] = f"{losses[-1]:.3g}" if losses else "not one step"
        say(f"{name}: last loss {ended[name]}; {honest.blocks:,} blocks so far, {honest.accused} called wrong")
    return {
        "blocks": honest.blocks,
        "products": honest.products,
        "accused": honest.accused,
        "reasons": honest.reasons[:10],
        "doubted": honest.doubted,
        "examined_devices": honest.examined,
        "suspicious_products": honest.suspicious,
        "special_blocks": honest.special,
        "tiny_blocks": honest.tiny,
        "repeated_blocks": honest.repeated,
        "loudest": honest.loudest,
        "check_us_per_block": 1e6 * honest.check_s / honest.blocks,
        "blocks_by_kernel": dict(honest.by_kernel),
        "inner": [min(honest.inner), max(honest.inner)],
        "last_losses": ended,
        "seconds": time.monotonic() - begun,
    }
