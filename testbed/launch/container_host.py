"""Where the containers of a run live: an engine, an image, bridges. Ready before the server listens, removed at the
end.

First, one container checks whether it reaches the server, and how fast a core is there.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from agent.identity.keys import Curve
from agent.protocol.errors import UserError
from emulator.containers.engine import IMAGE, Bridge, DockerEngine, EngineError, Spec, Stream, missing_image
from emulator.containers.subnets import asked_subnet, bridges_for, split
from testbed.launch import image as images
from testbed.launch.owners import this_process
from testbed.launch.pods import line_of, told_keys
from testbed.runs import interrupts
from testbed.runs.scenario import Launch

LOOK_S = 20.0  # limit for the container that checks


@dataclass(frozen=True, slots=True)
class Inside:
    """What a container measures where it runs (`emulator.containers.inside`)."""

    core_flops: float
    clock_offset_ns: int  # add to the monotonic clock there to get this machine's


class ContainerHost:
    def __init__(self, asked: Launch, pods: int) -> None:
        self._asked = asked
        self.image = asked.image or IMAGE
        self.engine = DockerEngine(secrets.token_hex(4), this_process())
        self.bridges: list[Bridge] = []
        try:
            self._check_image()
            if asked.server_address is None and not self.engine.local:
                raise UserError(
                    f"the Docker engine at {self.engine.address} is not on this machine: set launch.server_address to "
                    "an address of this machine that its containers reach"
                )
            wanted: Sequence[IPv4Network | None] = [None] * bridges_for(pods)
            if asked.subnet is not None:
                wanted = split(asked_subnet(asked.subnet, pods, self.engine.used_ranges()), len(wanted))
            for number, subnet in enumerate(wanted):
                self.bridges.append(self.engine.make_bridge(number, subnet))
        except BaseException:
            self.close()
            raise

    def _check_image(self) -> None:
        made_from = self.engine.image_sources(self.image)
        if made_from is None:
            raise UserError(missing_image(self.image, self.engine.address))
        if made_from and made_from != images.digest():
            raise UserError(f'the image "{self.image}" was made from other sources: `make image` makes it anew')

    def server_host(self) -> str:
        """The address that the server must listen on. Containers of all bridges reach the first bridge's gateway,
        because it is an address of their host."""
        if self._asked.server_address is not None:
            return "0.0.0.0"
        gateway = str(self.bridges[0].gateway)
        try:
            with socket.socket() as probe:
                probe.bind((gateway, 0))
        except OSError:
            raise UserError(
                f"the bridge's address {gateway} is not one of this machine: the engine at {self.engine.address} runs "
                "elsewhere, or in a virtual machine; set launch.server_address to an address of this machine that its "
                "containers reach (Docker Desktop: host.docker.internal)"
            ) from None
        return gateway

    def server_at(self, address: str) -> str:
        """How containers reach the server that listens at this address."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if self._asked.server_address is not None:
            host = self._asked.server_address
        elif host == "0.0.0.0":
            host = str(self.bridges[0].gateway)
        return f"tcp://{host}:{port}"

    def look_inside(self, address: str, curve: Curve | None = None) -> Inside:
        """Check with one container first: better one failure than hundreds."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        name = f"cleave-{self.engine.run}-look"
        container, stream = self.engine.start(
            Spec(name, ["emulator.containers.inside", host, port], self.bridges[0].id), self.image
        )
        try:
            found = _answer(stream, line_of(told_keys(curve)))
            if found["unreachable"]:
                raise UserError(
                    f"containers do not reach the server at {address} ({found['unreachable']}): open this host's "
                    f"firewall for the bridge {self.bridges[0].subnet}, or set launch.server_address to an address of "
                    "this machine that they reach"
                )
            offsets = []
            for _ in range(9 if self._asked.server_address is not None else 0):  # one host, one clock
                asked_ns = time.monotonic_ns()
                there_ns = _answer(stream, b"?\n")["monotonic_ns"]
                answered_ns = time.monotonic_ns()
                offsets.append((answered_ns - asked_ns, (asked_ns + answered_ns) // 2 - there_ns))
            return Inside(float(found["core_flops"]), min(offsets, default=(0, 0))[1])
        finally:
            stream.close()
            self.engine.do("remove a container", container.remove, force=True)

    def close(self) -> None:
        try:
            self.engine.remove_containers(self.engine.run)
            self.engine.remove_networks(self.engine.run)
        finally:
            self.engine.close()

    def __enter__(self) -> ContainerHost:
        return self

    def __exit__(self, *_: object) -> None:
        with interrupts.held():
            self.close()


def _answer(stream: Stream, question: bytes) -> dict[str, Any]:
    """Send the question; return the next line of the container's output."""
    if question:
        stream.send(question)
    said, deadline, poll = b"", time.monotonic() + LOOK_S, select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    while b"\n" not in said:
        poll.poll(1000)
        received = stream.receive()
        if received is None or time.monotonic() > deadline:
            raise EngineError(
                f"the container that checks the host said nothing: {stream.errors.decode(errors='replace').strip()}"
            )
        said += received
    told: dict[str, Any] = json.loads(said)
    return told
