"""Asked against achieved: may this run's times be believed? And if not, why not, and what would help?

Every emulated block has a moment at which its answer had to be back at the server, one at which it left its pod, and
one at which it was back. The stretch of blocks is how much longer they took than the model asked for, on average,
weighted by their time; the stretch of steps is how much longer a step took than the same step on the modelled fleet,
which also holds what the host does between products. Both may be 5%.

Over kernel links the time on the line is real, and nobody knows when an answer had to be back. What is known is when
it was due to leave its pod, and when it left: the stretch of blocks is that of the pods alone. Steps may be 10% longer
than on the modelled fleet: they have TCP's beginnings and full queues in them. A clock cannot be slowed down there.

Slowing the clock down k times gives the host k times as long for everything, and what it does too late does not get
much later by that: in device time it is about a k-th. So the scale that makes a run valid follows from the stretch.

Pure: figures of blocks and of the host in, verdict out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRETCH_ALLOWED = 1.05
KERNEL_STEPS_ALLOWED = 1.10  # the same step over kernel links and modelled ones
# By the scale that is suggested. A slower run sleeps more often, and on a busy host every awakening costs something: at
# scales of 13 to 35, eight times on an overloaded host, twice as much was left over as simple division says.
STRETCH_AIMED_AT = 1.015
SATURATED = 0.9  # of all cores
STOLEN = 0.02  # of all cores, by the hypervisor
FOREIGN = 0.25  # of all cores, by other programs

VALID, DEGRADED = "VALID", "DEGRADED"
KERNEL_VALID = "pods kept up with the model; links are the kernel's, which `cleave links check` measures"

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What the host did during the steps, as shares of all its cores."""

    busy: float = 0.0
    stolen: float = 0.0  # by the hypervisor, for other machines
    own: float = 0.0  # by the server and its pods
    server_busy: float = 0.0  # share of the time in which the server's thread was at work
    server_turn_s: float = 0.0  # its longest turn: so long an answer may have waited


@dataclass(frozen=True, slots=True)
class Fidelity:
    verdict: str
    reason: str
    blocks: int  # emulated blocks that were looked at
    stretch: float  # of blocks
    late_p50_s: float
    late_p99_s: float
    late_share: float = 0.0  # of the blocks: took more than 5% longer than asked
    step_stretch: float | None = None  # None where no step was predicted, or faults make it incomparable
    pod_late_p99_s: float | None = None  # left its pod after it was due
    server_late_p99_s: float | None = None  # from there until the server had it
    causes: list[str] = field(default_factory=list)  # the heaviest first
    scale_needed: float = 1.0  # times this run's scale
    host: HostLoad = HostLoad()


def judge(
    sent_s: Numbers,
    due_s: Numbers,
    received_s: Numbers,
    left_s: Numbers | None = None,
    step_stretch: float | None = None,
    host: HostLoad | None = None,
    local_share: float = 0.0,
    kernel_links: bool = False,
) -> Fidelity:
    """`due_s` is NaN where a real device answered: nothing is modelled there. `left_s`: when it left its pod.
    `local_share`: of the predicted step, what the server computes itself, which a slower clock shortens too. With
    `kernel_links` an answer is due when it has to leave its pod."""
    host = host or HostLoad()
    if kernel_links and left_s is not None:
        received_s = left_s
    steps_allowed = KERNEL_STEPS_ALLOWED if kernel_links else STRETCH_ALLOWED
    modelled = ~np.isnan(due_s) & (due_s > sent_s)
    if not modelled.any():
        return Fidelity(VALID, "no modelled time in this run", 0, 1.0, 0.0, 0.0, host=host)
    sent_s, due_s, received_s = sent_s[modelled], due_s[modelled], received_s[modelled]
    late_s, asked_s = received_s - due_s, due_s - sent_s
    stretch = float((received_s - sent_s).sum() / asked_s.sum())
    p50, p99 = (float(x) for x in np.percentile(late_s, [50, 99]))
    pod_s = server_s = None
    if left_s is not None and not np.isnan(left_s[modelled]).any():
        pod_s, server_s = left_s[modelled] - due_s, received_s - left_s[modelled]
    valid = stretch <= STRETCH_ALLOWED and (step_stretch or 1.0) <= steps_allowed
    causes = [] if valid else _causes(stretch, step_stretch, pod_s, server_s, host)
    excess = max(stretch - 1, ((step_stretch or 1.0) - 1) / max(1 - local_share, 0.01))
    scale = 1.0 if valid or kernel_links else max(2.0, float(math.ceil(excess / (STRETCH_AIMED_AT - 1))))
    concerned = float(np.mean(late_s > (STRETCH_ALLOWED - 1) * asked_s))
    return Fidelity(
        VALID if valid else DEGRADED,
        (KERNEL_VALID if kernel_links else "the host kept up with the model")
        if valid
        else _reason(stretch, step_stretch, p99, concerned, causes, None if kernel_links else scale),
        len(sent_s),
        stretch,
        p50,
        p99,
        concerned,
        step_stretch,
        None if pod_s is None else float(np.percentile(pod_s, 99)),
        None if server_s is None else float(np.percentile(server_s, 99)),
        causes,
        scale,
        host,
    )


def _causes(
    stretch: float, step_stretch: float | None, pod_s: Numbers | None, server_s: Numbers | None, host: HostLoad
) -> list[str]:
    """What the measurements point to: first what the host lacked, then where the time went."""
    causes = []
    foreign = host.busy - host.own
    if host.stolen >= STOLEN:
        causes.append(f"steal: the hypervisor gave {100 * host.stolen:.0f}% of the processor to other machines")
    if host.busy + host.stolen >= SATURATED:
        share, whose = (foreign, "other programs") if foreign >= FOREIGN else (host.own, "this run")
        causes.append(f"host CPU saturated: {100 * host.busy:.0f}% busy, {100 * share:.0f}% by {whose}")
    elif foreign >= FOREIGN:
        causes.append(f"other programs took {100 * foreign:.0f}% of the host's CPU")
    if stretch > STRETCH_ALLOWED and pod_s is not None and server_s is not None:
        late = {"pods": pod_s, "server": server_s}
        told = {
            "pods": "pods late: answers left their pod {:.1f} ms after they were due (p99)",
            "server": "server late: answers waited {:.1f} ms until the server took them (p99)",
        }
        for who in sorted(late, key=lambda name: -float(late[name].sum())):
            if late[who].sum() > 0.25 * (pod_s + server_s).sum():
                causes.append(told[who].format(1e3 * float(np.percentile(late[who], 99))))
    if step_stretch is not None and step_stretch > max(STRETCH_ALLOWED, stretch + 0.02):
        causes.append(
            f"server slow: its own work between products (dispatching, packing, sockets; {100 * host.server_busy:.0f}% "
            f"of the time at work, up to {1e3 * host.server_turn_s:.0f} ms at a stretch) is part of every step"
        )
    return causes or ["the host's work took time that no device has"]


def _reason(
    stretch: float, step_stretch: float | None, p99_s: float, concerned: float, causes: list[str], scale: float | None
) -> str:
    """`scale`: None where the clock cannot be slowed down, over kernel links."""
    slower = "use" if scale is None else f"slow the clock down {scale:g} times, or use"
    where = " in their pods, without the time on the line," if scale is None else ""
    steps = "" if step_stretch is None else f", steps {100 * (step_stretch - 1):.0f}% longer than predicted"
    return (
        f"the host was too slow: blocks took{where} {100 * (stretch - 1):.0f}% longer than modelled (p99 "
        f"{1000 * p99_s:.1f} ms late, {100 * concerned:.0f}% of the blocks more than 5%){steps}. Cause: "
        f"{'; '.join(causes)}. Losses are exact all the same; for true times {slower} "
        "fewer devices, a smaller model or a faster host"
    )


def device_ledger(
    columns: Mapping[str, NDArray[Any]], profiles: NDArray[np.void], kernel_links: bool = False
) -> dict[str, NDArray[Any]]:
    """One row for each device that returned an emulated block: what was asked of it and its link, what was achieved.

    What a run can see of a modelled device is the moment of its answers. So the achieved rates are those at which its
    blocks would have taken as long as they did, lateness spread evenly over their way; the achieved latency has it all.
    Over kernel links it is judged by its departures, and what the link achieved cannot be seen here: NaN.
    """
    modelled = np.flatnonzero(~np.isnan(columns["due_s"]) & (columns["due_s"] > columns["sent_s"]))
    modelled = modelled[np.argsort(columns["device"][modelled], kind="stable")]
    device, starts = np.unique(columns["device"][modelled], return_index=True)
    back = "left_s" if kernel_links else "received_s"
    sent_s, due_s, received_s = (columns[name][modelled] for name in ("sent_s", "due_s", back))
    count = np.diff(np.append(starts, len(modelled)))

    def mean(values: Numbers) -> Numbers:
        sums: Numbers = np.add.reduceat(values, starts) / count if len(starts) else np.zeros(0)
        return sums

    asked_s, achieved_s = mean(due_s - sent_s), mean(received_s - sent_s)
    late = np.split(received_s - due_s, starts[1:]) if len(starts) else []
    late_s = np.array([np.percentile(part, [50, 99, 100]) for part in late]).reshape(-1, 3)
    profile, stretch = profiles[device], achieved_s / np.maximum(asked_s, 1e-12)
    seen = np.nan if kernel_links else 1.0
    return {
        "device": device,
        "blocks": count,
        "asked_s": asked_s,
        "achieved_s": achieved_s,
        "stretch": stretch,
        "late_p50_s": late_s[:, 0],
        "late_p99_s": late_s[:, 1],
        "late_max_s": late_s[:, 2],
        "compute_modelled_s": mean(columns["compute_s"][modelled]),
        "down_bps": profile["down_bps"],
        "down_achieved_bps": seen * profile["down_bps"] / stretch,
        "up_bps": profile["up_bps"],
        "up_achieved_bps": seen * profile["up_bps"] / stretch,
        "latency_s": profile["latency_s"],
        "latency_achieved_s": seen * (profile["latency_s"] + np.maximum(mean(received_s - due_s), 0.0) / 2),
    }
