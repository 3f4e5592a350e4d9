"""`cleave recovery`: how long until the blocks of lost devices are recomputed, and what other systems would pay.

The real dispatcher and planner on modelled devices in virtual time, product by product, shapes only. At a seeded time
some of the working devices fall silent together; after a detection interval the server declares them dead; recovery is
measured from then until every block they owed is accepted from another device. Baselines are formulas over the same
fleet and the same step, each with its assumptions stated; assumptions that had to be chosen favour the baseline.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agent.protocol.connection import SILENT_AFTER
from agent.protocol.errors import Failure, UserError
from agent.protocol.units import format_count, format_duration, format_size
from ps.planning.capacity import Areas
from ps.planning.cost import BYTES
from ps.planning.packing import streaming_model
from ps.planning.planner import Planner
from ps.planning.plans import Shape
from ps.transport.server import HEARTBEAT_S
from testbed.virtual.world import Key, Outcome, VirtualFleet, Work

DETECTION_S = (0.05, 0.2)  # as in the authors' evaluation
STATE_BYTES = 12  # per parameter: weight and two Adam moments, float32
WEIGHT_BYTES = 4
MOST_STAGES = 8  # Asteroid
MICRO_BATCHES_A_STAGE = 4
TIMEOUT_S = 600.0  # torch.distributed's default with NCCL; with any other backend it is three times as long
TIGHT_LONGEST = 2.0  # times the longest product: one timeout for all products must not hit an honest product


@dataclass(frozen=True, slots=True)
class Trial:
    shape: Shape
    failures: int
    weight: float  # share of the step's time that such a failure stands for
    recovery_s: float  # from detection until the lost blocks are recomputed
    least_s: float  # lower bound: any re-cut of the lost cells, even if the survivors were otherwise idle
    delay_s: float  # how much later the product ends than without the failure
    lost_cells: int
    blocks: int  # blocks that replace the lost ones
    host_s: float  # time of the re-cut on this machine, not modelled


@dataclass(frozen=True, slots=True)
class Setting:
    """Inputs of the baseline formulas."""

    parameters: int
    layers: int
    devices: int
    slowest_down_bps: float
    slowest_up_bps: float
    step_s: float  # all products of a step, one after the other
    products: int
    longest_s: float  # of the longest product
    block_s: float  # median block of a step, from sending to answer
    checkpoint_steps: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """One row of the table: this number of simultaneous failures."""

    failures: int
    trials: int
    p50_s: float
    p99_s: float
    least_p50_s: float
    delay_mean_s: float
    delay_p99_s: float
    baselines: dict[str, float]  # other systems
    ablations: dict[str, float]  # this system without one feature

    def ratios(self, cost_s: float) -> tuple[float | None, float | None]:
        """A baseline's cost over ours: in time until everything is recomputed, and in time lost."""
        return cost_s / self.p50_s, cost_s / self.delay_mean_s if self.delay_mean_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "failures": self.failures,
            "trials": self.trials,
            "recovery_s": {"p50": self.p50_s, "p99": self.p99_s, "least_p50": self.least_p50_s},
            "product_delay_s": {"mean": self.delay_mean_s, "p99": self.delay_p99_s},
            "baselines": self._told(self.baselines),
            "ablations": self._told(self.ablations),
        }

    def _told(self, costs: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
        ratios = {name: self.ratios(cost_s) for name, cost_s in costs.items()}
        return {
            name: {"cost_s": cost_s, "ratio_recovery": ratios[name][0], "ratio_lost": ratios[name][1]}
            for name, cost_s in costs.items()
        }


def parse_failures(text: str, devices: int) -> list[int]:
    """ "1,3,5" -> [1, 3, 5]"""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) >= 1 for word in words):
        raise UserError(f'--failures is {text!r}; it must be numbers of at least 1, like "1,3,5"')
    numbers = sorted({int(word) for word in words})
    if numbers[-1] >= devices:
        raise UserError(f"--failures has {numbers[-1]}; of {devices} devices at most {devices - 1} may fail")
    return numbers


def count_parameters(config: Any) -> int:
    """Number of parameters of the model, without creating its weights."""
    import torch

    from ps.graph.models import build_model

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())


# ---- the simulation


class Product:
    """One product on a fleet, from its submission to its end."""

    def __init__(self, shape: Shape, profiles: NDArray[np.void], planner: Planner) -> None:
        self._fleet = VirtualFleet(profiles, planner)
        self._fleet.join(len(profiles))
        self._due: list[tuple[float, Key]] = []
        self._owing: dict[int, set[int]] = {}  # device -> blocks in flight
        self._gone: set[int] = set()
        self.accepted_s: dict[int, float] = {}  # by block
        self.cells: dict[int, int] = {}  # by block sent
        self.block_s: list[float] = []  # per block, from sending to answer
        self._note(self._fleet.submit([Work(0, shape)]))
        if not self._due:
            raise UserError(f"the fleet cannot do {shape}: no device has the memory for it")

    def run(self, until_s: float = np.inf) -> float:
        """Process answers due by `until_s`; returns when the last one arrived."""
        while self._due and self._due[0][0] <= until_s:
            now_s = self._due[0][0]
            keys = []
            while self._due and self._due[0][0] == now_s:
                keys.append(heapq.heappop(self._due)[1])
            keys = [key for key in keys if key[0] not in self._gone]
            if keys:
                self._fleet.now_s = now_s
                outcome = self._fleet.answer(keys)
                for position in outcome.accepted:
                    device, _, block = keys[position]
                    self.accepted_s[block] = now_s
                    self._owing[device].discard(block)
                self._note(outcome)
        return self._fleet.now_s

    def working(self) -> list[int]:
        """Devices that owe an answer."""
        return sorted(device for device, blocks in self._owing.items() if blocks)

    def silence(self, devices: Sequence[int]) -> None:
        self._gone |= set(devices)

    def lose(self, devices: Sequence[int], at_s: float) -> tuple[range, float]:
        """Declare the silent devices dead. Returns the blocks that replace theirs, and the seconds on this machine."""
        self._fleet.now_s = at_s
        first = self._fleet.block_count(0)
        begun = time.perf_counter()
        outcome = self._fleet.leave(devices)
        host_s = time.perf_counter() - begun
        self._note(outcome)
        return range(first, self._fleet.block_count(0)), host_s

    def _note(self, outcome: Outcome) -> None:
        for sent in outcome.sent:
            heapq.heappush(self._due, (sent.due_s, sent.key))
            self.block_s.append(sent.due_s - self._fleet.now_s)
            self._owing.setdefault(sent.key[0], set()).add(sent.key[2])
            self.cells[sent.key[2]] = sent.box[1] * sent.box[3] * sent.box[5]


def try_failure(
    shape: Shape, profiles: NDArray[np.void], planner: Planner, failures: int, seed: str, undisturbed_s: float
) -> tuple[float, float, float, int, int, float]:
    """Recovery, its lower bound, delay, cells lost, blocks that replace them, host's seconds. The time of failure, the
    detection interval and the order of the failing devices depend on the seed alone: with more failures, the same
    devices fail, and further ones."""
    rng = random.Random(seed)
    fails_s, detection_s = rng.uniform(0.0, undisturbed_s), rng.uniform(*DETECTION_S)
    product = Product(shape, profiles, planner)
    product.run(fails_s)
    working = product.working()
    rng.shuffle(working)
    struck = working[:failures]
    product.silence(struck)
    detected_s = fails_s + detection_s
    product.run(detected_s)
    replaced, host_s = product.lose(struck, detected_s)
    ended_s = product.run()
    if any(block not in product.accepted_s for block in replaced) or not replaced:
        raise Failure(f"the survivors of {failures} failures cannot do {shape}: none of them has the memory for it")
    recovered_s = max(product.accepted_s[block] for block in replaced)
    cells = sum(product.cells[block] for block in replaced)
    survivors = streaming_model(np.delete(profiles, struck), shape.inner, BYTES)
    least_s = Areas(survivors, shape.rows, shape.columns).span_s(cells)
    return recovered_s - detected_s, least_s, ended_s - undisturbed_s, cells, len(replaced), host_s


def simulate(
    products: Mapping[Shape, int], profiles: NDArray[np.void], failures: Sequence[int], trials: int, seed: int
) -> tuple[list[Trial], float, float, float]:
    """`trials` of every distinct product and number of failures; also the seconds of an undisturbed step, of its
    longest product and of its median block."""
    planner, found, step_s, longest_s = Planner(), [], 0.0, 0.0
    blocks_s: list[float] = []
    times: list[int] = []  # how often each block occurs in a step
    for index, (shape, count) in enumerate(products.items()):
        product = Product(shape, profiles, planner)
        undisturbed_s = product.run()
        blocks_s += product.block_s
        times += [count] * len(product.block_s)
        step_s += count * undisturbed_s
        longest_s = max(longest_s, undisturbed_s)
        for trial in range(trials):
            for number in failures:
                told = try_failure(shape, profiles, planner, number, f"{seed} {index} {trial}", undisturbed_s)
                found.append(Trial(shape, number, count * undisturbed_s / trials, *told))
    return found, step_s, longest_s, percentile(blocks_s, times, 0.5)


def percentile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(np.asarray(weights, np.float64)[order])
    return float(np.asarray(values)[order][min(np.searchsorted(total, share * total[-1]), len(order) - 1)])


# ---- the baselines


def checkpoint_restart_s(s: Setting, failures: int) -> float:
    """Survivors reload the state in equal parts, limited by the slowest downlink, and redo half an interval."""
    left = s.devices - failures
    reload_s = 8 * STATE_BYTES * s.parameters / left / s.slowest_down_bps
    return reload_s + s.checkpoint_steps * s.step_s / 2 * s.devices / left


def pipeline_replay_s(s: Setting, failures: int) -> float:
    """The lost device's stage is redistributed to its group over the slowest uplink; the group redoes the forward
    passes of the stage's micro-batches in flight, (P + 1) / 2 on average: a third of the stage's time for each."""
    stages = min(MOST_STAGES, s.layers, s.devices)
    lost_in_a_group = -(-failures // stages)
    group = max(1.0, s.devices / stages - lost_in_a_group)
    move_s = 8 * WEIGHT_BYTES * s.parameters / stages / group / s.slowest_up_bps
    stage_s = s.step_s / (MICRO_BATCHES_A_STAGE * stages + stages - 1)
    return move_s + (stages + 1) / 2 * stage_s / 3 * (1 + lost_in_a_group / group)


def timeout_s(ours_s: float) -> float:
    """The baseline notices the loss when a collective operation times out; then it re-cuts as this system does."""
    return TIMEOUT_S + ours_s


def baselines(s: Setting, failures: int, ours_s: float) -> dict[str, float]:
    return {
        "checkpoint restart": checkpoint_restart_s(s, failures),
        "pipeline replay": pipeline_replay_s(s, failures),
        "timeout": timeout_s(ours_s),
    }


# ---- this system without one feature


def layer_again_s(s: Setting, failures: int) -> float:
    """Restarts the current pass through a layer, of which half is lost on average: a forward pass is a third of a
    layer's time and a backward pass two thirds, so a random time lies in a pass of 5/9 of it on average."""
    return 5 / 9 * s.step_s / s.layers / 2 * s.devices / (s.devices - failures)


def tight_timeout_s(s: Setting, ours_s: float) -> float:
    """Waits until the timeout, counted from the product's start, and then re-cuts as this system does."""
    return TIGHT_LONGEST * s.longest_s - 0.5 * s.step_s / s.products + ours_s


def ablations(s: Setting, failures: int, ours_s: float) -> dict[str, float]:
    return {"a layer as the unit": layer_again_s(s, failures), "only a tight timeout": tight_timeout_s(s, ours_s)}


def summarise(trials: Sequence[Trial], setting: Setting) -> list[Recovery]:
    rows = []
    for failures in sorted({trial.failures for trial in trials}):
        mine = [trial for trial in trials if trial.failures == failures]
        weights = [trial.weight for trial in mine]
        p50_s, p99_s = (percentile([trial.recovery_s for trial in mine], weights, share) for share in (0.5, 0.99))
        least_s = percentile([trial.least_s for trial in mine], weights, 0.5)
        later_s = [max(0.0, trial.delay_s) for trial in mine]  # a re-cut may even end a product early: no credit for it
        mean_s = float(np.average(later_s, weights=weights))
        late_s = percentile(later_s, weights, 0.99)
        costs = (of(setting, failures, p50_s) for of in (baselines, ablations))
        rows.append(Recovery(failures, len(mine), p50_s, p99_s, least_s, mean_s, late_s, *costs))
    return rows


def assumptions(s: Setting) -> list[str]:
    stages = min(MOST_STAGES, s.layers, s.devices)
    return [
        f"All: one step is {format_duration(s.step_s)} ({format_count(s.products)} products, one after the other, "
        "float32, the server's line and work cost nothing); the baselines are given the same step time. Failures "
        "strike devices at work, all at the same moment, and baselines recover from all of them at once. A moment's "
        "weight is its share of the step: count x time of its product.",
        f"ours: from detection until the lost rectangles are accepted from others. Detection, drawn from "
        f"{1e3 * DETECTION_S[0]:.0f} to {1e3 * DETECTION_S[1]:.0f} ms as in the authors' set-up, is not in it, nor in "
        "the first two baselines. What training loses is less, since the others go on meanwhile: it is by how much "
        "the product ends later; a baseline stands still for all of its time. This server's own detection: a broken "
        "connection within a heartbeat of "
        f"{format_duration(HEARTBEAT_S)}, a silent one after {format_duration(SILENT_AFTER * HEARTBEAT_S)}.",
        "no way sooner than: the relaxed bound of the lost cells over all survivors, median of the trials: as if these "
        "had nothing else to do, and the best shapes were possible.",
        f"checkpoint restart: weights and Adam's moments, {format_size(STATE_BYTES * s.parameters)}, in equal parts to "
        f"the survivors, over the slowest downlink; half of an interval of {s.checkpoint_steps:g} step(s) done again. "
        "Writing checkpoints is free.",
        f"pipeline replay (Asteroid-like): {stages} stages, {MICRO_BATCHES_A_STAGE} micro-batches a stage; the stage's "
        "weights are dealt anew to its group over the slowest uplink, all in parallel; forward passes of the "
        "micro-batches in flight there, (P + 1) / 2, done again.",
        f"timeout: the loss is noticed {format_duration(TIMEOUT_S)} after it happened, then as here. That is what "
        "torch.distributed.init_process_group waits by default with NCCL before it aborts collective operations; with "
        "other backends it is 30 min (its documentation, PyTorch 2.13).",
        "this system with one thing taken away; no known system is like that. A layer as the unit: server and weights "
        "as here, but a layer's pass is begun again; half of it is lost. Only a tight timeout: what was lost is sent "
        f"again {format_duration(TIGHT_LONGEST * s.longest_s)} after the product began, then as here: "
        f"{TIGHT_LONGEST:g} times the longest product of the step, since one timeout for all products must not strike "
        "an honest one.",
    ]


# ---- output


def as_json(rows: Sequence[Recovery], trials: Sequence[Trial], s: Setting) -> dict[str, Any]:
    """`host_s`, the measured time of a re-cut, is the only figure that differs between runs."""
    return {
        "step_s": s.step_s,
        "parameters": s.parameters,
        "layers": s.layers,
        "devices": s.devices,
        "products": s.products,
        "median_block_s": s.block_s,
        "slowest_down_bps": s.slowest_down_bps,
        "slowest_up_bps": s.slowest_up_bps,
        "checkpoint_steps": s.checkpoint_steps,
        "detection_s": list(DETECTION_S),
        "failures": [row.as_dict() for row in rows],
        "assumptions": assumptions(s),
        "host_s": {"p50": float(np.median([t.host_s for t in trials])), "max": max(t.host_s for t in trials)},
    }


def print_recovery(console: Console, title: str, rows: Sequence[Recovery], trials: Sequence[Trial], s: Setting) -> None:
    table = Table(title=title, title_justify="left")
    for heading in (
        "failures",
        "",
        "done again, p50",
        "p99",
        "training loses, mean",
        "p99",
        "ratio",
        "ratio in time lost",
    ):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=not heading)
    for row in rows:
        table.add_section()
        ours = (row.p50_s, row.p99_s, row.delay_mean_s, row.delay_p99_s)
        table.add_row(str(row.failures), "ours", *(format_duration(figure) for figure in ours))
        table.add_row("", "no way sooner than", format_duration(row.least_p50_s))
        for heading, costs in (("", row.baselines), ("ours without something:", row.ablations)):
            if heading:
                table.add_row("", heading)
            for name, cost_s in costs.items():
                ratios = ("" if ratio is None else f"{ratio:,.0f}x" for ratio in row.ratios(cost_s))
                table.add_row("", f"  {name}", format_duration(cost_s), "", format_duration(cost_s), "", *ratios)
    console.print(table)
    for line in assumptions(s):
        console.print(f"- {line}", soft_wrap=not console.is_terminal)
    host_s = [trial.host_s for trial in trials]
    two_s = 2 * s.block_s + sum(DETECTION_S) / 2
    console.print(
        f"The median block of an undisturbed step takes {format_duration(s.block_s)} from sending to answer; two of "
        f"them and the detection interval take {format_duration(two_s)}.",
        soft_wrap=not console.is_terminal,
    )
    console.print(
        f"{rows[0].trials} trials a row. Modelled, but for the re-cut itself, which took "
        f"{format_duration(float(np.median(host_s)))} on this machine (median; at most {format_duration(max(host_s))})."
    )
