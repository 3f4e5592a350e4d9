"""Kernel links for the containers of a run: which devices are behind which interface, and who tells the kernel.

A one-device container's device has the container's own address. A pod of many gets a range of addresses of its own,
one for each device. The work itself (`emulator.shaping`) is done by a short-lived container that sees the engine's
interfaces and processes and may change them: so it also works on another machine, and for users who may use Docker
without being root.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from agent.errors import Failure, UserError
from emulator.containers import Spec
from emulator.fleet import Fleet
from emulator.link import link_specs, plain_links
from emulator.shaping_plan import PodLinks, addresses
from emulator.subnets import free_subnets, split
from testbed.ground import Ground

INTERFACE = "eth0"  # what an engine calls a container's first


@dataclass(frozen=True, slots=True)
class End:
    """A container that runs."""

    pid: int  # on the engine's machine
    address: str


class KernelLinks:
    def __init__(self, ground: Ground) -> None:
        """Says at once if the engine's kernel cannot do it."""
        self._ground = ground
        self._asked = 0
        self._pods: list[PodLinks] = []
        self.in_user_space: tuple[str, ...] = ()
        self.seconds = 0.0  # that shaping took, with the start of its container
        self.netem = bool(self._ask("apply", [])["netem"])  # no links yet: only whether it could

    def shape(self, fleet: Fleet, ends: Sequence[End]) -> list[dict[str, Any]]:
        """The links of all devices, which are dealt to these containers; what each pod has to know of its own."""
        begun = time.monotonic()
        specs = link_specs(fleet.profiles, fleet.links or plain_links(len(fleet)))
        prefixes: Sequence[IPv4Network | None] = [None] * len(ends)
        if len(ends) < len(fleet):
            free = next(free_subnets(self._ground.engine.used_ranges()), None)
            if free is None:
                raise UserError('there is no free range of addresses for the devices: use links.kind = "model"')
            prefixes = split(free, len(ends))
        told = []
        for number, (end, prefix) in enumerate(zip(ends, prefixes, strict=True)):
            mine = specs[number :: len(ends)]
            own = [end.address] if prefix is None else addresses(str(prefix), len(mine))
            devices = tuple(zip(own, mine, strict=True))
            self._pods.append(PodLinks(INTERFACE, devices, end.pid, None if prefix is None else str(prefix)))
            told.append({"addresses": own, "latency_in_pod": not self.netem})
        applied = self._ask("apply", self._pods)
        self.in_user_space = tuple(applied["in_user_space"])
        self.seconds = time.monotonic() - begun
        return told

    def again(self, pod: int) -> None:
        """Of a container that has got a new interface."""
        self._ask("clear", [self._pods[pod]])
        self._ask("apply", [self._pods[pod]])

    def told(self) -> str:
        """For people, and for the summary."""
        if not self.in_user_space:
            return "shaped by the kernel"
        return f"rates shaped by the kernel, {', '.join(self.in_user_space)} held in user space (no netem there)"

    def _ask(self, what: str, pods: Sequence[PodLinks]) -> dict[str, Any]:
        engine = self._ground.engine
        self._asked += 1
        spec = Spec(f"cleave-{engine.run}-links-{self._asked}", ["emulator.shaping", what], "host", shapes_links=True)
        question = json.dumps({"pods": [pod.to_json() for pod in pods]}).encode()
        code, output, errors = engine.ask(spec, self._ground.image, question)
        if code == 2:
            raise UserError(errors.strip().removeprefix("shaping: "))
        if code != 0:
            raise Failure(f"links could not be shaped (exit code {code}): {errors.strip()[-500:]}")
        answer: dict[str, Any] = json.loads(output)
        return answer
