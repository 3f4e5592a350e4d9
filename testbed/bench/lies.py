"""Detection of wrong answers, and the effect of undetected ones.

Trainings in which some devices lie about every block, about one block in a hundred, or only about long sums. A detected
wrong block is corrected, and its device is suspended; an undetected one stays. The attacker knows the code: several
lies are multiples of the level that the check allows. The effect is the largest difference, within 20 steps, between
the loss and that of a training with exact products. Honest devices have an effect too, through the order of their
additions; it is measured for comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent.compute.kernels import Array
from emulator.pods.faults import LIES, Liar
from ps.transport.jobs import Product
from ps.verification.glance import Glance, Lot
from ps.verification.rounding import EPSILON, PLAIN, level_squared
from ps.verification.sketch import Expectation
from ps.verification.verifier import Verifier
from testbed.bench.here import GPT2, Enough, Training, cells_of, random_boxes

DEVICES = 100
STEPS = 20
FOUND_WITHIN = 2  # steps
EFFECT = 1e-5  # an undetected lie must have less effect
# model, seed, liars, which lies: all lies where losses move little, the worst lies where losses move most
CAMPAIGNS = (("llama-tiny", 1, (1, 5, 25), ""), *((GPT2, seed, (25,), "to zero of a block") for seed in (1, 2, 3, 4)))
FEWEST_BLOCKS, MOST_BLOCKS = 100, 1024


@dataclass(frozen=True, slots=True)
class Block:
    """What a liar knows about a block."""

    left: Array  # [b, m, n]
    right: Array  # [b, q, n]
    cells: Array  # [b, m, q], computed honestly
    rng: np.random.Generator
    name: str = ""

    @property
    def size(self) -> Array:
        """|a_i| |b_j| of each cell."""
        rows, columns = (np.linalg.norm(x.astype(np.float64), axis=2) for x in (self.left, self.right))
        size: Array = (rows[:, :, None] * columns[:, None, :]).astype(np.float32)
        return size

    def signs(self, how: str) -> Any:
        match how:
            case "same":
                return 1.0
            case "random":
                return self.rng.choice([-1.0, 1.0], self.cells.shape)
        return np.sign(self.cells)  # away from zero


Lie = Callable[[Block], Array]


def old_tolerance(share: float, how: str) -> Lie:
    """A share of 4 eps sqrt(n) |a_i| |b_j|."""
    return lambda block: (
        block.cells + block.signs(how) * (share * 4 * EPSILON * np.sqrt(block.left.shape[2]) * block.size)
    )


def level(times: float, how: str) -> Lie:
    """A multiple of the level that the check allows for honest rounding."""

    def lie(block: Block) -> Array:
        size = block.size
        kappa = np.where(size > 0, block.cells / np.where(size > 0, size, 1), 0)
        allowed = np.sqrt(level_squared(kappa.astype(np.float64) ** 2, block.left.shape[2]))
        cells: Array = block.cells + block.signs(how) * (times * EPSILON * allowed * size)
        return cells

    return lie


def cell_per_row(share: float) -> Lie:
    """One cell of each row, off by a share of its typical size."""

    def lie(block: Block) -> Array:
        cells = block.cells.copy()
        batch, rows, columns = cells.shape
        b, r = np.meshgrid(np.arange(batch), np.arange(rows), indexing="ij")
        c = block.rng.integers(columns, size=b.shape)
        cells[b, r, c] += share * block.size[b, r, c] / np.float32(np.sqrt(block.left.shape[2]))
        return cells

    return lie


def near_zero(times: float, nth: int = 0) -> Lie:
    """In each block, push the cell nearest zero, or the `nth` next, by `times` levels against its sign: AdamW turns the
    sign of a gradient into a step."""

    def lie(block: Block) -> Array:
        cells, size = block.cells.copy(), block.size
        near = np.abs(cells) / np.where(size > 0, size, np.inf)
        near[size == 0] = np.inf
        place = np.argsort(near, axis=None)[min(nth, near.size - 1)]
        cells.ravel()[place] -= np.copysign(times * PLAIN * EPSILON * size.ravel()[place], cells.ravel()[place])
        return cells

    return lie


def flipped_signs(share: float) -> Lie:
    return lambda block: np.where(block.rng.random(block.cells.shape) < share, -block.cells, block.cells)


def quarter_of_columns(block: Block) -> Array:
    cells = block.cells.copy()
    width = -(-cells.shape[2] // 4)
    cells[:, :, :width] = old_tolerance(0.7, "same")(block)[:, :, :width]
    return cells


def rarely(lie: Lie, share: float = 0.01) -> Lie:
    return lambda block: lie(block) if block.rng.random() < share else block.cells


def in_16_bits(block: Block) -> Array:
    """Truncate to bfloat16."""
    return (np.ascontiguousarray(block.cells).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


class Replay:
    """Return this product's previous block of the same shape."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, tuple[int, ...]], Array] = {}

    def __call__(self, block: Block) -> Array:
        key = block.name, block.cells.shape
        before, self._before[key] = self._before.get(key, block.cells), block.cells.copy()
        return before


def by_pod(how: str) -> Lie:
    liar = Liar()
    liar.begin(0, how)
    return lambda block: liar.answer(0, block.cells).reshape(block.cells.shape)


def only_long(lie: Lie, inner: int = 256) -> Lie:
    return lambda block: lie(block) if block.left.shape[2] >= inner else block.cells


def kinds() -> dict[str, Lie]:
    signs = ("same", "random", "away from zero")
    return {
        **{f"pod: {how}": by_pod(how) for how in LIES},
        **{f"one cell per row off by {share:g} of its size": cell_per_row(share) for share in (1.2, 1e-2, 1e-3, 1e-4)},
        **{f"{share:.1%} of the signs flipped": flipped_signs(share) for share in (0.045, 0.001)},
        **{f"{x:g} of 4 eps sqrt(n), sign {how}": old_tolerance(x, how) for x in (0.2, 0.7) for how in signs},
        **{f"{x:g} levels, sign {how}": level(x, how) for x in (0.5, 1.0, 2.0, 5.0) for how in signs},
        **{f"nearest to zero of a block off by {x:g} levels": near_zero(x) for x in (5.0, 8.0, 11.0)},
        "tenth nearest to zero of a block off by 11 levels": near_zero(11.0, 9),
        "a quarter of the columns": quarter_of_columns,
        "only long sums": only_long(old_tolerance(0.5, "same")),
        "one block in 100: noise": rarely(by_pod("noise")),
        "one block in 100: 2 levels": rarely(level(2.0, "same")),
        "replay": Replay(),
        "16 bits": in_16_bits,
    }


@dataclass
class Trial:
    """A training on a fleet in which some devices lie."""

    liars: int
    lie: Lie
    devices: int = DEVICES
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    verifier: Verifier = field(default_factory=lambda: Verifier(1))
    suspended: dict[int, tuple[int, str]] = field(default_factory=dict)  # device -> product, why
    products: int = 0
    told: int = 0  # wrong blocks returned
    accused: int = 0  # honest devices suspended
    doubted: int = 0
    _lot: Lot = field(init=False)

    def __post_init__(self) -> None:
        self._lot = Lot(lambda below: int(self.rng.integers(below)))

    @property
    def all_found(self) -> bool:
        return all(device in self.suspended for device in range(self.liars))

    def compute(self, product: Product) -> None:
        left, right, out = product.left.array, product.right.array, product.out
        out[:] = left.astype(np.float64) @ right.astype(np.float64).transpose(0, 2, 1)
        truth = out.copy()
        boxes = random_boxes(out.shape, self.rng, MOST_BLOCKS, min(FEWEST_BLOCKS, out.size))
        owners = self.rng.permutation(len(boxes)) % self.devices
        for index in np.flatnonzero(owners < self.liars).tolist():
            if int(owners[index]) not in self.suspended:
                self._tell(product, boxes[index].tolist())
        self.products += 1
        closely = self._lot.draw() or Glance.of(left, right, (3, self.products)).suspicious(out)
        if not closely:
            return
        expected = Expectation.of(left, right, boxes, (2, self.products))
        found = self.verifier.check(left, right, out, boxes, owners, expected, self.devices)
        self.doubted += bool(found.doubted)
        for index in found.wrong:
            cells_of(out, boxes[index])[:] = cells_of(truth, boxes[index])
        for device, why in found.why.items():
            self.suspended.setdefault(device, (self.products, why))
            self.accused += device >= self.liars

    def _tell(self, product: Product, box: Sequence[int]) -> None:
        b, bs, r, rs, c, cs = box
        left, right = product.left.array[b : b + bs, r : r + rs], product.right.array[b : b + bs, c : c + cs]
        cells = cells_of(product.out, box)
        with np.errstate(all="ignore"):
            lie = self.lie(Block(left, right, cells.copy(), self.rng, product.name)).astype(np.float32)
        self.told += not np.array_equal(lie, cells, equal_nan=True)
        cells[:] = lie


class Reordered:
    """Honest, but sums the terms in another order."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, product: Product) -> None:
        order = self._rng.permutation(product.left.array.shape[2])
        one, two = product.left.array[..., order], product.right.array[..., order]
        np.matmul(one, two.transpose(0, 2, 1), out=product.out)


def exactly(product: Product) -> None:
    product.out[:] = product.left.array.astype(np.float64) @ product.right.array.astype(np.float64).transpose(0, 2, 1)


def run(
    training: Training, kind: str, liars: int, truth: Sequence[float], steps: int = STEPS, seed: int = 1
) -> dict[str, Any]:
    trial = Trial(liars, kinds()[kind])
    losses: list[float] = []

    def each(loss: float) -> None:
        losses.append(loss)
        if len(losses) > FOUND_WITHIN and trial.all_found:
            raise Enough  # no liar is left

    with contextlib.suppress(Enough):
        training.run(trial.compute, steps, seed, each)
    per_step = trial.products / max(len(losses), 1)
    last = max((product for device, (product, _) in trial.suspended.items() if device < liars), default=0)
    return {
        "model": training.model,
        "seed": seed,
        "kind": kind,
        "liars": liars,
        "found": sum(device < liars for device in trial.suspended),
        "last_found_step": -(-last // per_step) if last else None,
        "told": trial.told,
        "honest_accused": trial.accused,
        "doubted": trial.doubted,
        "effect": float(np.abs(np.subtract(losses, truth[: len(losses)])).max()),
        "why": next((why for _, why in trial.suspended.values()), ""),
    }


def holds(result: dict[str, Any]) -> bool:
    """Whether all liars were found within two steps or had no effect, and no honest device was accused."""
    early = result["found"] == result["liars"] and result["last_found_step"] <= FOUND_WITHIN
    return not result["honest_accused"] and (early or result["effect"] < EFFECT)


def measure(say: Callable[[str], None] = lambda text: None, steps: int = STEPS) -> dict[str, Any]:
    honest, results = [], []
    for model, seed, fleets, wanted in CAMPAIGNS:
        training = Training(model)
        truth = training.run(exactly, steps, seed)
        moved = [np.abs(np.subtract(training.run(Reordered(i), steps, seed), truth)).max() for i in range(4)]
        honest += [float(one) for one in moved]
        say(f"{model}, seed {seed}: honest orders of additions move the loss by {min(moved):.1e} to {max(moved):.1e}")
        for liars in fleets:
            for kind in kinds():
                if wanted in kind:
                    one = run(training, kind, liars, truth, steps, seed)
                    results.append(one)
                    say(
                        f"{liars:>3} of {DEVICES}, {kind}: {one['found']} found by step {one['last_found_step']}, "
                        f"effect {one['effect']:.1e}{'' if holds(one) else '  DOES NOT HOLD'}"
                    )
    return {"honest_effects": honest, "lies": results}
