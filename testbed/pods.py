"""The pods of a run, seen by the testbed: orders to them, reports from them, and which of them have died.

The same for pods that are processes (`testbed.launch`) and pods that are containers (`testbed.container_pods`): both
are handles with an input, an output and an end. Orders (`emulator.faults`) go to a pod's standard input, its reports
come from its standard output. Neither ever blocks: what a pipe does not take waits here until `exchange` is called the
next time.
"""

from __future__ import annotations

import json
import select
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from agent.errors import Failure, UserError
from emulator.fleet import Fleet
from emulator.link import links_to_json


class LaunchError(Failure):
    """A pod did not start or died; the text has its last words."""


class Handle(Protocol):
    """One pod that was started."""

    @property
    def pid(self) -> int | None:
        """On this machine; None if it is on another one."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    @property
    def was_killed(self) -> bool:
        """Ended by kill -9, ours, somebody's, or the kernel's for want of memory."""
        ...

    def fileno(self) -> int: ...
    def send(self, data: bytes) -> int:
        """How much of it was taken; BlockingIOError: nothing at present, BrokenPipeError: it has ended."""
        ...

    def receive(self) -> bytes | None:
        """Reports, b"" if there are none at present; None when no more will come."""
        ...

    def last_words(self) -> str: ...
    def fate(self) -> str:
        """Of one that was killed: by what, as far as is known."""
        ...

    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def disconnect(self) -> None: ...
    def reconnect(self) -> None: ...


def parts(fleet: Fleet, count: int, absent: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What each of `count` pods is told first: its devices, dealt out so that every pod has the same mix. Whatever only
    the pods of this run may know, such as keys, is to be handed over here: nobody else sees this line."""
    labels, away = fleet.labels, set(absent)
    for pod in range(min(count, len(fleet))):
        mine = slice(pod, None, count)
        devices = range(len(fleet))[mine]
        part = {
            "profiles": fleet.profiles[mine].tolist(),
            "labels": labels[mine],
            "absent": [at for at, device in enumerate(devices) if device in away],
            "models": fleet.models.part(devices).as_json() if fleet.models else None,
        }
        if fleet.links is not None:
            part |= links_to_json(fleet.links.take(mine))
        yield part


def line_of(part: Mapping[str, Any]) -> bytes:
    return json.dumps(part).encode() + b"\n"


class PodGroup:
    def __init__(self, fleet: Fleet, count: int) -> None:
        """`count`: over which the fleet's devices are dealt."""
        self.fleet = fleet
        self._count = count
        self._killed: set[int] = set()
        self._ended: set[int] = set()  # will report no more
        self._outbox = [b""] * count
        self._inbox = [b""] * count

    @property
    def _handles(self) -> Sequence[Handle]:
        raise NotImplementedError

    def stop(self) -> None:
        """They end by themselves when the server says goodbye; those that do not are ended."""
        raise NotImplementedError

    @property
    def links_told(self) -> str:
        """What the devices' links are, for the summary."""
        return "modelled"

    def __len__(self) -> int:
        return len(self._handles)

    def check(self) -> None:
        """Raise if a pod has died while the run goes on, unless it was killed on purpose."""
        for pod, handle in enumerate(self._handles):
            if pod not in self._killed and handle.code is not None:
                raise LaunchError(
                    f"a pod ended with code {handle.code}: {handle.last_words().strip() or 'it said nothing'}"
                )

    def give_up_killed(self) -> list[str]:
        """A pod that somebody has killed (kill -9, or a host or container without memory) is lost like any device, and
        no reason to end the run. A line on each that was not killed here."""
        lost = [pod for pod, handle in enumerate(self._handles) if pod not in self._killed and handle.was_killed]
        self._killed.update(lost)
        return [f"pod {pod} was killed ({self._handles[pod].fate()}): the run goes on without it" for pod in lost]

    # ---- faults

    def place(self, device: int) -> tuple[int, int]:
        """Which pod a device of the fleet is in, and its index there."""
        return device % self._count, device // self._count

    def device(self, pod: int, index: int) -> int:
        """The other way round."""
        return index * self._count + pod

    def order(self, pod: int, order: Mapping[str, Any]) -> None:
        """Goes out with the next `exchange`."""
        self._outbox[pod] += line_of(order)

    def kill(self, pod: int) -> None:
        """kill -9, on purpose: its devices are lost, and the run goes on."""
        self._killed.add(pod)
        self._outbox[pod] = b""
        self._handles[pod].kill()

    def pause(self, pod: int) -> None:
        """Stopped as a whole: it neither answers nor says so."""
        self._handles[pod].pause()

    def resume(self, pod: int) -> None:
        self._handles[pod].resume()

    def disconnect(self, pod: int) -> None:
        """Its cable is pulled: it runs, and nobody hears it."""
        self._handles[pod].disconnect()

    def reconnect(self, pod: int) -> None:
        self._handles[pod].reconnect()

    def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]:
        """Send the orders that wait, and take the reports that are there, or come within that time: (pod, report)."""
        for pod, handle in enumerate(self._handles):
            if self._outbox[pod]:
                try:
                    sent = handle.send(self._outbox[pod])
                except BlockingIOError:
                    continue  # the pipe is full; later
                except BrokenPipeError:
                    sent = len(self._outbox[pod])  # it has ended; `check` will say so
                self._outbox[pod] = self._outbox[pod][sent:]
        reports: list[tuple[int, dict[str, Any]]] = []
        pods = {handle.fileno(): pod for pod, handle in enumerate(self._handles) if pod not in self._ended}
        poll = select.poll()
        for descriptor in pods:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(int(1000 * wait_s)):
            pod = pods[descriptor]
            received = self._handles[pod].receive()
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
