"""One run, from scenario to verdict: reference, fleet, training, results.

The same seeds, the same batches and the same loop train the model twice: once as plain PyTorch, once with every matrix
product on the fleet. A run is valid only if the two agree.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from agent.protocol.clock import ScaledClock
from agent.protocol.errors import UserError
from emulator.model import fidelity
from ps.graph.models import model_config
from ps.graph.text import batches, read_text
from ps.graph.trainer import Step
from ps.planning.planner import Planner
from testbed.faults.inject import Injector, churn_schedule, describe, plan_faults
from testbed.models.comparison import judged, told_of
from testbed.results.files import (
    EventLog,
    Summary,
    environment,
    new_folder,
    write_blocks,
    write_json,
    write_ledger,
    write_steps,
    write_summary_text,
)
from testbed.results.fleet_at_work import worked
from testbed.results.keeping import Keeping
from testbed.results.known_scales import KnownScales
from testbed.results.report import write_report, write_trace
from testbed.runs import interrupts
from testbed.runs.clock_choice import Chosen, choose
from testbed.runs.display import Display
from testbed.runs.fleets import make_fleet, pods_for
from testbed.runs.hosts import Accounts, Host, Place, in_virtual_time, launcher, on_pods, real_server, virtual_server
from testbed.runs.real_devices import departures, write_devices
from testbed.runs.scenario import Scenario, dump_scenario
from testbed.runs.training import Reference, Task, Trained, distributed, reference, shapes_only
from testbed.runs.trial_step import Probes


def run(scenario: Scenario, parent: Path, display: Display, predicts: bool = True) -> tuple[Path, Summary]:
    """`predicts`: compare the steps with those of the modelled fleet."""
    begun = time.monotonic()
    interrupts.check()  # importing PyTorch may have swallowed the exception
    config = model_config(scenario.model.name, Path(scenario.model.config) if scenario.model.config else None)
    text = read_text(scenario.data.text)
    _check_sizes(config, scenario)
    data = batches(text, scenario.training.steps, scenario.data.batch, scenario.data.sequence, scenario.seed)
    asked = scenario.fleet
    fleet = make_fleet(asked, scenario.links, scenario.seed)
    cores = os.cpu_count() or 1
    pod_count = pods_for(asked, scenario.launch)
    faults = plan_faults(scenario.faults, fleet.network_names, pod_count, scenario.seed)
    churn = churn_schedule(scenario.churn, len(fleet), scenario.seed) if scenario.churn else None
    absent: list[int] = [] if churn is None else np.flatnonzero(~churn.present).tolist()
    scales = KnownScales(parent, scenario)
    probes = Probes(scenario, display)
    chosen = choose(scenario.clock, probes, scales.trials(), display.say)
    virtual, scale = chosen.kind == "virtual", chosen.scale
    if scenario.clock.kind == "auto":
        scales.keep(chosen.trials)
        pace = f"{scale:g} times slower than real time" if scale > 1 else "real time"
        display.say(f"clock: {pace}, because {chosen.why}; kept in {scales.path}")
    torch.set_num_threads(cores if virtual else max(1, cores // 2))  # the other half is for the pods

    planner = Planner(scenario.planner.kind, scenario.planner.cap)
    place = Place(scenario, fleet, pod_count, absent, planner)
    clock = ScaledClock(scale)
    with ExitStack() as stack:
        # create the folder only after what may fail
        if virtual:
            modelled = virtual_server(place)
        else:
            launch = stack.enter_context(launcher(scenario.launch, pod_count))
            server = real_server(place, clock, launch)
        folder = new_folder(parent, scenario.name)
        keeping = Keeping(display.say)
        try:
            (folder / "scenario.toml").write_text(dump_scenario(scenario), encoding="utf-8")
            write_json(folder / "environment.json", environment())
            events = EventLog(folder / "events.jsonl", modelled.clock if virtual else clock, keeping)
        except OSError as error:
            raise UserError(
                f"cannot write the results to {folder}: {error.strerror}; choose another place with --results"
            ) from None
        stack.callback(events.close)
        events.write("clock", **asdict(chosen))
        host = stack.enter_context(
            in_virtual_time(place, modelled, display, events.write)
            if virtual
            else on_pods(place, server, clock, display, events.write, launch)
        )
        probes.plans.bring(planner, host.server.labels)
        how = scenario.churn.how if scenario.churn else ""
        injector = Injector(host.pods, faults, churn, how, events.write)
        local = 0.0 if virtual else 1.0 / scale
        task = Task(
            scenario, config, data, host, planner, injector, display, events.write, local, probes.captured, predicts
        )
        if scenario.clock.arithmetic:
            known = reference(scenario, config, data, display)
            trained = distributed(task)
        else:
            known, trained = None, shapes_only(task)
        memory_bytes = psutil.Process().memory_info().rss + host.pods.memory_bytes()

    columns = host.server.records.columns()
    attendance = host.server.attendance
    fleet_told = _worked(place, host, trained) if not virtual else None
    verdict = _verdict(scenario, columns, trained, not virtual, fleet_told, chosen)
    if scenario.clock.kind == "auto" and verdict.scale_suggested is not None:
        scales.keep(())  # the host keeps up less well than when it was probed: the next run probes again
    summary = _summary(place, host, columns, verdict, known, trained, injector, chosen)
    summary.memory_bytes = memory_bytes
    summary.fleet = {} if fleet_told is None else asdict(fleet_told) | {"told": fleet_told.told()}
    summary.total_s = time.monotonic() - begun
    _compare(summary, trained)
    if known is not None:
        for row, step in zip(trained.rows, known.steps, strict=False):
            row["reference_loss"] = step.loss
    ledger = fidelity.device_ledger(columns, host.server.profiles, scenario.links.kind == "kernel") if columns else {}
    labels = host.server.labels

    def keep_summary() -> None:
        _mark_incomplete(summary, keeping, trained)
        keeping.write(folder / "summary.json", lambda path: write_json(path, asdict(summary)))
        keeping.write(folder / "summary.txt", lambda path: write_summary_text(path, summary))

    # small, quick files first: they exist even if a later one fails
    keeping.write(folder / "steps.csv", lambda path: write_steps(path, trained.rows))
    keep_summary()
    if columns:
        blocks, devices = folder / "blocks.parquet", folder / "ledger.parquet"
        keeping.write(blocks, lambda path: write_blocks(path, columns, labels, attendance.real))
        keeping.write(devices, lambda path: write_ledger(path, ledger, labels, host.links))
        if blocks.exists():
            keeping.write(folder / "trace.json", lambda path: write_trace(folder, path))
        else:
            keeping.without("trace.json", "report.html")  # both are made from the blocks
    summary.device_files = write_devices(folder, attendance, labels, host.server.profiles, display, keeping)
    keep_summary()
    if columns and "report.html" not in keeping.missing:
        keeping.write(folder / "report.html", lambda path: write_report(folder, path))
        keep_summary()
    return folder, summary


def _mark_incomplete(summary: Summary, keeping: Keeping, trained: Trained) -> None:
    summary.incomplete = [told for told in (trained.stopped, keeping.told) if told]
    if keeping.told:
        # replace the earlier text: it grows with each missing file
        summary.reasons = [reason for reason in summary.reasons if not reason.startswith("results are incomplete")]
        summary.reasons.append(keeping.told)
        if summary.verdict == fidelity.VALID:
            summary.verdict = fidelity.DEGRADED


def _worked(place: Place, host: Host, trained: Trained) -> fidelity.Worked:
    server = host.server
    return worked(
        place.scenario,
        len(place.fleet) - len(place.absent),
        trained.begun,
        server.attendance,
        list(server.suspended.values()),
        host.pods.deaths,
        host.watch.stood_still_s if host.watch is not None else [],
    )


def _summary(
    place: Place,
    host: Host,
    columns: dict[str, Any],
    verdict: fidelity.Fidelity,
    known: Reference | None,
    trained: Trained,
    injector: Injector,
    clock: Chosen,
) -> Summary:
    scenario, server, totals, steps = place.scenario, host.server, host.server.totals, trained.steps
    losses = [s.loss for s in steps] if known else []
    reference_losses = [s.loss for s in known.steps] if known else []
    compared = losses and reference_losses[: len(losses)]
    difference = loss_difference(losses, compared) if compared else None
    pairs = zip(trained.weights, known.weights, strict=True) if known and not trained.stopped else ()
    moved = [float((a - b).abs().max()) for a, b in pairs]
    used, counts = np.unique(columns.get("device", ()), return_counts=True)
    returned = dict(zip(used.tolist(), counts.tolist(), strict=True))
    real = dict.fromkeys((server.labels[d] for d in sorted(server.attendance.real)), 0)
    for device in server.attendance.real:
        real[server.labels[device]] += returned.get(device, 0)
    seconds = _settled(steps)
    audit = injector.audit()
    return Summary(
        name=scenario.name,
        model=scenario.model.name or Path(scenario.model.config or "").stem,
        parameters=trained.parameters,
        seed=scenario.seed,
        clock=asdict(clock),
        devices=len(place.fleet),
        pods=place.pod_count,
        joined_s=host.joined_s,
        steps=len(steps),
        losses=losses,
        reference_losses=reference_losses,
        loss_max_abs_diff=float("inf") if difference is not None and not np.isfinite(difference) else difference,
        weights_max_abs_diff=float(np.max(moved)) if moved else None,
        step_s={f"p{p}": float(np.percentile(seconds, p)) if seconds else math.nan for p in (50, 95)},
        predicted_step_s=trained.predicted.seconds if trained.predicted else None,
        first_step_s=steps[0].seconds if steps else math.nan,
        products_per_step=trained.products,
        flops_done=totals.flops,
        flops_reference=known.flops if known else trained.flops,  # of all steps, even if the run stopped early
        blocks=totals.blocks,
        devices_used=len({server.labels[d] for d in used.tolist()}),  # after a return: new id, same label
        bytes_down=totals.operand_bytes,
        bytes_up=totals.result_bytes,
        socket_bytes_down=totals.sent_bytes,
        lost_devices=totals.lost_devices,
        real_devices=real,
        real_devices_forgotten=server.attendance.forgotten,
        departures=departures(server.attendance),
        basis=dict(place.fleet.basis),
        links=host.links,
        training_host_s=trained.host_s,
        fidelity=asdict(verdict),
        verdict=verdict.verdict,
        reasons=[] if verdict.verdict == fidelity.VALID else [verdict.reason],
        recovery=_recovery(server),
        verification={
            "checked": totals.checked_blocks,
            "wrong": totals.wrong_blocks,
            "seconds": totals.check_s,
            "background_seconds": totals.check_background_s,
            "share": totals.check_s / max(totals.busy_s, 1e-9),
        },
        late_blocks_helped=server.late_blocks_helped,
        suspended={f"{server.labels[d]} ({d})": why for d, why in server.suspended.items()},
        audit=audit,
        audit_line=describe(audit),
    )


def loss_difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference. Two losses that are NaN, or the same infinity, at the same step count as equal: the
    training diverged as plain PyTorch does. If only one is NaN, the result is NaN, which never passes."""
    one, two = np.array(losses), np.array(reference)
    with np.errstate(invalid="ignore"):
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        return float(np.where(same, 0.0, np.abs(one - two)).max())


def _verdict(
    scenario: Scenario,
    columns: dict[str, Any],
    trained: Trained,
    comparable: bool,
    fleet: fidelity.Worked | None,
    clock: Chosen,
) -> fidelity.Fidelity:
    """A deliberately disturbed step cannot be compared with the predicted one."""
    comparable = comparable and bool(trained.steps) and not (scenario.faults or scenario.churn)
    predicted = trained.predicted if comparable else None
    nothing = np.empty(0)
    return fidelity.judge(
        columns.get("sent_s", nothing),
        columns.get("due_s", nothing),
        columns.get("received_s", nothing),
        columns.get("left_s", nothing),
        float(np.median(_settled(trained.steps))) / predicted.seconds if predicted else None,
        trained.load,
        kernel_links=scenario.links.kind == "kernel",
        fleet=fleet,
        scale=clock.scale,
        tried=clock.trials,
    )


def _settled(steps: list[Step]) -> list[float]:
    """Seconds of all steps but the first, if there are others."""
    return [s.seconds for s in steps[1:] or steps]


def _compare(summary: Summary, trained: Trained) -> None:
    """Compare with plain PyTorch, and check that devices did all FLOPs. With shapes only there is no loss."""
    if trained.stopped:
        summary.verdict = "FAILED"
        summary.reasons.insert(0, trained.stopped)
    if wrong := judged(trained.compared):
        summary.verdict = "FAILED"
        summary.reasons[:0] = wrong
    summary.comparison = told_of(trained.compared)
    if summary.flops_done != summary.flops_reference and not trained.stopped:
        summary.verdict = "FAILED"
        summary.reasons.insert(
            0,
            f"devices did {summary.flops_done:,} FLOPs, the steps have {summary.flops_reference:,}: some ran elsewhere",
        )


def _recovery(server: Accounts) -> dict[str, float]:
    """Devices that left during the run, by manner of departure, and the recovery times of those that had work."""
    departed = {how: count for how, count in sorted(server.attendance.departed.items()) if count}
    losses = [loss for loss in server.records.losses.values() if loss.done_ns]
    told: dict[str, float] = {"departures": sum(departed.values()), **departed} if departed else {}
    if not losses:
        return told
    done_s = np.array([loss.done_ns - loss.detected_ns for loss in losses]) / 1e9
    planned_s = np.array([loss.planned_ns - loss.detected_ns for loss in losses]) / 1e9
    return told | {
        "losses": len(losses),
        "blocks": sum(loss.blocks for loss in losses),
        "p50_s": float(np.percentile(done_s, 50)),
        "p99_s": float(np.percentile(done_s, 99)),
        "planned_p50_s": float(np.percentile(planned_s, 50)),
    }


def _check_sizes(config: Any, scenario: Scenario) -> None:
    if config.vocab_size < 256:
        raise UserError(f"the model's vocabulary has {config.vocab_size} entries; bytes as tokens need at least 256")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and scenario.data.sequence > longest:
        raise UserError(f"data.sequence is {scenario.data.sequence}, but the model takes at most {longest} tokens")
