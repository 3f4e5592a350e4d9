"""Kernel links with changing rates: classes follow traces (`emulator.links.rate_trace`), twice per second.

    python -m emulator.links.follow

The first line of standard input is {"pods": [...], "traces": [...], "following": {address: [trace, offset_s]}}: links
made by `emulator.links.shaping`, traces in the format sent to pods, and which device follows which trace, starting at
which offset. It runs until standard input ends. A trace scales the device's own rate, which is the trace's mean. While
a trace lets nothing pass, the link has the slowest rate that the kernel can shape.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from agent.protocol.errors import UserError
from emulator.links.rate_trace import PACKET_BYTES, LinkTrace, RateTrace
from emulator.links.shaping import Ends, probe
from emulator.links.shaping_plan import LEAST_BPS, PodLinks, ShapingPlanError, make_plan
from emulator.model.link import LinkSpec

WINDOW_S = 0.5
Following = Mapping[str, tuple[int, float]]  # address -> trace, and the device's offset in it


def rate_bps(trace: RateTrace, mean_bps: float, begins_s: float) -> float:
    """Rate in the window that begins at `begins_s`, on a line of this mean rate."""
    packets = float(np.diff(trace.passed(np.array([begins_s, begins_s + WINDOW_S])))[0])
    return max(LEAST_BPS, 8 * PACKET_BYTES * packets / WINDOW_S * mean_bps / trace.mean_bps)


def at(
    pod: PodLinks, traces: Sequence[LinkTrace], following: Following, passed_s: float
) -> tuple[tuple[str, LinkSpec], ...]:
    """The pod's devices that follow a trace, with their rates `passed_s` after the start."""
    devices = []
    for address, spec in pod.devices:
        if address in following:
            number, offset_s = following[address]
            down, up = (
                rate_bps(trace, mean_bps, offset_s + passed_s)
                for trace, mean_bps in (
                    (traces[number].down, spec.rate_down_bps),
                    (traces[number].up, spec.rate_up_bps),
                )
            )
            devices.append((address, replace(spec, rate_down_bps=down, rate_up_bps=up)))
    return tuple(devices)


def follow(
    pods: Sequence[PodLinks],
    traces: Sequence[LinkTrace],
    following: Following,
    ended: Callable[[float], bool],
    now_s: Callable[[], float] = time.monotonic,
) -> int:
    """Run until `ended`, which may wait for the seconds it is given; returns the number of changes."""
    changes, netem = 0, probe().netem
    with ExitStack() as open_:
        ends = [(pod, open_.enter_context(Ends(pod))) for pod in pods]
        begun_s, window = now_s(), 0
        while True:
            for pod, both in ends:
                if devices := at(pod, traces, following, window * WINDOW_S):
                    both.change(make_plan(replace(pod, devices=devices), netem), known=window > 0)
                    changes += len(devices)
            window = max(window + 1, int((now_s() - begun_s) / WINDOW_S))  # a late window is skipped, not caught up on
            if ended(max(0.0, begun_s + window * WINDOW_S - now_s())):
                return changes


def _read(line: str) -> tuple[list[PodLinks], list[LinkTrace], dict[str, tuple[int, float]]]:
    try:
        told = json.loads(line)
        ways = [[RateTrace(np.array(trace[way], np.int64)) for way in ("down_ms", "up_ms")] for trace in told["traces"]]
        following = {address: (int(number), float(offset)) for address, (number, offset) in told["following"].items()}
        if not all(0 <= number < len(ways) for number, _ in following.values()):
            raise ShapingPlanError("a device follows a trace that is not given")
        return [PodLinks.from_json(pod) for pod in told["pods"]], [LinkTrace(*pair) for pair in ways], following
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise ShapingPlanError(f"the first line must have pods, traces and following: {error!r}") from None


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m emulator.links.follow", description=__doc__).parse_args(arguments)

    def ended(wait_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        return bool(ready) and not sys.stdin.readline()

    try:
        pods, traces, following = _read(sys.stdin.readline())
        follow(pods, traces, following, ended)
    except UserError as error:
        print(f"link follow: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
