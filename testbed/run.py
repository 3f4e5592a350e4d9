"""One run, from scenario to verdict: reference, fleet, training, results.

The same seeds, the same batches and the same loop train the model twice: once as plain PyTorch, once with every matrix
product on the fleet. The run is only as good as the agreement of the two.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

from agent.errors import Failure, UserError
from emulator import fidelity
from emulator.fleet import Fleet, draw_fleet, uniform_fleet
from emulator.link_trace import read_link_trace
from ps.capture import distribute
from ps.executor import Executor
from ps.models import build_model, model_config
from ps.planner import Planner
from ps.server import Server
from ps.text import batches, read_text
from ps.trainer import Step, gradients, train
from testbed import interrupts
from testbed.display import Display
from testbed.inject import Injector, churn_schedule, describe, injecting, plan_faults
from testbed.launch import Pods, links_of, models_of
from testbed.predict import predict_step
from testbed.report import write_report, write_trace
from testbed.results import (
    EventLog,
    Summary,
    environment,
    new_folder,
    write_blocks,
    write_json,
    write_steps,
    write_summary,
)
from testbed.scenario import FleetSection, Links, Scenario, dump_scenario

LOSS_TOLERANCE = 1e-4
JOIN_TIMEOUT_S = 120.0


class RunError(Failure):
    """The run could not be completed; the text says why."""


def run(scenario: Scenario, parent: Path, display: Display) -> tuple[Path, Summary]:
    begun = time.monotonic()
    config = model_config(scenario.model.name, Path(scenario.model.config) if scenario.model.config else None)
    text = read_text(scenario.data.text)
    _check_sizes(config, scenario)
    data = batches(text, scenario.training.steps, scenario.data.batch, scenario.data.sequence, scenario.seed)
    asked = scenario.fleet
    fleet = make_fleet(asked, scenario.links, scenario.seed)
    cores = os.cpu_count() or 1
    pod_count = min(len(fleet), cores if asked.pods == "auto" else asked.pods)
    faults = plan_faults(scenario.faults, fleet.network_names, pod_count, scenario.seed)
    churn = churn_schedule(scenario.churn, len(fleet), scenario.seed) if scenario.churn else None
    absent: list[int] = [] if churn is None else np.flatnonzero(~churn.present).tolist()
    expected = len(fleet) - len(absent)  # devices at the beginning
    model_name = scenario.model.name or Path(scenario.model.config or "").stem
    torch.set_num_threads(max(1, cores // 2))  # the other half belongs to the pods

    planner = Planner(scenario.planner.kind)
    server = Server(scenario.server.host, scenario.server.port, run=scenario.name, planner=planner)
    folder = new_folder(parent, scenario.name)
    (folder / "scenario.toml").write_text(dump_scenario(scenario), encoding="utf-8")
    write_json(folder / "environment.json", environment())
    events = EventLog(folder / "events.jsonl")

    def notice(text: str) -> None:
        display.say(text)
        events.write("notice", text=text)

    server.notice = notice
    server.start()
    display.say(f"server at {server.address}; another device may join: python -m agent --ps {server.address}")
    events.write("server", address=server.address)
    pods_begun = time.monotonic()
    try:
        with Pods(fleet, pod_count, server.address, scenario.links.kind, absent) as pods:
            how = scenario.churn.how if scenario.churn else ""
            injector = Injector(pods, faults, churn, how, events.write)
            try:
                with display.phase(
                    f"{expected:,} devices join",
                    lambda: server.devices / expected,
                    lambda: f"{server.devices:,} of {expected:,}",
                ):
                    _wait_for_devices(server, pods, expected)
                joined_s = time.monotonic() - pods_begun
                display.say(f"{server.devices:,} devices joined in {joined_s:.1f} s")
                events.write("joined", devices=server.devices)
                reference, reference_weights, flops_reference = _reference(scenario, config, data, display)
                trained = _distributed(scenario, config, data, server, planner, pods, fleet, injector, display, events)
                executor, steps, weights, rows, predicted_s = trained
                memory_bytes = psutil.Process().memory_info().rss + pods.memory_bytes()
            finally:
                server.stop()
    finally:
        events.close()

    audit = injector.audit()
    columns = server.records.columns()
    verdict = fidelity.judge(columns["sent_s"], columns["due_s"], columns["received_s"])
    losses, reference_losses = [s.loss for s in steps], [s.loss for s in reference]
    difference = float(np.abs(np.subtract(losses, reference_losses)).max())  # NaN if any loss is: never equal
    used, counts = np.unique(columns["device"], return_counts=True)
    real = np.unique(columns["device"][np.isnan(columns["due_s"])]).tolist()
    seconds = np.array([s.seconds for s in steps[1:]] or [steps[0].seconds])
    summary = Summary(
        name=scenario.name,
        model=model_name,
        parameters=sum(w.numel() for w in weights),
        seed=scenario.seed,
        devices=len(fleet),
        pods=pod_count,
        joined_s=joined_s,
        steps=len(steps),
        losses=losses,
        reference_losses=reference_losses,
        loss_max_abs_diff=difference if np.isfinite(difference) else float("inf"),
        weights_max_abs_diff=float(
            np.max([float((a - b).abs().max()) for a, b in zip(weights, reference_weights, strict=True)])
        ),
        step_s={f"p{p}": float(np.percentile(seconds, p)) for p in (50, 95)},
        predicted_step_s=predicted_s,
        first_step_s=steps[0].seconds,
        products_per_step=executor.spent.products // len(steps),
        flops_done=server.totals.flops,
        flops_reference=flops_reference,
        blocks=server.totals.blocks,
        devices_used=len({server.labels[d] for d in used.tolist()}),  # who returns has a new id and its old label
        bytes_down=server.totals.operand_bytes,
        bytes_up=server.totals.result_bytes,
        socket_bytes_down=server.totals.sent_bytes,
        lost_devices=server.totals.lost_devices,
        real_devices={server.labels[d]: int(counts[used == d][0]) for d in real},
        basis=dict(fleet.basis),
        memory_bytes=memory_bytes,
        total_s=time.monotonic() - begun,
        fidelity=asdict(verdict),
        verdict=verdict.verdict,
        reasons=[] if verdict.verdict == fidelity.VALID else [verdict.reason],
        recovery=_recovery(server),
        verification={
            "checked": server.totals.checked_blocks,
            "wrong": server.totals.wrong_blocks,
            "seconds": server.totals.check_s,
            "share": server.totals.check_s / max(server.totals.busy_s, 1e-9),
        },
        late_blocks_helped=server.late_blocks_helped,
        suspended={f"{server.labels[d]} ({d})": why for d, why in server.suspended.items()},
        audit=audit,
        audit_line=describe(audit),
    )
    if not difference <= LOSS_TOLERANCE:
        summary.verdict = "FAILED"
        summary.reasons.insert(
            0, f"the loss differs from plain PyTorch by {difference:.1e}, more than {LOSS_TOLERANCE:.0e}"
        )
    if summary.flops_done != summary.flops_reference:
        summary.verdict = "FAILED"
        summary.reasons.insert(
            0,
            f"devices did {summary.flops_done:,} FLOPs, the steps have {summary.flops_reference:,}: some ran elsewhere",
        )
    for row, step in zip(rows, reference, strict=True):
        row["reference_loss"] = step.loss
    write_steps(folder / "steps.csv", rows)
    write_blocks(folder / "blocks.parquet", columns, server.labels)
    write_summary(folder, summary)
    write_trace(folder)
    write_report(folder)
    return folder, summary


def _recovery(server: Server) -> dict[str, float]:
    """What the stopwatch of every loss showed."""
    losses = [loss for loss in server.records.losses.values() if loss.done_ns]
    if not losses:
        return {}
    done_s = np.array([loss.done_ns - loss.detected_ns for loss in losses]) / 1e9
    planned_s = np.array([loss.planned_ns - loss.detected_ns for loss in losses]) / 1e9
    return {
        "losses": len(losses),
        "blocks": sum(loss.blocks for loss in losses),
        "p50_s": float(np.percentile(done_s, 50)),
        "p99_s": float(np.percentile(done_s, 99)),
        "planned_p50_s": float(np.percentile(planned_s, 50)),
    }


def make_fleet(asked: FleetSection, links: Links, seed: int) -> Fleet:
    if asked.uniform is None:
        traces = {network: read_link_trace(prefix) for network, prefix in links.traces.items()}
        return draw_fleet(asked.devices, asked.kinds, asked.networks, seed, asked.line_share, links.effects, traces)
    count = asked.devices
    names: list[str] = [asked.uniform] * count
    profiles = uniform_fleet(asked.uniform, count, seed, asked.line_share)
    return Fleet(profiles, names, names, {"published": count})


def _check_sizes(config: Any, scenario: Scenario) -> None:
    if config.vocab_size < 256:
        raise UserError(f"the model's vocabulary has {config.vocab_size} entries; bytes as tokens need at least 256")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and scenario.data.sequence > longest:
        raise UserError(f"data.sequence is {scenario.data.sequence}, but the model takes at most {longest} tokens")


def _wait_for_devices(server: Server, pods: Pods, count: int) -> None:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not server.wait_for_devices(count, 0.25):
        pods.check()
        if time.monotonic() > deadline:
            raise RunError(f"only {server.devices} of {count} devices joined within {JOIN_TIMEOUT_S:.0f} s")


def _present(server: Server) -> str:
    """How many devices are there; if none is, what helps."""
    if server.devices:
        return f"{server.devices:,} devices"
    return f"no device is there: waiting for python -m agent --ps {server.address}"


def _model(scenario: Scenario, config: Any) -> torch.nn.Module:
    torch.manual_seed(scenario.seed)
    model: torch.nn.Module = build_model(config)
    return model


def _settings(scenario: Scenario) -> dict[str, Any]:
    training = scenario.training
    return {
        "seed": scenario.seed,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "micro_batches": training.micro_batches,
    }


def _reference(
    scenario: Scenario, config: Any, data: list[torch.Tensor], display: Display
) -> tuple[list[Step], list[torch.Tensor], int]:
    """Plain PyTorch, its FLOPs counted by PyTorch's own counter."""
    model = _model(scenario, config)
    done: list[Step] = []
    counter = FlopCounterMode(display=False)
    with (
        display.phase("plain PyTorch, for reference", lambda: len(done) / len(data), lambda: f"step {len(done)}"),
        counter,
    ):
        steps = train(model, model, data, after_step=done.append, **_settings(scenario))
    display.say(f"plain PyTorch: loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}, {len(steps)} steps")
    return steps, [p.detach() for p in model.parameters()], counter.get_total_flops()


def _distributed(
    scenario: Scenario,
    config: Any,
    data: list[torch.Tensor],
    server: Server,
    planner: Planner,
    pods: Pods,
    fleet: Fleet,
    injector: Injector,
    display: Display,
    events: EventLog,
) -> tuple[Executor, list[Step], list[torch.Tensor], list[dict[str, Any]], float | None]:
    model = _model(scenario, config)
    executor = Executor(server)
    forward = distribute(model, executor.run)
    micro_batches = scenario.training.micro_batches
    if scenario.planner.keep:
        executor.keep(model.parameters(), uses=micro_batches)

    def rehearsal() -> None:
        gradients(forward, data[0], micro_batches)
        model.zero_grad()

    with display.phase("capturing the step", lambda: 0.0, lambda: "torch.compile"):
        flops_per_step = executor.rehearse(rehearsal)
    predicted_s = None
    if scenario.links.kind != "off":
        with display.phase("planning the step, on the modelled fleet", lambda: 0.0, lambda: "virtual time"):
            links, models = links_of(fleet, server.labels), models_of(fleet, server.labels)
            predicted_s = predict_step(executor, rehearsal, server.profiles, planner, server.absent, links, models)
        display.say(f"a step should take {predicted_s:.2f} s (modelled)")
        events.write("predicted", step_s=predicted_s)
    rows: list[dict[str, Any]] = []
    done: list[Step] = []
    blocks = bytes_down = 0

    def before_step(number: int) -> None:
        interrupts.check()
        pods.give_up_killed()  # the server has said that their devices are lost; it goes on without them
        pods.check()
        if injector.error is not None:
            raise injector.error
        executor.step = number
        executor.weights_changed()

    def after_step(step: Step) -> None:
        nonlocal blocks, bytes_down
        done.append(step)
        totals = server.totals
        left_s = step.seconds * (len(data) - step.number)
        display.say(
            f"step {step.number} of {len(data)}: loss {step.loss:.4f}, {step.seconds:.2f} s, "
            f"{totals.blocks - blocks:,} blocks, {server.devices:,} devices; {left_s:.0f} s left"
        )
        row = {
            "step": step.number,
            "loss": step.loss,
            "seconds": step.seconds,
            "devices": server.devices,
            "blocks": totals.blocks - blocks,
            "bytes_down": totals.operand_bytes - bytes_down,
        }
        blocks, bytes_down = totals.blocks, totals.operand_bytes
        events.write("step", **row)
        rows.append(row)

    with (
        display.phase(
            "training",
            lambda: min(1.0, server.totals.flops / (flops_per_step * len(data))),
            lambda: f"step {len(done) + 1}, {server.totals.blocks:,} blocks, {_present(server)}",
        ),
        injecting(injector) if scenario.faults or scenario.churn else nullcontext(),
    ):
        steps = train(model, forward, data, before_step=before_step, after_step=after_step, **_settings(scenario))
    return executor, steps, [p.detach() for p in model.parameters()], rows, predicted_s
