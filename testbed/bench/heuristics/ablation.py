"""`python -m testbed.bench ablation`: the fixed set with each heuristic switched off, one at a time.

A heuristic earns its place if some case is at least 2% slower without it, or if the attack against which it defends
succeeds without it (tests/attacks). The switches are settings of the two rooms, so that a run here and a run of the
system differ in nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

import ps.planning.settings as planning
import ps.scheduling.settings as scheduling
from testbed.bench.heuristics.fixed_set import CASES, SEEDS
from testbed.runs.display import Display


@dataclass(frozen=True, slots=True)
class Off:
    """The settings that switch a heuristic off."""

    planning: Mapping[str, Any] = field(default_factory=dict)
    scheduling: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(planning.using(planning, self.planning))
            stack.enter_context(planning.using(scheduling, self.scheduling))
            yield


HEURISTICS: dict[str, Off] = {
    "few devices, equal plans": Off({"slack": 1.0 + 1e-9}),
    "lost blocks sooner, product later": Off({"later": 1.0 + 1e-9}),
    "strips": Off({"most_strips": 1, "most_pieces": 1}),
    "strips that grow or shrink": Off({"steepest": 1.0}),
    "short strips of long work": Off({"most_pieces": 4}),
    "several arrangements": Off({"arrangements": 2}),
    "gradients beside the critical path": Off({"most_taken": 0.0}),
    "plans are repaired": Off({"solving_s": 0.0}),
    "lost blocks over many devices": Off({"shared_over": 4}),
    "work ahead of answers": Off({"long_s": 1e-9, "most_pieces": 4}),
    "what most take is normal": Off(scheduling={"tail": math.inf}),
    "what nearly all take is normal": Off(scheduling={"quantile": 1.0, "tail": math.inf}),
    "typically late devices": Off(scheduling={"outlier": math.inf}),
    "profiles are corrected": Off(scheduling={"answers": 10**9}),
    "slow devices are forgiven": Off(scheduling={"forgiven_s": math.inf}),
    "suspects pause": Off(scheduling={"suspected_s": 0.0}),
    "idle devices take over": Off(scheduling={"per_turn": 0}),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench ablation", description=__doc__)
    parser.add_argument("--cases", default=";".join(CASES), help="of the fixed set, with semicolons (%(default)s)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many (%(default)s)")
    parser.add_argument("--only", default="", help="heuristics, with semicolons; default: all")
    parser.add_argument("--json", type=Path, help="write the figures there; figures that are there are not made again")
    options = parser.parse_args(arguments)
    display = Display()
    chosen = options.only.split(";") if options.only else list(HEURISTICS)
    known: dict[str, float] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    cases, seeds = options.cases.split(";"), SEEDS[: options.seeds]
    total, done = len(cases) * len(seeds) * (1 + len(chosen)), 0
    for name in ("", *chosen):
        for case in cases:
            for seed in seeds:
                done += 1
                key = f"{name}|{case}|{seed}"
                if key in known:
                    continue
                with HEURISTICS[name].applied() if name else Off().applied():
                    known[key] = CASES[case].seconds(seed)
                display.say(f"{done} of {total}: {name or 'all heuristics'}, {case}, seed {seed}: {known[key]:.4f} s")
                if options.json:
                    options.json.write_text(json.dumps(known, indent=1))
    display.console.print(_table(known, chosen, cases, list(seeds)))
    return 0


def _table(known: Mapping[str, float], chosen: list[str], cases: list[str], seeds: list[int]) -> Table:
    """How much longer each case takes without a heuristic, over all seeds."""
    table = Table(title="longer without it", title_justify="left")
    for heading in ("", *cases):
        table.add_column(heading, justify="right" if heading else "left")

    def total(name: str, case: str) -> float:
        return sum(known[f"{name}|{case}|{seed}"] for seed in seeds)

    table.add_row("all heuristics, s", *(f"{total('', case) / len(seeds):.3f}" for case in cases))
    for name in chosen:
        table.add_row(name, *(f"{100 * (total(name, case) / total('', case) - 1):+.1f}%" for case in cases))
    return table
