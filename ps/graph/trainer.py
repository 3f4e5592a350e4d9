"""The training loop, the same for plain PyTorch and for the fleet: only the callable differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Step:
    number: int  # from 1
    loss: float
    seconds: float


def train(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    batches: Iterable[torch.Tensor],
    *,
    seed: int,
    learning_rate: float,
    weight_decay: float,
    micro_batches: int = 1,
    now_s: Callable[[], float] = time.perf_counter,
    before_step: Callable[[int], None] = lambda number: None,
    after_gradients: Callable[[torch.Tensor, float], None] = lambda tokens, loss: None,
    after_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """`forward` is the model itself, or the model distributed (ps.graph.capture.distribute). A batch is divided into
    `micro_batches` equal parts, computed in turn; their gradients add up to the batch's. `after_gradients` gets the
    batch and its loss while the gradients are in the parameters and no weight has changed; its time does not count."""
    torch.manual_seed(seed)  # dropout draws the same numbers in both runs
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    steps = []
    for number, tokens in enumerate(batches, start=1):
        before_step(number)
        begun_s = now_s()
        loss = gradients(forward, tokens, micro_batches)
        computed_s = now_s() - begun_s
        after_gradients(tokens, loss)
        begun_s = now_s()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(number, loss, computed_s + now_s() - begun_s))
        after_step(steps[-1])
    return steps


def gradients(forward: Callable[..., Any], tokens: torch.Tensor, micro_batches: int) -> float:
    """Leave the batch's gradients in the parameters. Returns its mean loss."""
    total = 0.0
    for part in tokens.chunk(micro_batches):
        loss = forward(input_ids=part, labels=part).loss / micro_batches
        loss.backward()
        total += loss.item()
    return total
