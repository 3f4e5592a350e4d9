"""A device's profile as the agent writes it, made from a performance model that the test knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from agent.measure.sampling import quartiles
from agent.measure.shapes import shapes
from emulator.model.performance import Performance

TRUTH = Performance(2e-5, 2e-11, 1e-7, 1e-10, 3e-10, 2e-10, tile_rows=6, tile_columns=16)


def profile(count: int = 60, rounds: int = 3) -> dict[str, Any]:
    """As the agent writes it: two kernels, the second twice as slow, 2% noise."""
    rng = np.random.default_rng(0)
    grid = shapes(count, 0, 1e9, 1 << 25)
    seconds = TRUTH.seconds(np.array(grid)).tolist()
    samples = []
    for number in range(rounds):
        for kernel, slower in enumerate((1.0, 2.0)):
            for shape, typical_s in enumerate(seconds):
                each = (typical_s * slower * rng.lognormal(0, 0.02, 3)).tolist()
                processor = [seconds / 4 for seconds in each]
                middles = [quartiles(each), quartiles(processor)]
                samples.append([kernel, shape, number, 3, sum(each), each, sum(processor), *middles])
    return {
        "format": "cleave-profile",
        "version": 2,
        "made": "2026-01-01T00:00:00+00:00",
        "complete": True,
        "device": {"name": "My Phone", "threads": 1, "cpu_quota": None, "processor": 'a "chip"', "system": "Linux"},
        "versions": {"numpy": "2.4"},
        "settings": {},
        "memory": {"available_bytes": 1 << 30, "budget_bytes": 256_000_000},
        "kernels": ["numpy", "onnxruntime"],
        "rejected": {},
        "shapes": [list(shape) for shape in grid],
        "samples": samples,
        "rounds": [[4.0, 1.0]] * rounds,
        "sustained": {
            "kernel": "numpy",
            "shape": [1, 256, 256, 256],
            "windows": [[0.25 * i, 10, 0.25, 0.2] for i in range(20)],
        },
        "pauses": {"watched_s": 1.0, "ran_and_away_s": []},
        "copy_bytes_per_s": 1e10,
        "link": {
            "address": "tcp://x:1",
            "round_trip_s": [0.02] * 5,
            "down": [[1e6, 0.12, 0.01]],
            "up": [[1e6, 0.22, 0.02]],
        },
    }


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
