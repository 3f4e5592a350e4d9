"""The pods of a run as the testbed sees them: orders to them, reports from them, and which of them have died.

Pods that are processes (`testbed.launch.processes`) and pods that are containers (`testbed.launch.container_pods`) look
the same here: both are handles with an input, an output and an end. Orders (`emulator.pods.faults`) go to a pod's
standard input; its reports come from its standard output. Neither ever blocks: data that a pipe does not accept waits
here for the next call of `exchange`.

A pod that ends during the run is a loss, however it ended. `look_after` restarts it as often as the scenario allows
(`launch.restarts`), unless the scenario itself ended it.
"""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from agent.identity.keys import Curve
from agent.protocol.errors import Failure, UserError
from emulator.model.fleet import Fleet
from emulator.model.link import links_to_json


class LaunchError(Failure):
    """A pod did not start or died; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Death:
    """A pod that ended without the scenario asking for it."""

    pod: int
    devices: int  # number of its devices
    fate: str
    restarted: bool


class Handle(Protocol):
    """One started pod."""

    @property
    def pid(self) -> int | None:
        """Process id on this machine; None if the pod is on another machine."""
        ...

    @property
    def code(self) -> int | None:
        """The pod's exit code; None while it runs."""
        ...

    def fileno(self) -> int: ...
    def send(self, data: bytes) -> int:
        """Bytes accepted; BlockingIOError: none at present, BrokenPipeError: the pod has ended."""
        ...

    def receive(self) -> bytes | None:
        """Reports, b"" if there are none at present; None when no more will come."""
        ...

    def last_words(self) -> str: ...
    def fate(self) -> str:
        """How the pod ended, as far as is known."""
        ...

    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def disconnect(self) -> None: ...
    def reconnect(self) -> None: ...


def parts(
    fleet: Fleet,
    count: int,
    absent: Iterable[int],
    curve: Curve | None = None,
    pod_pass: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """The first message to each of `count` pods: its devices, dealt out so that every pod has the same mix, and the
    keys or pass that identify it to the server. No other process sees this line."""
    for pod in range(min(count, len(fleet))):
        yield part_of(fleet, pod, count, absent, curve, pod_pass)


def part_of(
    fleet: Fleet,
    pod: int,
    count: int,
    absent: Iterable[int],
    curve: Curve | None = None,
    pod_pass: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The first message to one of `count` pods."""
    mine, away = slice(pod, None, count), set(absent)
    devices = range(len(fleet))[mine]
    part = told_keys(curve, pod_pass) | {
        "profiles": fleet.profiles[mine].tolist(),
        "labels": fleet.labels[mine],
        "absent": [at for at, device in enumerate(devices) if device in away],
        "models": fleet.models.part(devices).as_json() if fleet.models else None,
    }
    if fleet.links is not None:
        part |= links_to_json(fleet.links.take(mine))
    return part


def told_keys(curve: Curve | None, pod_pass: Mapping[str, Any] | None = None) -> dict[str, Any]:
    keys = {} if curve is None else {"curve": {"server": curve.server, "secret": curve.keys.secret}}
    return keys | ({"pass": dict(pod_pass)} if pod_pass else {})


def line_of(part: Mapping[str, Any]) -> bytes:
    return json.dumps(part).encode() + b"\n"


class PodGroup:
    def __init__(self, fleet: Fleet, count: int, absent: Iterable[int] = (), restarts: int = 0) -> None:
        """`count`: pods that share the fleet's devices; `absent` devices are away at first. `restarts`: how often each
        pod may be restarted."""
        self.fleet = fleet
        self._count = count
        self._lock = threading.Lock()  # the injector exchanges while the watcher restarts pods
        self.deaths: list[Death] = []
        self._restarts_left = [restarts] * count
        self._away: set[int] = set(absent)  # devices of the fleet that are absent or were told to leave
        self._killed: set[int] = set()  # pods killed because the scenario asked for it
        self._exhausted: set[int] = set()  # pods told to exhaust their memory: the kernel will kill them
        self._given_up: set[int] = set()  # pods that have ended and are not restarted
        self._ended: set[int] = set()  # pods that will send no more reports
        self._outbox = [b""] * count
        self._inbox = [b""] * count

    @property
    def _handles(self) -> Sequence[Handle]:
        raise NotImplementedError

    def stop(self) -> None:
        """Pods end by themselves when the server says goodbye; terminate the rest."""
        raise NotImplementedError

    @property
    def links_told(self) -> str:
        """Description of the devices' links, for the summary."""
        return "modelled"

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def codes(self) -> list[int | None]:
        """Exit code of each pod, negative if a signal ended it; None while it runs."""
        return [handle.code for handle in self._handles]

    def check(self) -> list[str]:
        """Before all devices have joined: raise if a pod has ended by itself, because it would fail again. Restart a
        killed pod if allowed. Returns one line per ended pod."""
        for pod, handle in enumerate(self._handles):
            crashed = handle.code is not None and handle.code < 0 and self._restarts_left[pod]
            if pod not in self._killed and handle.code is not None and not crashed:
                raise LaunchError(f"a pod ended ({handle.fate()}): {handle.last_words().strip() or 'it said nothing'}")
        told = self.look_after()
        if self._given_up:
            raise LaunchError("a pod ended and could not be started again")
        return told

    def look_after(self) -> list[str]:
        """While the run goes on: a pod that has ended (SIGSEGV, kill -9, out of memory, an error) is lost like any
        device and does not end the run. Restart it if allowed. Returns one line per ended pod."""
        told = []
        for pod, handle in enumerate(self._handles):
            with self._lock:
                if pod in self._killed or pod in self._given_up or handle.code is None:
                    continue
                devices = [device for device in range(pod, len(self.fleet), self._count) if device not in self._away]
                fate, restarted, left = handle.fate(), False, self._restarts_left[pod]
                if pod in self._exhausted:
                    self._killed.add(pod)
                    told.append(f"pod {pod} was killed ({fate}): the run goes on without it")
                    continue
                if left:
                    self._restarts_left[pod] -= 1
                    self._outbox[pod] = self._inbox[pod] = b""  # they belonged to the ended process
                    restarted = self._start_again(pod)
                    self._ended.discard(pod)
                if not restarted:
                    self._given_up.add(pod)
            self.deaths.append(Death(pod, len(devices), fate, restarted))
            words = "".join(f"; it said: {line}" for line in handle.last_words().strip().splitlines()[-1:])
            then = "the run goes on without it"
            if restarted:
                then = f"it is started again with its devices (restarts left: {left - 1})"
            told.append(f"pod {pod} with {len(devices):,} devices ended ({fate}{words}): {then}")
        return told

    def _start_again(self, pod: int) -> bool:
        """Restart the pod with its devices that are not away; False if that is impossible."""
        return False

    # ---- faults

    def place(self, device: int) -> tuple[int, int]:
        """The pod of a device of the fleet, and its index there."""
        return device % self._count, device // self._count

    def device(self, pod: int, index: int) -> int:
        """The inverse of `place`."""
        return index * self._count + pod

    def order(self, pod: int, order: Mapping[str, Any]) -> None:
        """Queue an order for the next `exchange`."""
        named = {self.device(pod, index) for index in order.get("devices", ())}
        with self._lock:
            if order["do"] in ("leave", "vanish"):
                self._away |= named
            elif order["do"] == "return":
                self._away -= named
            elif order["do"] == "exhaust":
                self._exhausted.add(pod)
            self._outbox[pod] += line_of(order)

    def kill(self, pod: int) -> None:
        """kill -9, on purpose: the pod's devices are lost, it stays dead, and the run goes on."""
        with self._lock:
            self._killed.add(pod)
            self._outbox[pod] = b""
            self._handles[pod].kill()

    def pause(self, pod: int) -> None:
        """Stop the whole process: it neither answers nor says goodbye."""
        self._handles[pod].pause()

    def resume(self, pod: int) -> None:
        self._handles[pod].resume()

    def disconnect(self, pod: int) -> None:
        """Detach the pod from the network: it runs, but its messages go nowhere."""
        self._handles[pod].disconnect()

    def reconnect(self, pod: int) -> None:
        self._handles[pod].reconnect()

    def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]:
        """Send waiting orders, and return reports that are available or arrive within `wait_s`: (pod, report)."""
        with self._lock:
            handles = list(self._handles)
            for pod, handle in enumerate(handles):
                if self._outbox[pod]:
                    try:
                        sent = handle.send(self._outbox[pod])
                    except BlockingIOError:
                        continue  # the pipe is full; try again later
                    except BrokenPipeError:
                        sent = len(self._outbox[pod])  # the pod has ended; `look_after` handles it
                    self._outbox[pod] = self._outbox[pod][sent:]
            pods = {handle.fileno(): pod for pod, handle in enumerate(handles) if pod not in self._ended}
        reports: list[tuple[int, dict[str, Any]]] = []
        poll = select.poll()
        for descriptor in pods:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(int(1000 * wait_s)):
            pod = pods[descriptor]
            received = handles[pod].receive()
            with self._lock:
                if self._handles[pod] is not handles[pod]:
                    continue  # the pod was restarted meanwhile
                if received is None:
                    self._ended.add(pod)
                    continue
                *lines, self._inbox[pod] = (self._inbox[pod] + received).split(b"\n")
            reports += [(pod, json.loads(line)) for line in lines]
        return reports

    # ---- accounts

    @property
    def pids(self) -> list[int]:
        return [handle.pid for handle in self._handles if handle.pid is not None]

    def memory_bytes(self) -> int:
        total = 0
        for pid in self.pids:
            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def no_cable() -> UserError:
    return UserError('a process of this machine has no cable: "disconnect" needs launch.kind = "docker"')
