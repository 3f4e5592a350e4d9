"""Asked against achieved: can the times of this run be trusted? If not, why not, and what would help?

Every emulated block has three times: when its answer was due at the server, when it left its pod, and when it reached
the server. Block stretch is the achieved time over the modelled time, averaged over blocks weighted by their time. Step
stretch is the step time over the time of the same step on the modelled fleet; it includes the host's work between
products. Both may exceed 1 by 5%.

Over kernel links the time on the line is real, so there is no time at which an answer is due at the server. The time at
which it was due to leave its pod and the time at which it left are known, so block stretch covers the pods alone. Steps
may be 10% longer than on the modelled fleet, because they include TCP slow start and full queues. The clock cannot be
slowed down there.

Both figures mean something only if the requested fleet did the work. If devices left that the scenario did not tell to
leave, steps are not compared with those of the whole fleet, and the run is DEGRADED for that reason, whatever its times
are. A step much shorter than predicted is as wrong as a longer one.

A slower clock gives the host longer for everything. Which scale is slow enough, one run cannot tell exactly:
emulator/model/scales.py says what to try next, here as in the search of `clock.kind = "auto"`.

Pure: figures of blocks and of the host in, verdict out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.model.scales import Trial, least_honest, next_scale

STRETCH_ALLOWED = 1.05
# A run is longer than a trial step and never quite like it, so an honest trial keeps a margin below that.
STRETCH_ENOUGH = 1.0 + 0.85 * (STRETCH_ALLOWED - 1.0)
KERNEL_STEPS_ALLOWED = 1.10  # step time over kernel links / over modelled links
# Nothing on a host makes modelled devices faster: a step shorter than this does less work than the modelled one. Not
# closer to 1, because the median of a few steps varies with few random draws.
STEPS_AT_LEAST = 0.90
SATURATED = 0.9  # share of all cores
STOLEN = 0.02  # share of all cores, taken by the hypervisor
FOREIGN = 0.25  # share of all cores, used by other programs

VALID, DEGRADED = "VALID", "DEGRADED"
KERNEL_VALID = "pods kept up with the model; links are the kernel's, which `cleave links check` measures"

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Host load during the steps, as shares of all its cores."""

    busy: float = 0.0
    stolen: float = 0.0  # by the hypervisor, for other machines
    own: float = 0.0  # by the server and its pods
    server_busy: float = 0.0  # share of time the server's thread was working
    server_turn_s: float = 0.0  # its longest turn; an answer may have waited this long


@dataclass(frozen=True, slots=True)
class Worked:
    """The fleet that did the steps: emulated devices, and real ones among them."""

    asked: int  # in the scenario when the first step begins
    began: int
    ended: int
    least: int
    real_began: int = 0
    real_ended: int = 0
    real_least: int = 0
    unasked: tuple[str, ...] = ()  # departures that the scenario did not ask for, as text
    stood_still_s: float = 0.0  # total, server process: stopped, or without processor time
    changed: bool = False  # devices came or went: steps are not comparable with the initial fleet's

    def disturbances(self) -> list[str]:
        """Why the step times are not those of the requested fleet."""
        still = f"the server's process stood still for {self.stood_still_s:.1f} s (stopped, or without processor time)"
        return [*self.unasked, *([still] if self.stood_still_s else [])]

    def told(self) -> str:
        text = f"{self.began:,} of {self.asked:,} emulated devices at the beginning, {self.ended:,} at the end"
        text += f", at least {self.least:,}"
        if self.real_began or self.real_ended:
            text += f"; real ones {self.real_began:,}, {self.real_ended:,} and {self.real_least:,}"
        return text


@dataclass(frozen=True, slots=True)
class Fidelity:
    verdict: str
    reason: str
    blocks: int  # emulated blocks examined
    stretch: float  # of blocks
    late_p50_s: float
    late_p99_s: float
    late_share: float = 0.0  # share of blocks that took more than 5% longer than asked
    step_stretch: float | None = None  # None: no prediction, or faults make it incomparable
    pod_late_p99_s: float | None = None  # time from due until the answer left its pod
    server_late_p99_s: float | None = None  # time from leaving the pod until the server had the answer
    causes: list[str] = field(default_factory=list)  # largest first
    scale_suggested: float | None = None  # a slower clock that may help; None: it need not, or would not
    host: HostLoad = HostLoad()


def judge(
    sent_s: Numbers,
    due_s: Numbers,
    received_s: Numbers,
    left_s: Numbers | None = None,
    step_stretch: float | None = None,
    host: HostLoad | None = None,
    kernel_links: bool = False,
    fleet: Worked | None = None,
    scale: float = 1.0,
    tried: Sequence[Trial] = (),
) -> Fidelity:
    """The verdict on a run.

    `fleet`: the devices that did the work; None: the requested devices. `due_s` is NaN where a real device answered,
    because its time is not modelled. `left_s`: when the answer left its pod. With `kernel_links`, `due_s` is when the
    answer has to leave its pod. `scale`: of the run's clock; `tried`: what is known of other scales on this host.
    """
    host = host or HostLoad()
    unasked = fleet.disturbances() if fleet else []
    if fleet is not None and (unasked or fleet.changed):
        step_stretch = None
    if kernel_links and left_s is not None:
        received_s = left_s
    steps_allowed = KERNEL_STEPS_ALLOWED if kernel_links else STRETCH_ALLOWED
    modelled = ~np.isnan(due_s) & (due_s > sent_s)
    if not modelled.any():
        if fleet is not None and unasked:
            return Fidelity(DEGRADED, _another_fleet(fleet), 0, 1.0, 0.0, 0.0, causes=unasked, host=host)
        return Fidelity(VALID, "no modelled time in this run", 0, 1.0, 0.0, 0.0, host=host)
    sent_s, due_s, received_s = sent_s[modelled], due_s[modelled], received_s[modelled]
    late_s, asked_s = received_s - due_s, due_s - sent_s
    stretch = float((received_s - sent_s).sum() / asked_s.sum())
    p50, p99 = (float(x) for x in np.percentile(late_s, [50, 99]))
    pod_s = server_s = None
    if left_s is not None and not np.isnan(left_s[modelled]).any():
        pod_s, server_s = left_s[modelled] - due_s, received_s - left_s[modelled]
    short = step_stretch is not None and step_stretch < STEPS_AT_LEAST
    valid = stretch <= STRETCH_ALLOWED and (step_stretch or 1.0) <= steps_allowed
    causes = [] if valid else _causes(stretch, step_stretch, pod_s, server_s, host)
    worst = max(stretch, step_stretch or 1.0)
    slower = None if valid or kernel_links else _slower(Trial(scale, worst), tried)
    concerned = float(np.mean(late_s > (STRETCH_ALLOWED - 1) * asked_s))
    if valid:
        reason = KERNEL_VALID if kernel_links else "the host kept up with the model"
    else:
        reason = _reason(stretch, step_stretch, p99, concerned, causes, kernel_links, scale, slower)
    if fleet is not None and unasked:
        # the other devices were late because of work that the departed left undone: do not blame the host
        valid, slower, causes, reason = False, None, unasked, _another_fleet(fleet)
    elif short and valid and step_stretch is not None:
        valid, causes = False, [f"steps {100 * (1 - step_stretch):.0f}% shorter than predicted"]
        reason = (
            f"{causes[0]}: the work was not done as modelled. Losses are still exact; look for devices that "
            "are faster than their profiles say, or real ones among them"
        )
    return Fidelity(
        VALID if valid else DEGRADED,
        reason,
        len(sent_s),
        stretch,
        p50,
        p99,
        concerned,
        step_stretch,
        None if pod_s is None else float(np.percentile(pod_s, 99)),
        None if server_s is None else float(np.percentile(server_s, 99)),
        causes,
        slower,
        host,
    )


def _another_fleet(fleet: Worked) -> str:
    what = "the requested fleet did not do the work" if fleet.unasked else "the run was interrupted"
    return (
        f"{what}: {'; '.join(fleet.disturbances())}. There were {fleet.told()}. Times "
        "are not compared with the prediction, which is for the whole fleet; losses are still exact"
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


def _slower(this: Trial, tried: Sequence[Trial]) -> float | None:
    """What the search for the least honest scale would try after this run, or has found."""
    trials = [this, *(trial for trial in tried if trial.scale > this.scale)]
    return least_honest(trials, STRETCH_ALLOWED) or next_scale(trials, STRETCH_ALLOWED)


def _reason(
    stretch: float,
    step_stretch: float | None,
    p99_s: float,
    concerned: float,
    causes: list[str],
    kernel_links: bool,
    scale: float,
    slower: float | None,
) -> str:
    """Over kernel links the clock cannot be slowed down."""
    help_ = "use" if slower is None else f"slow the clock down to {slower:g}x (now {scale:g}x), or use"
    where = " in their pods, without the time on the line," if kernel_links else ""
    steps = "" if step_stretch is None else f", steps {100 * (step_stretch - 1):.0f}% longer than predicted"
    return (
        f"the host was too slow: blocks took{where} {100 * (stretch - 1):.0f}% longer than modelled (p99 "
        f"{1000 * p99_s:.1f} ms late, {100 * concerned:.0f}% of the blocks more than 5%){steps}. Cause: "
        f"{'; '.join(causes)}. Losses are still exact; for true times {help_} "
        "fewer devices, a smaller model or a faster host"
    )


def device_ledger(
    columns: Mapping[str, NDArray[Any]], profiles: NDArray[np.void], kernel_links: bool = False
) -> dict[str, NDArray[Any]]:
    """One row per device that returned an emulated block: what was asked of it and its link, and what was achieved.

    A run sees only when a modelled device answers. So the achieved rates are the ones at which its blocks would have
    taken as long as they did, with lateness spread evenly over the path; the achieved latency includes all lateness.
    Over kernel links a device is judged by when its answers leave the pod, and the rates the link achieved cannot be
    seen here: NaN.
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
