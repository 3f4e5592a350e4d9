"""A training step with two unconstrained local agents against plain PyTorch on the same cores."""

from __future__ import annotations

import os
from typing import Any

import torch

from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model, model_config
from ps.graph.text import batches, read_text
from ps.graph.trainer import train
from testbed.bench.ours import agents


def measure(steps: int = 3, batch: int = 8, sequence: int = 64) -> dict[str, Any]:
    """OPT-125M shapes. The two kinds of step alternate, so that a busy moment of the machine affects both."""
    config = model_config("opt-125m")
    data = batches(read_text("stdlib"), 2 * steps + 1, batch, sequence, seed=0)
    cores = os.cpu_count() or 1
    torch.manual_seed(0)
    plain, ours = build_model(config), build_model(config)
    ours.load_state_dict(plain.state_dict())
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    losses: dict[str, list[float]] = {"plain": [], "ours": []}
    with agents(cores) as server:
        executor = Executor(server)
        forward = distribute(ours, executor.run)
        flops = executor.rehearse(lambda: forward(input_ids=data[0], labels=data[0]).loss.backward())
        ours.zero_grad()
        for i in range(steps):
            for name, model, call in (("plain", plain, plain), ("ours", ours, forward)):
                torch.set_num_threads(cores)
                (step,) = train(model, call, data[i : i + 1], seed=0, learning_rate=1e-4, weight_decay=0.01)
                seconds[name].append(step.seconds)
                losses[name].append(step.loss)
    return {
        "model": "opt-125m",
        "batch": batch,
        "sequence": sequence,
        "gflop": flops / 1e9,
        "plain_s": min(seconds["plain"]),
        "ours_s": min(seconds["ours"]),
        "ratio": min(seconds["ours"]) / min(seconds["plain"]),
        "waiting_s": executor.spent.waiting_s / steps,
        "local_s": executor.spent.local_s / steps,
        "loss_max_abs_diff": max(abs(a - b) for a, b in zip(losses["plain"], losses["ours"], strict=True)),
    }
