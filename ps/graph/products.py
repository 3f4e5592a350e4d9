"""Every matrix product of a model's training step, without its weights.

The same capture as in training, on PyTorch's meta device: shapes only, so a 70B model takes seconds. Models of one and
two layers are captured; every further layer adds the same products as the second.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ps.graph.capture import Program, Runner, distribute
from ps.graph.models import build_model
from ps.planning.plans import Shape


def step_products(config: Any, batch: int, sequence: int) -> dict[Shape, int]:
    """Shape -> number of occurrences in one forward and backward pass."""
    one, two = (_captured(config, layers, batch, sequence) for layers in (1, 2))
    layers = config.num_hidden_layers
    counts = {shape: one[shape] + (layers - 1) * (two[shape] - one[shape]) for shape in two | one}
    return {shape: count for shape, count in counts.items() if count > 0}


def _captured(config: Any, layers: int, batch: int, sequence: int) -> Counter[Shape]:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    found: Counter[Shape] = Counter()

    def run(program: Program, values: list[Any]) -> Sequence[Any]:
        for node in program.nodes:
            if node.product is not None:
                left, right = (node.fx_node.args[i].meta["val"].shape for i in node.product)  # type: ignore[union-attr]
                entries = left[0] if len(left) == 3 else 1
                found[Shape(entries, left[-2], left[-1], right[-1])] += 1
        result: Sequence[Any] = program.module(*values)
        return result

    meta_pass(meta_model(shallow), batch, sequence, run)
    return found


def meta_model(config: Any) -> torch.nn.Module:
    """The model on PyTorch's meta device, where weights have shapes and take no memory."""
    with torch.device("meta"):
        model: torch.nn.Module = build_model(config)
    return model


def meta_pass(model: torch.nn.Module, batch: int, sequence: int, run: Runner) -> None:
    """One forward and backward pass of a `meta_model`, every graph through `run`."""
    torch._dynamo.reset()  # two depths must not share compiled code
    tokens = torch.zeros((batch, sequence), dtype=torch.int64, device="meta")
    model.train()  # as in training: code that reads a value there (layerdrop) breaks the graph here, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the loss has no derivative on this device, and needs none
        distribute(model, run)(input_ids=tokens, labels=tokens).loss.backward()
    torch._dynamo.reset()
