"""Worlds of the server's loop from a seed: the kinds of processes, products and faults, and their frequency."""

from __future__ import annotations

import random

from testbed.faults.chaos_world import COMMON, HUGE, Operation
from testbed.faults.loop_world import FAULTS

PROFILES = (
    COMMON,
    (1e8, 1e-3, 5e6, 5e6, 0.002, HUGE, 4),
    (1e7, 1e-3, 1e7, 2e6, 0.01, HUGE, 2),
    (1e9, 1e-3, 1e7, 1e7, 0.002, 2500, 4),  # little memory: blocks are sent in chunks
    (1e9, 1e-3, 1e7, 1e7, 0.002, 5000, 2),
)


def generate_loop(seed: int, length: int = 30) -> list[Operation]:
    rng = random.Random(f"loop {seed}")
    weights = {"pod": 1, "local": 2, "enrolled": 2, "submit": 10, "forget": 1, "run": 20}
    weights |= {"slow reader": rng.choice([1, 6]), "mute": rng.choice([0, 2]), "late": 3, "trickle": 2, "freeze": 2}
    weights |= {"vanish": rng.choice([0, 1]), "drop": 2, "leave": 1, "move": rng.choice([1, 4]), "garbage": 1}
    weights |= {"flood": rng.choice([0, 2]), "twice": 3, "pause": rng.choice([0, 3]), "hitch": 1}
    weights |= {"jump": rng.choice([0, 3]), "calendar": 1, "full disk": rng.choice([0, 2]), "busy disk": 1}
    if rng.random() < 0.25:  # only the server's machine has faults: no device is ever late
        weights |= dict.fromkeys(FAULTS, 0) | {"flood": 2, "twice": 2, "pause": 4, "hitch": 2, "jump": 4}
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    begin: list[Operation] = [("dice", seed)]
    begin += [_process(rng.choice(["pod", "local", "enrolled"]), rng) for _ in range(rng.randint(1, 5))]
    return [*begin, ("run", 100), *(_operation(kind, rng) for kind in kinds)]


def _operation(kind: str, rng: random.Random) -> Operation:
    match kind:
        case "pod" | "local" | "enrolled":
            return _process(kind, rng)
        case "submit":
            return kind, [_product(rng) for _ in range(rng.choice([1, 1, 2, 4]))]
        case "forget":
            return kind, [rng.randrange(4) for _ in range(2)]
        case "run":
            return kind, rng.choice([1, 5, 20, 100, 400, 1500])
        case "pause":
            return kind, rng.choice([300, 1000, 6000, 20000]), rng.randrange(3)
        case "hitch":
            return kind, rng.choice([50, 300, 1500])
        case "jump":
            return kind, rng.choice([500, 5000, 3600_000])
        case "calendar":
            return kind, rng.choice([60_000, 86_400_001])
        case "full disk" | "busy disk":
            return kind, rng.choice([100, 2000, 10_000])
        case "flood":
            return kind, rng.randrange(100), rng.choice([20, 300, 900])
        case "freeze":
            return kind, rng.randrange(100), rng.choice([200, 1500, 8000])
        case "leave":
            return kind, rng.randrange(100), rng.choice([100, 3000])
        case "mute":
            return kind, rng.randrange(100), rng.choice([500, 5000, 10**9])
        case _:
            return kind, rng.randrange(100), rng.choice([20, 200, 1500, 7000])


def _process(kind: str, rng: random.Random) -> Operation:
    return kind, [rng.choice(PROFILES) for _ in range(rng.randint(1, 4) if kind == "pod" else 1)]


def _product(rng: random.Random) -> tuple[int, int, int, int, bool, int | None]:
    inner = rng.choice([rng.randint(1, 8), rng.randint(1, 8), rng.randint(60, 150)])
    weight = rng.choice([None, None, rng.randrange(4)])
    return rng.choice([1, 1, 2]), rng.randint(1, 12), inner, rng.randint(1, 12), rng.random() < 0.6, weight
