"""Applies the faults and churn of a scenario to the pods of a run, and audits them.

`plan_faults` and `churn_schedule` decide what happens when, and to which devices: pure and seeded. The `Injector` has
no thread and no clock: its caller calls `tick(now_s)`, which sends what is due and records the pods' reports.
`injecting` starts the thread that does so during a run. The audit compares the injected faults with the requested ones,
by the pods' own timestamps, which are on this host's monotonic clock.

Time counts from the start of the first step.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agent.protocol.clock import Clock, WallClock
from agent.protocol.errors import UserError
from agent.protocol.units import parse_duration
from emulator.availability.churn import (
    JOIN,
    LEAVE,
    Event,
    Schedule,
    audit,
    flash_sessions,
    poisson_churn,
    read_trace,
    seti_sessions,
)
from testbed.runs.scenario import Churn, Fault, parse_percent

POISSON_S = 3600.0  # of the run, until generated churn repeats
SESSIONS_S = 14 * 86400.0  # of the trace
OF_PODS = ("kill", "stop", "corrupt", "disconnect", "exhaust")
DEADLY = ("kill", "exhaust")
UNTIL = {"stop": "continue", "disconnect": "reconnect"}  # what ends a fault
TICK_S = 0.05  # longest time between two checks for reports
DRAIN_S = 2.0  # longest wait for the reports of the last orders


@dataclass(frozen=True, slots=True)
class Injection:
    """One action at one time."""

    at_s: float
    do: str
    devices: tuple[int, ...] = ()  # of the fleet
    pods: tuple[int, ...] = ()  # for faults in OF_PODS, and for the actions that end them
    details: Mapping[str, Any] = field(default_factory=dict)  # seconds, factor, how


class Targets(Protocol):
    """What the injector needs of `testbed.launch.pods.PodGroup`."""

    def place(self, device: int) -> tuple[int, int]: ...
    def device(self, pod: int, index: int) -> int: ...
    def order(self, pod: int, order: Mapping[str, Any]) -> None: ...
    def kill(self, pod: int) -> None: ...
    def pause(self, pod: int) -> None: ...
    def resume(self, pod: int) -> None: ...
    def disconnect(self, pod: int) -> None: ...
    def reconnect(self, pod: int) -> None: ...
    def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]: ...


# ---------------------------------------------------------------------------------------------------- planning


def plan_faults(faults: Sequence[Fault], networks: Sequence[str], pod_count: int, seed: int) -> list[Injection]:
    """Injections in order of time, for a fleet whose devices are in these networks and dealt in turn to `pod_count`
    pods. Devices to leave are chosen among those that no earlier fault has sent away, devices to return among those
    that a fault has sent away, if any."""
    plan: list[Injection] = []
    returning: list[tuple[float, int, tuple[int, ...]]] = []  # heap: time, tie-breaker, devices
    away: set[int] = set()
    killed: set[int] = set()
    numbers = itertools.count()

    def return_until(at_s: float) -> None:
        while returning and returning[0][0] <= at_s:
            when_s, _, who = heapq.heappop(returning)
            away.difference_update(who)
            plan.append(Injection(when_s, "return", who))

    for place, fault in sorted(enumerate(faults), key=lambda pair: (pair[1].at_s, pair[0])):
        return_until(fault.at_s)
        rng = np.random.default_rng([seed, place])
        if fault.do in OF_PODS:
            alive = [pod for pod in range(pod_count) if pod not in killed]
            wanted = fault.pods or 1
            if fault.do == "exhaust" and pod_count < len(networks):
                raise UserError(
                    f'the fault "exhaust" at {fault.at} needs a memory limit, which only containers of one device '
                    f"have: set fleet.pods to {len(networks)}"
                )
            if wanted > len(alive) or (fault.do in DEADLY and wanted == len(alive)):
                raise UserError(
                    f'the fault "{fault.do}" at {fault.at} is for {wanted} pods, and there are {len(alive)} by then'
                    + ("; at least one must survive" if fault.do in DEADLY else "")
                    + f": set fleet.pods to {wanted + 1 + len(killed)} or more"
                )
            pods = tuple(sorted(rng.choice(alive, wanted, replace=False).tolist()))
            if fault.do in DEADLY:
                killed.update(pods)
            hit = tuple(d for d in range(len(networks)) if d % pod_count in pods)
            plan.append(Injection(fault.at_s, fault.do, hit, pods))
            if fault.do in UNTIL:
                plan.append(Injection(fault.at_s + (fault.seconds or 0.0), UNTIL[fault.do], hit, pods))
            continue
        who = _choose(fault, networks, {d for d in range(len(networks)) if d % pod_count in killed}, away, rng)
        if not who:
            raise UserError(
                f'the fault "{fault.do}" at {fault.at} is for no device: '
                + (
                    f'no device of this fleet is in the network "{fault.network}"'
                    if fault.network and fault.network not in networks
                    else "no device is left for it by then"
                )
            )
        details = {k: v for k in ("seconds", "factor", "how") if (v := getattr(fault, k)) is not None}
        if fault.do == "flap":
            period_s = parse_duration(fault.period)
            for turn in range(fault.times or 0):
                plan.append(Injection(fault.at_s + turn * period_s, "leave", who))
                plan.append(Injection(fault.at_s + (turn + 0.5) * period_s, "return", who))
        elif fault.do in ("leave", "vanish"):
            away.update(who)
            plan.append(Injection(fault.at_s, fault.do, who))
            if fault.seconds is not None:
                heapq.heappush(returning, (fault.at_s + fault.seconds, next(numbers), who))
        else:
            if fault.do == "return":
                away.difference_update(who)
            plan.append(Injection(fault.at_s, fault.do, who, (), details))
    return_until(float("inf"))
    return sorted(plan, key=lambda injection: injection.at_s)


def _choose(
    fault: Fault, networks: Sequence[str], dead: set[int], away: set[int], rng: np.random.Generator
) -> tuple[int, ...]:
    among = [device for device in range(len(networks)) if device not in dead]
    if fault.do in ("leave", "vanish", "freeze", "flap"):
        among = [device for device in among if device not in away]
    elif fault.do == "return" and away:
        among = [device for device in among if device in away]
    if fault.network is not None:
        return tuple(device for device in among if networks[device] == fault.network)
    if fault.share is not None:
        wanted = max(1, round(parse_percent(fault.share) * len(networks)))
    else:
        wanted = fault.devices or 1
    return tuple(sorted(rng.choice(among, min(wanted, len(among)), replace=False).tolist())) if among else ()


def churn_schedule(churn: Churn, devices: int, seed: int) -> Schedule:
    if churn.trace is not None:
        trace = read_trace(Path(churn.trace))
    elif churn.kind == "poisson":
        assert churn.leave_per_minute is not None
        leave_per_s = parse_percent(churn.leave_per_minute) / 60
        duration_s = POISSON_S * churn.speed_up
        trace = poisson_churn(devices, leave_per_s, parse_duration(churn.mean_away), duration_s, seed)
    else:
        trace = {"flash": flash_sessions, "seti": seti_sessions}[churn.kind or ""](devices, SESSIONS_S, seed)
    offset_s = parse_duration(churn.offset)
    schedule = Schedule.from_trace(trace, devices, speed_up=churn.speed_up, offset_s=offset_s, seed=seed)
    if not schedule.present.any():
        raise UserError(
            f"by [churn] none of the {devices} devices is there when the run begins: "
            "take more devices, another seed or another offset"
        )
    return schedule


# ---------------------------------------------------------------------------------------------------- doing


class Injector:
    def __init__(
        self,
        targets: Targets,
        faults: Sequence[Injection] = (),
        schedule: Schedule | None = None,
        how: str = "vanish",
        note: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        """`how`: how devices leave by the schedule; `note` receives every injection that was carried out."""
        self._targets, self._note, self._how = targets, note, how
        self._faults = list(faults)
        self._schedule = schedule
        self._churn: Iterator[Event] = schedule.forever() if schedule else iter(())
        self._next_churn = next(self._churn, None)
        self._sent = 0  # faults sent
        self._killed: set[int] = set()  # pods killed or told to exhaust their memory: they send no more reports
        self._dead: set[int] = set()  # pods killed: cannot be paused or resumed
        self._pending: dict[int, set[int]] = {}  # fault -> pods that have not reported it yet
        self._pending_churn: Counter[int] = Counter()  # pod -> orders that it has not reported yet
        self._done: dict[int, list[tuple[float, int]]] = {}  # fault -> when, and how many devices or pods
        self._churned: list[Event] = []
        self._skipped = 0  # churn events of devices whose pod was killed
        self._begun_ns = 0
        self._looked_s = 0.0
        self.error: BaseException | None = None

    def begin(self, at_ns: int) -> None:
        """Start of the first step, on the clock of the pods' stamps."""
        self._begun_ns = at_ns

    @property
    def next_s(self) -> float:
        """When the next action is due; infinity if there is none."""
        fault_s = self._faults[self._sent].at_s if self._sent < len(self._faults) else float("inf")
        return min(fault_s, self._next_churn.at_s if self._next_churn else float("inf"))

    @property
    def waiting(self) -> bool:
        """Whether an order was sent but not reported yet."""
        return bool(self._pending) or self._pending_churn.total() > 0

    def tick(self, now_s: float) -> None:
        """Send everything due by now, and record the reports."""
        self._looked_s = now_s
        while self._sent < len(self._faults) and self._faults[self._sent].at_s <= now_s:
            number, self._sent = self._sent, self._sent + 1
            self._inject(number, self._faults[number], now_s)
        self._send_churn(now_s)
        self.collect()

    def collect(self, wait_s: float = 0.0) -> None:
        for pod, report in self._targets.exchange(wait_s):
            self._reported(pod, report)

    def _inject(self, number: int, injection: Injection, now_s: float) -> None:
        if injection.do in DEADLY:
            for pod in injection.pods:
                self._killed.add(pod)
                if injection.do == "kill":
                    self._dead.add(pod)
                    self._targets.kill(pod)
                else:
                    self._targets.order(pod, {"do": injection.do})
                self._pending_churn.pop(pod, None)
                for pods in self._pending.values():
                    pods.discard(pod)
            self._pending = {fault: pods for fault, pods in self._pending.items() if pods}
            self._done[number] = [(now_s, len(injection.pods))]
            self._tell(now_s, injection.at_s, injection.do, list(injection.devices), list(injection.pods))
            return
        targets = self._targets
        actions = {"stop": targets.pause, "continue": targets.resume}
        actions |= {"disconnect": targets.disconnect, "reconnect": targets.reconnect}
        if injection.do in actions:
            running = [pod for pod in injection.pods if pod not in self._dead]
            for pod in running:
                actions[injection.do](pod)
            self._done[number] = [(now_s, len(running))] if running else []
            self._tell(now_s, injection.at_s, injection.do, list(injection.devices), running)
            return
        parts: dict[int, list[int]] = {pod: [] for pod in injection.pods}
        if not injection.pods:
            for device in injection.devices:
                pod, index = self._targets.place(device)
                parts.setdefault(pod, []).append(index)
        alive = {pod: indices for pod, indices in parts.items() if pod not in self._killed}
        self._done[number] = []
        if alive:
            self._pending[number] = set(alive)
        for pod, indices in alive.items():
            self._targets.order(pod, {"do": injection.do, "devices": indices, "number": number, **injection.details})

    def _send_churn(self, now_s: float) -> None:
        """Consecutive events of one pod and kind go out together."""
        orders: dict[int, list[tuple[str, list[int]]]] = {}
        while self._next_churn is not None and self._next_churn.at_s <= now_s:
            event, self._next_churn = self._next_churn, next(self._churn, None)
            pod, index = self._targets.place(event.device)
            if pod in self._killed:
                self._skipped += 1
                continue
            do = self._how if event.what == LEAVE else "return"
            mine = orders.setdefault(pod, [])
            if not mine or mine[-1][0] != do:
                mine.append((do, []))
            mine[-1][1].append(index)
        for pod, batches in orders.items():
            for do, indices in batches:
                self._targets.order(pod, {"do": do, "devices": indices})
                self._pending_churn[pod] += 1

    def _reported(self, pod: int, report: Mapping[str, Any]) -> None:
        at_s = (report["at_ns"] - self._begun_ns) / 1e9
        devices = [self._targets.device(pod, index) for index in report["devices"]]
        number = report.get("number")
        if number is None:
            self._pending_churn[pod] -= 1
            what = JOIN if report["do"] == "return" else LEAVE
            self._churned += [Event(at_s, device, what) for device in devices]
            self._tell(at_s, None, report["do"], devices, [pod])
            return
        if number in self._pending:
            self._pending[number].discard(pod)
            if not self._pending[number]:
                del self._pending[number]
        injection = self._faults[number]
        if devices:
            self._done[number].append((at_s, 1 if injection.do == "corrupt" else len(devices)))
            self._tell(at_s, injection.at_s, injection.do, devices, [pod], **injection.details)

    def _tell(
        self, at_s: float, scheduled_s: float | None, do: str, devices: list[int], pods: list[int], **details: Any
    ) -> None:
        cause = {"cause": "churn"} if scheduled_s is None else {"cause": "fault", "scheduled_s": scheduled_s}
        self._note("injected", do=do, run_s=round(at_s, 6), devices=devices, pods=pods, **cause, **details)

    # ---- audit

    def audit(self) -> dict[str, Any]:
        """What was done against what was requested, up to the last tick; times from the start of the first step."""
        told: dict[str, Any] = {}
        if self._faults:
            listed = []
            for number, injection in enumerate(self._faults[: self._sent]):
                done = self._done[number]
                listed.append(
                    {
                        "at_s": injection.at_s,
                        "do": injection.do,
                        "asked": len(injection.pods or injection.devices),
                        "done": sum(count for _, count in done),
                        "delay_s": max((at_s - injection.at_s for at_s, _ in done), default=None),
                        **injection.details,
                    }
                )
            told["faults"] = {
                "scheduled": self._sent,
                "injected": sum(entry["done"] > 0 for entry in listed),
                "after_the_end": len(self._faults) - self._sent,  # the run was over before they were due
                "worst_delay_s": max((e["delay_s"] for e in listed if e["delay_s"] is not None), default=0.0),
                "list": listed,
            }
        if self._schedule is not None:
            churn = audit(self._churned, self._schedule, until_s=self._looked_s)
            told["churn"] = churn.as_dict() | {"pod_killed": self._skipped, "notes": list(self._schedule.notes)}
        return told


@contextmanager
def injecting(injector: Injector, clock: Clock | None = None) -> Iterator[None]:
    """A thread that ticks until the block ends and then waits briefly for the last reports. An error of the thread is
    in `injector.error` at once, and is raised at the end."""
    time_ = clock or WallClock()
    stop = threading.Event()
    begun_ns = time_.now_ns()
    injector.begin(begun_ns)

    def now_s() -> float:
        return (time_.now_ns() - begun_ns) / 1e9

    def wait_s() -> float:
        return time_.wait_s(begun_ns + int(1e9 * injector.next_s)) if injector.next_s < float("inf") else TICK_S

    def work() -> None:
        try:
            while not stop.wait(min(TICK_S, wait_s())):
                injector.tick(now_s())
            deadline_s = time.monotonic() + DRAIN_S
            while injector.waiting and time.monotonic() < deadline_s:
                injector.collect(TICK_S)
        except BaseException as error:
            injector.error = error

    if injector.next_s <= 0:  # faults due at the start are done before the first block is sent
        injector.tick(0.0)
        deadline_s = time.monotonic() + DRAIN_S
        while injector.waiting and time.monotonic() < deadline_s:
            injector.collect(TICK_S)
    thread = threading.Thread(target=work, name="injector", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if injector.error is not None:
        raise injector.error


def describe(told: Mapping[str, Any]) -> str:
    """The audit in one line, for people."""
    parts = []
    if faults := told.get("faults"):
        later = f", {faults['after_the_end']} due after the end" if faults["after_the_end"] else ""
        parts.append(
            f"{faults['injected']} of {faults['scheduled']} faults injected{later}, "
            f"worst delay {1e3 * faults['worst_delay_s']:.0f} ms"
        )
    if churn := told.get("churn"):
        parts.append(
            f"{churn['scheduled'] - len(churn['missing'])} of {churn['scheduled']} departures and returns injected, "
            f"worst delay {1e3 * churn['worst_delay_s']:.0f} ms"
        )
    return "; ".join(parts)
