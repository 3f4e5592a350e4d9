"""`cleave calibrate`: turns a profile into a device file and reports the model's error on held-out shapes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agent.protocol.errors import UserError
from agent.protocol.units import format_duration, format_flops, format_rate, format_size
from emulator.model.calibration import WAYS, Calibration, stretched
from emulator.model.performance import SPREAD_AT
from emulator.model.samples import Samples
from emulator.model.zoo import parse_device
from testbed.results.charts import scatter_chart

WORST = 8
WIDTH, HEIGHT = 60, 18  # of the plot on a terminal


def print_calibration(console: Console, samples: Samples, found: Calibration) -> None:
    model = found.model
    quota = samples.quota
    where = f"{samples.threads} thread(s)" + (f", CPU quota {quota[0] / quota[1]:.0%}" if quota else "")
    console.print(f"{samples.name}: kernel {found.kernel}, {where}, measured {samples.made}")
    if not samples.complete:
        console.print("the profile is incomplete: measuring was interrupted", style="yellow")
    rows = {
        "error on held-out shapes": f"median {found.median_error:.1%}, p95 {found.p95_error:.1%} ({len(found.shapes)})",
        "drift while measuring": f"p5 {found.drift[0]:+.1%}, p95 {found.drift[1]:+.1%} of the usual time; divided out",
        "large products": format_flops(found.large_flops),
        "overhead per call": format_duration(model.overhead_s),
        "tile of the kernel": f"{model.tile_rows} x {model.tile_columns}",
        "spread": ", ".join(f"p{100 * at:g} {factor:.2f}" for at, factor in zip(SPREAD_AT, model.spread, strict=True)),
        "pauses": f"{format_duration(model.pause_s)} after every {format_duration(model.run_s)}"
        if model.pause_s
        else "none of its own",
        "rested": f"{model.rested:.2f} of the time, wears off with {format_duration(model.warm_up_s)}"
        if model.rested < 1
        else "as fast as warm",
    }
    if link := link_figures(samples):
        rows["link"] = (
            f"{format_rate(link['down_bps'])} down, {format_rate(link['up_bps'])} up, "
            f"{format_duration(link['latency_s'])} one way"
        )
    for name, text in rows.items():
        console.print(f"{name:<27}{text}", soft_wrap=True)
    table = Table(title="worst shapes", box=None, title_justify="left")
    for column in ("batch", "rows", "inner", "columns", "measured", "predicted", "error"):
        table.add_column(column, justify="right")
    for i in np.argsort(-np.abs(found.error))[:WORST].tolist():
        times = (format_duration(found.measured_s[i]), format_duration(found.predicted_s[i]))
        table.add_row(*(str(x) for x in found.shapes[i].tolist()), *times, f"{found.error[i]:+.0%}")
    console.print(table)
    console.print("predicted (up) against measured (right), both logarithmic; dots on the line are exact")
    console.print(terminal_scatter(found.measured_s, found.predicted_s), highlight=False)


def terminal_scatter(measured_s: Any, predicted_s: Any) -> str:
    """A scatter plot around its diagonal."""
    x, y = np.log(measured_s), np.log(predicted_s)
    low, high = min(x.min(), y.min()), max(x.max(), y.max()) + 1e-9
    picture = [[" "] * WIDTH for _ in range(HEIGHT)]
    for column in range(WIDTH):
        picture[HEIGHT - 1 - column * HEIGHT // WIDTH][column] = "."
    for one, two in zip(x, y, strict=True):
        column, row = (int((v - low) / (high - low) * size) for v, size in ((one, WIDTH), (two, HEIGHT)))
        picture[HEIGHT - 1 - min(row, HEIGHT - 1)][min(column, WIDTH - 1)] = "o"
    left, right = format_duration(float(np.exp(low))), format_duration(float(np.exp(high)))
    return "\n".join("".join(line).rstrip() for line in picture) + f"\n{left}{right:>{WIDTH - len(left)}}"


def write_svg(path: Path, samples: Samples, found: Calibration) -> None:
    title = f"{samples.name}, {found.kernel}: predicted against measured, held-out shapes"
    path.write_text(scatter_chart(title, found.measured_s.tolist(), found.predicted_s.tolist()), encoding="utf-8")


def as_json(samples: Samples, found: Calibration) -> dict[str, Any]:
    return {
        "device": samples.device,
        "made": samples.made,
        "complete": samples.complete,
        "kernel": found.kernel,
        "shapes": len(found.shapes),
        "median_error": found.median_error,
        "p95_error": found.p95_error,
        "drift": list(found.drift),
        "large_flops": found.large_flops,
        "link": link_figures(samples),
        "held_out": [
            {"shape": shape, "measured_s": measured, "predicted_s": predicted}
            for shape, measured, predicted in zip(
                found.shapes.tolist(), found.measured_s.tolist(), found.predicted_s.tolist(), strict=True
            )
        ],
        "performance": asdict(found.model),
    }


def link_figures(samples: Samples, wire_only: bool = False) -> dict[str, float] | None:
    """A rate each way and half a round trip; None if the link was not measured. `wire_only` leaves out the quota time
    that the processor spent on the link: the model counts it as processor work, and on loopback it is all of the
    time."""
    if samples.link is None:
        return None
    trip_s = float(np.median(samples.link["round_trip_s"]))
    busy = (stretched(samples) or 0.0) if wire_only else 0.0
    rates = {
        f"{way}_bps": float(
            np.median(
                [
                    8 * size / max(seconds - trip_s - busy * running_s, 1e-6)
                    for size, seconds, running_s in samples.link[way]
                ]
            )
        )
        for way in WAYS
    }
    return {**rates, "latency_s": trip_s / 2}


def device_file(samples: Samples, found: Calibration, kind: str) -> str:
    """The text of a device file for the zoo; checked by parsing it."""
    model, device = found.model, samples.device
    quota = samples.quota
    versions = ", ".join(f"{name} {version}" for name, version in sorted(samples.versions.items()))
    limits = f"{samples.threads} thread(s)" + (f", CPU quota {quota[0]} of {quota[1]} us" if quota else "")
    source = (
        f"measured {samples.made} with python -m agent measure on {device.get('processor')}, {device.get('system')}, "
        f"{limits}, kernel {found.kernel}; {versions}; error on held-out shapes: median {found.median_error:.1%}, "
        f"p95 {found.p95_error:.1%}" + ("" if samples.complete else "; the measurement was interrupted")
    )
    ram = device.get("memory_bytes")
    budget = samples.memory.get("budget_bytes") or 512_000_000
    lines = [
        f"title = {text_literal(samples.name + ', measured')} # the device",
        f"kind = {text_literal(kind)} # phone, tablet, board, laptop or mini-pc",
        f'gemm = "{found.large_flops / 1e9:.4g} GFLOPS" # float32 rate of a large product, by the model below',
        'basis = "measured" # of gemm: measured, published or estimate',
        f'overhead = "{1e6 * model.overhead_s:.4g} us" # fixed cost of one call, by the model below',
        f'ram = "{format_size(ram or budget)}"',
        f'ram_basis = "{"measured" if ram else "estimate"}" # of ram: measured, published or estimate',
        f'budget = "{format_size(budget)}" # memory its owner lends',
        f"source = {text_literal(source)}",
        "",
        "# see emulator/model/performance.py; seconds",
        "[performance]",
    ]
    for key, value in asdict(model).items():
        if key == "shapes":
            listed = ", ".join(f"[{', '.join(str(x) for x in shape)}]" for shape in value)
            lines.append(f"shapes = [{listed}]")
        elif isinstance(value, tuple):
            lines.append(f"{key} = [{', '.join(_number(x) for x in value)}]")
        else:
            lines.append(f"{key} = {value if isinstance(value, int) else _number(value)}")
    text = "\n".join(lines) + "\n"
    parse_device(samples.name, text)
    return text


def file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


def write_device_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place with --out") from None


def _number(value: float) -> str:
    text = f"{value:.6g}"
    return text if any(c in text for c in ".e") else text + ".0"


def text_literal(value: str) -> str:
    return json.dumps("".join(c if c.isprintable() else "?" for c in value), ensure_ascii=False)
