"""`cleave plan`: what a fleet would need for one batch of a model, product by product, without running anything.

Modelled, not measured: T_i = latency_i + max(download, compute, upload) for every device, products one after another.
With a limited server, no product ends before its bytes have passed the server. Fewer, larger blocks may then be
better, so plans over fewer devices are tried too.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agent.protocol.errors import UserError
from agent.protocol.units import format_count, format_duration, format_size
from emulator.model.fleet import UNIFORM, draw_fleet, uniform_fleet
from ps.planning.capacity import CostModel, PackingError
from ps.planning.packing import Tiling, packed, streaming_model
from ps.planning.plans import Shape
from testbed.runs.scenario import load_scenario, scenario_names


@dataclass(frozen=True, slots=True)
class Planned:
    """One distinct product."""

    shape: Shape
    count: int
    tiling: Tiling
    makespan_s: float  # including the server's time
    bound_s: float
    solve_s: float
    devices: int
    bytes_down: int
    bytes_up: int
    limit: str

    def as_dict(self, bytes_per_value: int) -> dict[str, Any]:
        return {
            "m": self.shape.rows,
            "n": self.shape.inner,
            "q": self.shape.columns,
            "batch": self.shape.batch,
            "count": self.count,
            "bytes_per_value": bytes_per_value,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.bound_s,
            "ratio": self.makespan_s / self.bound_s,
            "solve_s": self.solve_s,
            "devices_used": self.devices,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "limit": self.limit,
        }


def fleet_profiles(name: str, devices: int, seed: int) -> NDArray[np.void]:
    """A fleet from the authors' evaluation, or the fleet of a packaged scenario."""
    if devices < 1:
        raise UserError(f"--devices is {devices}; a fleet needs at least 1")
    if name in UNIFORM:
        return uniform_fleet(name, devices, seed)
    if name not in scenario_names():
        raise UserError(f"unknown fleet {name!r}; there are {', '.join([*UNIFORM, *scenario_names()])}")
    mix = load_scenario(name).fleet
    return draw_fleet(devices, mix.kinds, mix.networks, seed, mix.line_share).profiles


def plan_product(
    shape: Shape, count: int, profiles: NDArray[np.void], bytes_per_value: int, server_bps: float | None
) -> Planned:
    begun = time.perf_counter()
    model = streaming_model(profiles, shape.inner, bytes_per_value)
    sides = shape.batch, shape.rows, shape.columns
    try:
        best = _finish(shape, count, packed((model, model), *sides), model, bytes_per_value, server_bps)
        if best.limit == "server":
            # fastest devices first; half as many devices need 0.7 of the bytes
            ranking = np.argsort(np.maximum(model.wide[0] ** 2, model.cell[1]), kind="stable")
            fewer = len(ranking) // 2
            while fewer >= 1:
                chosen = ranking[:fewer]
                smaller = packed((model.take(chosen), model.take(chosen)), *sides)
                moved = Tiling(smaller.boxes, chosen[smaller.owner], best.tiling.bound_s, smaller.makespan_s)
                other = _finish(shape, count, moved, model, bytes_per_value, server_bps)
                if other.makespan_s >= best.makespan_s:
                    break
                best, fewer = other, fewer // 2
    except PackingError as error:
        raise UserError(f"the fleet cannot do {shape}: {error}") from None
    solve_s = time.perf_counter() - begun
    return Planned(**{name: getattr(best, name) for name in Planned.__slots__ if name != "solve_s"}, solve_s=solve_s)


def _finish(
    shape: Shape, count: int, tiling: Tiling, model: CostModel, bytes_per_value: int, server_bps: float | None
) -> Planned:
    boxes = tiling.boxes
    bytes_down = bytes_per_value * shape.inner * int((boxes[:, 1] * (boxes[:, 3] + boxes[:, 5])).sum())
    bytes_up = bytes_per_value * shape.cells
    server_s = 8 * max(bytes_down, bytes_up) / server_bps if server_bps else 0.0
    # in any plan, every result passes the server once, and every operand at least once
    least_bytes = max(bytes_up, bytes_per_value * shape.batch * (shape.rows + shape.columns) * shape.inner)
    bound_s = max(tiling.bound_s, 8 * least_bytes / server_bps if server_bps else 0.0)
    return Planned(
        shape=shape,
        count=count,
        tiling=tiling,
        makespan_s=max(tiling.makespan_s, server_s),
        bound_s=bound_s,
        solve_s=0.0,
        devices=len(np.unique(tiling.owner)),
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        limit="server" if server_s > tiling.makespan_s else _limit(tiling, model),
    )


def _limit(tiling: Tiling, model: CostModel) -> str:
    """The bottleneck of most of the work."""
    boxes, owner = tiling.boxes, tiling.owner
    cells = boxes[:, 1] * boxes[:, 3] * boxes[:, 5]
    down_s = boxes[:, 1] * (boxes[:, 3] + boxes[:, 5]) * model.wide[0][owner]
    other_s = cells * model.cell[1][owner]
    latency_s = model.fixed_s[owner]
    names = np.where(latency_s > np.maximum(down_s, other_s), 0, np.where(down_s >= other_s, 1, 2))
    weights = np.bincount(names, cells, 3)
    return ("latency", "downlink", "uplink or compute")[int(weights.argmax())]


def write_boxes(path: Path, plans: list[Planned]) -> None:
    """One JSON line per block; a range of batch entries is written entry by entry."""
    try:
        with path.open("w", encoding="utf-8") as file:
            for index, planned in enumerate(plans):
                rows = zip(planned.tiling.boxes.tolist(), planned.tiling.owner.tolist(), strict=True)
                for (batch, batches, row, rows_, column, columns), device in rows:
                    for entry in range(batch, batch + batches):
                        record = {"gemm": index, "batch": entry, "device": device, "row": row, "rows": rows_}
                        file.write(json.dumps(record | {"column": column, "columns": columns}) + "\n")
    except OSError as error:
        raise UserError(f"cannot write the boxes to {path}: {error.strerror}") from None


def as_json(plans: list[Planned], profiles: NDArray[np.void], bytes_per_value: int) -> dict[str, Any]:
    """Everything needed to recompute the makespans without this code."""
    latency_s = 2 * profiles["latency_s"] + profiles["overhead_s"]
    fleet = [
        {"id": i, "flops": f, "down_bps": d, "up_bps": u, "latency_s": s, "memory_bytes": m}
        for i, (f, d, u, s, m) in enumerate(
            zip(
                profiles["flops"].tolist(),
                profiles["down_bps"].tolist(),
                profiles["up_bps"].tolist(),
                latency_s.tolist(),
                profiles["memory_bytes"].tolist(),
                strict=True,
            )
        )
    ]
    total_s, bound_s = batch_seconds(plans)
    return {
        "products": [p.as_dict(bytes_per_value) for p in plans],
        "batch_s": total_s,
        "batch_lower_bound_s": bound_s,
        "fleet": fleet,
    }


def batch_seconds(plans: list[Planned]) -> tuple[float, float]:
    return sum(p.count * p.makespan_s for p in plans), sum(p.count * p.bound_s for p in plans)


def print_plans(console: Console, title: str, plans: list[Planned]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("product", "count", "makespan", "bound", "ratio", "solved in", "devices", "down", "up", "limit"):
        table.add_column(heading, justify="left" if heading in ("product", "limit") else "right")
    for p in plans:
        shape = f"{p.shape.rows}x{p.shape.inner}x{p.shape.columns}"
        table.add_row(
            f"{p.shape.batch} of {shape}" if p.shape.batch > 1 else shape,
            format_count(p.count),
            format_duration(p.makespan_s),
            format_duration(p.bound_s),
            f"{p.makespan_s / p.bound_s:.3f}",
            format_duration(p.solve_s),
            format_count(p.devices),
            format_size(p.bytes_down),
            format_size(p.bytes_up),
            p.limit,
        )
    console.print(table)
    total_s, bound_s = batch_seconds(plans)
    console.print(
        f"one batch, modelled, product after product: {format_duration(total_s)}; "
        f"no plan beats {format_duration(bound_s)} (ratio {total_s / bound_s:.4f})"
    )
