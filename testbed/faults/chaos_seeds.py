"""Worlds for `testbed.faults.chaos` from a seed: the kinds of devices, products and faults, and their frequency."""

from __future__ import annotations

import random
from typing import Any

from testbed.faults.chaos_world import HUGE, Operation


def generate(seed: int, length: int = 120) -> list[Operation]:
    rng = random.Random(seed)
    churn = rng.choice([1, 4])  # little churn lets queues grow, much churn keeps cutting blocks
    weights = {"join": 2, "submit": 3, "forget": 1, "run": 18, "leave": churn, "vanish": 1, "slow": 2}
    weights |= {"late": 8, "twice": 8, "lost": 2, "refuse": rng.choice([0, 2, 6])}
    weights |= {"newcomers": rng.choice([0, 2]), "mute": rng.choice([0, 0, 1])}
    weights |= {"stray": 1, "stray refusal": 1, "swap": 4, "overdue": rng.choice([0, 6, 12]), "lie": rng.choice([0, 3])}
    if rng.random() < 0.25:  # many products on a stable fleet: the dispatcher detects devices that are always late
        weights |= {"submit": 6, "overdue": 10, "slow": 4, "leave": 0, "vanish": 0, "refuse": 0}
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    # products repeat, as in training: plans are kept, and adapted as devices leave and join
    groups = [[_product(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))] for _ in range(3)]
    planner = rng.choice(["packed", "grid", "grid", "grid"])  # packing takes longest
    begin: list[Operation] = [("planner", planner), ("history", rng.choice([0.0, 0.5, 1.0, 2.0]))]
    fleet = rng.randint(1, 8)
    begin.append(("join", [_profile(rng) for _ in range(fleet)]))
    silent = rng.choice([0, 0, 1, fleet // 3])  # from the first block on
    if silent:
        begin.append(("mute", rng.sample(range(fleet), silent)))
    early = rng.choice([0.0, 0.5])  # some worlds start deferred products beside the critical ones
    return begin + [_submit(groups, early, rng) if kind == "submit" else _operation(kind, rng) for kind in kinds]


def _submit(groups: list[list[Any]], early: float, rng: random.Random) -> Operation:
    return "begin" if rng.random() < early else "submit", rng.choice(groups)


def _operation(kind: str, rng: random.Random) -> Operation:
    any_of = rng.randrange(1000)
    match kind:
        case "join" | "newcomers":
            return kind, [_profile(rng) for _ in range(rng.randint(1, 3))]
        case "leave" | "mute":
            return kind, [rng.randrange(1000) for _ in range(rng.choice([1, 1, 2]))]
        case "forget":
            return kind, [rng.randrange(6) for _ in range(rng.randint(1, 2))]
        case "run":
            return kind, rng.randint(1, 8)
        case "late" | "twice":
            return kind, any_of, rng.choice([0.0, 0.01, 1.0, 10.0])
        case "slow":
            return kind, any_of, rng.choice([2.0, 10.0, 100.0])
        case "overdue":
            return kind, any_of, rng.choice([0.1, 1.0, 6.0])  # longer than a device stays suspect
        case "stray" | "stray refusal":
            return kind, rng.randint(-2, 12), rng.randint(-1, 20), rng.randint(-1, 12)
        case "swap":
            return kind, any_of, rng.randrange(1000)
        case _:
            return kind, any_of


def _profile(rng: random.Random) -> tuple[float, ...]:
    rates = (round(10 ** rng.uniform(low, high)) for low, high in ((6, 12), (4, 9), (4, 9)))
    flops, down_bps, up_bps = (float(rate) for rate in rates)
    memory_bytes = rng.choice([8, 60, 200, 1600, 2500, 8000, HUGE])
    return (
        flops,
        rng.choice([0.0, 1e-3]),
        down_bps,
        up_bps,
        rng.choice([0.0, 0.05]),
        memory_bytes,
        rng.choice([1, 2, 4]),
    )


def _product(rng: random.Random) -> tuple[int, int, int, int, bool, int | None]:
    inner = rng.choice([rng.randint(1, 6), rng.randint(1, 6), rng.randint(90, 400)])  # little memory: in chunks
    weight = rng.choice([None, rng.randrange(6)])
    return rng.choice([1, 1, 1, 3]), rng.randint(1, 6), inner, rng.randint(1, 6), rng.random() < 0.5, weight
