"""Kernel links for the containers of a run: which devices are behind which interface, and how the kernel is configured.

The device of a one-device container has the container's own address. A pod of many devices gets its own address range,
with one address per device. A short-lived container that sees the engine's interfaces and processes, and may change
them, does the work (`emulator.links.shaping`). So links also work with an engine on another machine, and for users who
may use Docker without being root.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from agent.protocol.errors import Failure, UserError
from emulator.containers.engine import Spec, Stream
from emulator.containers.subnets import free_subnets, split
from emulator.links.shaping_plan import PREFIX_TAKEN, PodLinks, addresses, room
from emulator.model.fleet import Fleet
from emulator.model.link import NO_TRACE, LinkSpec, link_specs, links_to_json, plain_links
from testbed.launch.container_host import ContainerHost

INTERFACE = "eth*"  # an engine names a container's first interface eth0, and a reattached interface eth1


class AddressesTaken(UserError):
    """The addresses are already in use on the engine's machine."""


@dataclass(frozen=True, slots=True)
class End:
    """A running container."""

    pid: int  # on the engine's machine
    address: str


class KernelLinks:
    def __init__(self, container_host: ContainerHost) -> None:
        """Raises at once if the engine's kernel cannot shape links."""
        self._container_host = container_host
        self._asked = 0
        self._pods: list[PodLinks] = []
        self._traces: list[Any] = []
        self._following: dict[str, tuple[int, float]] = {}  # address -> its trace, and its initial offset in the trace
        self._followed_since = 0.0
        self._changing = threading.Lock()
        self._follower: tuple[Any, Stream] | None = None  # the container that changes rates
        self.in_user_space: tuple[str, ...] = ()
        self.seconds = 0.0  # time taken by shaping, including the start of its container
        self.netem = bool(self._ask("apply", [])["netem"])  # no links yet: only checks what the kernel can do

    def shape(self, fleet: Fleet, ends: Sequence[End]) -> list[dict[str, Any]]:
        """Shape the links of all devices, which are dealt out to these containers; returns what each pod needs to know
        about its own links."""
        begun = time.monotonic()
        specs = link_specs(fleet.profiles, fleet.links or plain_links(len(fleet)))
        if len(ends) < len(fleet):
            applied = self._apply_behind_prefixes(specs, ends)
        else:
            self._pods = [
                PodLinks(INTERFACE, ((end.address, spec),), end.pid) for end, spec in zip(ends, specs, strict=True)
            ]
            applied = self._ask("apply", self._pods)
        told: list[dict[str, Any]] = [
            {"addresses": [address for address, _ in pod.devices], "latency_in_pod": not self.netem}
            for pod in self._pods
        ]
        self.in_user_space = tuple(applied["in_user_space"])
        if fleet.links is not None and fleet.links.traces:
            self._traces = links_to_json(fleet.links)["traces"]
            for device in np.flatnonzero(fleet.links.table["trace"] != NO_TRACE).tolist():
                row, pod = fleet.links.table[device], device % len(ends)
                address = told[pod]["addresses"][device // len(ends)]
                self._following[address] = (int(row["trace"]), float(row["offset_s"]))
            self._follow()
        self.seconds = time.monotonic() - begun
        return told

    def _apply_behind_prefixes(self, specs: Sequence[LinkSpec], ends: Sequence[End]) -> dict[str, Any]:
        """Pods of many devices: take address ranges that look free, and others if the kernel reports a conflict. The
        pods share one range if it is large enough."""
        free = free_subnets(self._container_host.engine.used_ranges())
        most = -(-len(specs) // len(ends))
        while (first := next(free, None)) is not None:
            prefixes = split(first, len(ends))
            if most > room(str(prefixes[0])):
                prefixes = [first, *islice(free, len(ends) - 1)]
                if len(prefixes) < len(ends):
                    break
            self._pods = []
            for number, (end, prefix) in enumerate(zip(ends, prefixes, strict=True)):
                mine = specs[number :: len(ends)]
                devices = tuple(zip(addresses(str(prefix), len(mine)), mine, strict=True))
                self._pods.append(PodLinks(INTERFACE, devices, end.pid, str(prefix)))
            with suppress(AddressesTaken):
                return self._ask("apply", self._pods)
        raise UserError('there is no free range of addresses for the devices: use links.kind = "model"')

    def _follow(self) -> None:
        """Changing rates: start a container that changes them until its input ends."""
        passed_s = time.monotonic() - self._followed_since if self._followed_since else 0.0
        self._followed_since = self._followed_since or time.monotonic()
        following = {address: (trace, offset_s + passed_s) for address, (trace, offset_s) in self._following.items()}
        told = {"pods": [pod.to_json() for pod in self._pods], "traces": self._traces, "following": following}
        container, stream = self._container_host.engine.start(
            self._spec("emulator.links.follow"), self._container_host.image
        )
        stream.send_all(json.dumps(told).encode() + b"\n")
        self._follower = container, stream  # last: `check` must not read the stream while the traces are being sent

    def check(self) -> None:
        """Raise if rates have stopped following their traces. Checks nothing while the injector replaces the
        follower."""
        if self._changing.acquire(blocking=False):
            try:
                if self._follower is not None and self._follower[1].receive() is None:
                    said = self._follower[1].errors.decode(errors="replace").strip().removeprefix("link follow: ")
                    raise Failure(f"links follow their traces no more: {said or 'it ended'}")
            finally:
                self._changing.release()

    def again(self, pod: int) -> None:
        """Shape the links of a container with a new interface again."""
        with self._changing:
            self.close()
            self._ask("clear", [self._pods[pod]])
            self._ask("apply", [self._pods[pod]])
            if self._following:
                self._follow()

    def close(self) -> None:
        """Stop changing rates; the links end with their containers."""
        if self._follower is not None:
            self._follower[1].close()
            self._container_host.engine.do("remove a container", self._follower[0].remove, force=True)
            self._follower = None

    def told(self) -> str:
        """Text for the display and the summary."""
        if not self.in_user_space:
            return "shaped by the kernel"
        return f"rates shaped by the kernel, {', '.join(self.in_user_space)} held in user space (no netem there)"

    def _spec(self, *command: str) -> Spec:
        self._asked += 1
        return Spec(f"cleave-{self._container_host.engine.run}-links-{self._asked}", command, "host", shapes_links=True)

    def _ask(self, what: str, pods: Sequence[PodLinks]) -> dict[str, Any]:
        engine = self._container_host.engine
        spec = self._spec("emulator.links.shaping", what)
        question = json.dumps({"pods": [pod.to_json() for pod in pods]}).encode()
        code, output, errors = engine.ask(spec, self._container_host.image, question)
        said = errors.strip().removeprefix("shaping: ")
        if code == PREFIX_TAKEN:
            raise AddressesTaken(said)
        if code == 2:
            raise UserError(said)
        if code != 0:
            raise Failure(f"links could not be shaped (exit code {code}): {said[-500:]}")
        answer: dict[str, Any] = json.loads(output)
        return answer
