"""`cleave links check`: whether kernel links carry what was requested: requested against achieved, for some devices.

The links of the whole fleet are made; those of a sample are measured (`emulator.links.probe`), under each other's load.
A rate may be off by 5% plus one packet, which matters if few packets pass in the time; a round trip by 10%, plus 2 ms,
plus the time of its own bytes on a slow line. Latency that is left to user space is reported as not the kernel's.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agent.protocol.units import format_duration, format_rate
from emulator.links.lab import PREFIX, SERVER_ADDRESS, link_lab
from emulator.links.netlink import in_namespace
from emulator.links.probe import Asked, MeasuredLink, ProbeServer, measure, spans_s
from emulator.links.shaping import Applied, apply
from emulator.links.shaping_plan import MOST_BPS, PodLinks, addresses
from emulator.model.fleet import Fleet
from emulator.model.link import LinkSpec, link_specs, plain_links

RATE_ALLOWED = 0.05
ROUND_TRIP_ALLOWED, ROUND_TRIP_SLACK_S = 0.10, 0.002
SMALL_PACKET_BYTES, PACKET_BYTES = 70, 1500


@dataclass(frozen=True, slots=True)
class Row:
    """One device: what was requested of its link, and what the link achieved."""

    device: str
    asked_down_bps: float
    down_bps: float
    asked_up_bps: float
    up_bps: float
    asked_round_trip_s: float | None  # None: not shaped by the kernel
    round_trip_s: float
    wrong: tuple[str, ...]  # of down, up and round trip


def specs_of(fleet: Fleet) -> list[LinkSpec]:
    return link_specs(fleet.profiles, fleet.links or plain_links(len(fleet)))


def choose(count: int, most: int, seed: int) -> list[int]:
    """Devices to measure, in order."""
    chosen = np.random.default_rng(seed).choice(count, min(count, most), replace=False)
    return sorted(chosen.tolist())


def judge(label: str, spec: LinkSpec, got: MeasuredLink, latency_in_kernel: bool) -> Row:
    wrong = []
    slower_bps = min(spec.rate_down_bps, spec.rate_up_bps)
    for way, bps in (("down", got.down_bps), ("up", got.up_bps)):
        asked_bps = min(getattr(spec, f"rate_{way}_bps"), MOST_BPS)
        packet = 8 * PACKET_BYTES / (asked_bps * spans_s(slower_bps)[1])
        if abs(bps / asked_bps - 1) > RATE_ALLOWED + packet:
            wrong.append(way)
    round_trip_s = spec.delay_down_s + spec.delay_up_s if latency_in_kernel else None
    own_s = 8 * SMALL_PACKET_BYTES * (1 / spec.rate_down_bps + 1 / spec.rate_up_bps)
    asked_s = round_trip_s or 0.0
    if abs(got.round_trip_s - asked_s) > ROUND_TRIP_ALLOWED * asked_s + ROUND_TRIP_SLACK_S + own_s:
        wrong.append("round trip")
    return Row(
        label,
        spec.rate_down_bps,
        got.down_bps,
        spec.rate_up_bps,
        got.up_bps,
        round_trip_s,
        got.round_trip_s,
        tuple(wrong),
    )


def check_here(fleet: Fleet, sample: Sequence[int]) -> tuple[Applied, list[Row]]:
    """Measure between two network namespaces of this machine. Needs root."""
    specs, labels = specs_of(fleet), fleet.labels
    with link_lab() as lab:
        devices = tuple(zip(addresses(PREFIX, len(specs)), specs, strict=True))
        applied = apply([PodLinks(lab.pod_interface, devices, lab.pod, PREFIX, lab.server)])
        asked = [Asked(devices[i][0], specs[i].rate_down_bps, specs[i].rate_up_bps) for i in sample]
        with ProbeServer(in_namespace(lab.server, _listening)) as server:
            found = measure((SERVER_ADDRESS, server.port), asked, lambda: in_namespace(lab.pod, socket.socket))
    rows = [judge(labels[i], specs[i], got, applied.netem) for i, got in zip(sample, found, strict=True)]
    return applied, rows


def _listening() -> socket.socket:
    made = socket.socket()
    made.bind((SERVER_ADDRESS, 0))
    made.listen(1024)
    return made


def verdict(applied: Applied, rows: Sequence[Row]) -> str:
    off = [row for row in rows if row.wrong]
    held = f"; {', '.join(applied.in_user_space)} held in user space, by the pods" if applied.in_user_space else ""
    if not off:
        return f"VALID: {len(rows)} of {applied.devices:,} devices carry what was asked for{held}"
    worst = ", ".join(f"{row.device}: {' and '.join(row.wrong)}" for row in off[:3])
    more = ", ..." if len(off) > 3 else ""
    return (
        f"DEGRADED: {len(off)} of {len(rows)} devices do not carry what was asked for ({worst}{more}); "
        f"the host may be too busy: try fewer devices at once, or slower lines (fleet.line_share){held}"
    )


def as_json(applied: Applied, rows: Sequence[Row]) -> dict[str, Any]:
    shares = {f"{way}_share": _spread(rows, way) for way in ("down", "up")}
    return {
        "verdict": verdict(applied, rows).partition(":")[0],
        "applied": asdict(applied),
        **shares,
        "devices": [asdict(row) for row in rows],
    }


def _spread(rows: Sequence[Row], way: str) -> dict[str, float]:
    """Achieved, as a share of what was requested."""
    shares = [getattr(row, f"{way}_bps") / getattr(row, f"asked_{way}_bps") for row in rows]
    least, median, most = np.percentile(shares, [0, 50, 100]).tolist()
    return {"least": least, "median": median, "most": most}


def print_rows(console: Console, applied: Applied, rows: Sequence[Row]) -> None:
    table = Table(title=f"links of {applied.devices:,} devices, {len(rows)} measured", title_justify="left")
    table.add_column("device")
    for heading in ("down asked", "achieved", "up asked", "achieved", "round trip asked", "achieved"):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = [
            (format_rate(row.asked_down_bps), f"{100 * row.down_bps / row.asked_down_bps:.1f}%", "down"),
            (format_rate(row.asked_up_bps), f"{100 * row.up_bps / row.asked_up_bps:.1f}%", "up"),
            (
                "in user space" if row.asked_round_trip_s is None else format_duration(row.asked_round_trip_s),
                format_duration(row.round_trip_s),
                "round trip",
            ),
        ]
        cells = [
            cell for asked, got, what in rates for cell in (asked, f"[red]{got}[/red]" if what in row.wrong else got)
        ]
        table.add_row(row.device, *cells)
    console.print(table)
    for way in ("down", "up"):
        share = _spread(rows, way)
        console.print(f"{way}: {100 * share['least']:.1f}% to {100 * share['most']:.1f}% of what was asked")
    console.print(f"set up in {format_duration(applied.seconds)}, {applied.classes:,} classes read back")
    console.print(verdict(applied, rows), soft_wrap=True)
