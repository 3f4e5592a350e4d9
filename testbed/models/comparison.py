"""Is a training step the step of plain PyTorch? Judged step by step, each from the fleet's own weights.

Training is chaotic: two runs of plain PyTorch that differ by one rounding in the weights drift apart within tens of
steps at usual learning rates. Equal losses at the end are therefore no test of a long run. Here a plain model takes
over the fleet's weights and random state before a step, computes the same batch, and loss and gradients must agree.

Some steps are ill-conditioned: an activation next to a kink, two experts with almost equal scores. Where gradients
differ by more than the tolerance, plain PyTorch is asked how far its own gradients move when the weights move by one
rounding, and that much is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ps.graph.trainer import gradients

LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4  # of a gradient's norm; float32 products in another order: below 1e-5
NOTHING = 1e-3  # a gradient below this part of all gradients' norm is judged against that: it may be rounding only
ROUNDING = 2.0**-24  # half the distance of neighbouring float32 values
NUDGES = 4  # attempts to move a doubtful step by one rounding
ALLOWED = 4.0  # times the largest move found so: few attempts do not find the largest there is
SHORT = 50  # steps: of a run as short as this, every step is compared
ALL_COMPARED = 50  # of a longer run about so many steps are


@dataclass(frozen=True, slots=True)
class Compared:
    """One step on the fleet and in plain PyTorch, from the same weights."""

    step: int
    loss: float
    plain_loss: float
    gradient: float  # the largest difference of a gradient, as a part of its norm
    where: str  # the weight that has it
    rounding: float  # how far plain PyTorch moves by one rounding of the weights; 0 unless it had to be asked

    @property
    def loss_difference(self) -> float:
        if self.loss == self.plain_loss or (math.isnan(self.loss) and math.isnan(self.plain_loss)):
            return 0.0
        return abs(self.loss - self.plain_loss)

    @property
    def exact(self) -> bool:
        # a loss above 1 has its last digits in proportion
        allowed = LOSS_TOLERANCE * max(1.0, abs(self.plain_loss)) if math.isfinite(self.plain_loss) else LOSS_TOLERANCE
        return self.loss_difference <= allowed and self.gradient <= max(GRADIENT_TOLERANCE, ALLOWED * self.rounding)

    def told(self) -> str:
        return (
            f"step {self.step} is not the step of plain PyTorch from the same weights: loss {self.loss:.6f} instead of "
            f"{self.plain_loss:.6f}, gradient of {self.where} off by {self.gradient:.1e} of its norm"
        )


def every(steps: int) -> int:
    """Of a run of so many steps, the distance of those that are compared."""
    return 1 if steps <= SHORT else math.ceil(steps / ALL_COMPARED)


class StepComparison:
    def __init__(self, plain: torch.nn.Module, fleet: torch.nn.Module, every: int, micro_batches: int) -> None:
        """`plain`: a model of its own for plain PyTorch; its weights are overwritten."""
        self._plain, self._fleet = plain, fleet
        self._every, self._micro_batches = every, micro_batches
        self._random: torch.Tensor | None = None
        self._number = 0
        self.compared: list[Compared] = []

    def before(self, number: int) -> None:
        """Step `number`, from 1, is about to begin."""
        self._number = number
        self._random = torch.get_rng_state() if (number - 1) % self._every == 0 else None

    def after_gradients(self, tokens: torch.Tensor, loss: float) -> None:
        """The fleet's gradients of this batch are in its model, and its weights are those of before."""
        if self._random is None:
            return
        ours = _gradients(self._fleet)
        after = torch.get_rng_state()
        try:
            plain_loss, theirs = self._step(tokens, self._random)
            difference, where = largest_difference(ours, theirs)
            rounding = 0.0
            if difference > GRADIENT_TOLERANCE:
                rounding = max(self._moved(tokens, self._random, theirs, seed) for seed in range(NUDGES))
        finally:
            self._plain.zero_grad()
            torch.set_rng_state(after)
        self.compared.append(Compared(self._number, loss, plain_loss, difference, where, rounding))

    def _step(
        self, tokens: torch.Tensor, random: torch.Tensor, nudge: torch.Generator | None = None
    ) -> tuple[float, dict[str, torch.Tensor]]:
        with torch.no_grad():
            pairs = (
                zip(self._plain.parameters(), self._fleet.parameters(), strict=True),
                zip(self._plain.buffers(), self._fleet.buffers(), strict=True),
            )
            for own, given in chain(*pairs):
                own.copy_(given)
            if nudge is not None:
                nudged(self._plain, nudge)
        self._plain.train()
        self._plain.zero_grad()
        torch.set_rng_state(random)
        loss = gradients(self._plain, tokens, self._micro_batches)
        return loss, {name: gradient.clone() for name, gradient in _gradients(self._plain).items()}

    def _moved(self, tokens: torch.Tensor, random: torch.Tensor, unmoved: dict[str, torch.Tensor], seed: int) -> float:
        _, moved = self._step(tokens, random, torch.Generator().manual_seed(seed))
        return largest_difference(moved, unmoved)[0]


@torch.no_grad()
def nudged(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Move every weight by one rounding, up or down."""
    for weight in model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator).mul_(2).sub_(1)
        weight.add_(weight * up * (2 * ROUNDING))


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient as a part of its norm, and the weight that has it."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        return math.inf, name
    norms = {name: float(torch.nan_to_num(gradient, 0.0, 0.0, 0.0).norm()) for name, gradient in theirs.items()}
    every_norm = math.sqrt(sum(norm * norm for norm in norms.values()))
    largest, where = 0.0, next(iter(norms), "")
    for name, one in ours.items():
        two = theirs[name]
        same = (one == two) | (torch.isnan(one) & torch.isnan(two))  # diverged in the same way: infinite, or no number
        off = float(torch.where(same, 0.0, one - two).norm())
        part = 0.0 if off == 0 else off / max(norms[name], NOTHING * every_norm, 1e-30)
        if math.isnan(part) or part > largest:
            largest, where = math.inf if math.isnan(part) else part, name
    return largest, where


def judged(compared: Sequence[Compared]) -> list[str]:
    """Why the steps are not those of plain PyTorch; empty if they are."""
    wrong = [one for one in compared if not one.exact]
    if not wrong:
        return []
    more = f"; {len(wrong) - 1} more of {len(compared)} compared steps" if len(wrong) > 1 else ""
    return [wrong[0].told() + more]


def told_of(compared: Sequence[Compared]) -> dict[str, Any]:
    """For summary.json; empty if nothing was compared."""
    if not compared:
        return {}
    return {
        "steps": len(compared),
        "every": compared[1].step - compared[0].step if len(compared) > 1 else 1,
        "wrong": sum(not one.exact for one in compared),
        "loss": max(one.loss_difference for one in compared),
        "gradient": max(one.gradient for one in compared),
        "where": max(compared, key=lambda one: one.gradient).where,
        "ill_conditioned": [one.step for one in compared if one.exact and one.gradient > GRADIENT_TOLERANCE],
    }
