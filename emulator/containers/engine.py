"""The containers of a run, through the Docker SDK: the engine, its networks, containers and their streams.

A thin shell. The engine is the one named by DOCKER_HOST, here or on another machine, or this host's own. Everything
made here carries the label `cleave.run` and its owner, so that it can be found and removed even if the process that
made it has died. An error from the engine becomes one line that says what to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from agent.protocol.errors import Failure, UserError
from emulator.containers.subnets import free_subnets, host_routes
from emulator.containers.throttle import GROUPS

IMAGE = "cleave-device"
RUN_LABEL, OWNER_LABEL, SOURCES_LABEL = "cleave.run", "cleave.owner", "cleave.sources"
SHAPES_LINKS = ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"]  # needed to change an interface of another container
THREADS = 8  # concurrent requests to the engine
TIMEOUT_S = 120.0  # per request: an engine that starts hundreds of containers is slow
STANDARD_ERROR = 2
HEADER = struct.Struct(">BxxxL")  # precedes every piece of a container's output: stream and size in bytes


class EngineError(Failure):
    """The Docker engine could not do what was asked; the message quotes its reply."""


class NoEngine(UserError):
    """Nothing answers at the engine's address."""


@dataclass(frozen=True, slots=True)
class Bridge:
    id: str
    name: str
    subnet: IPv4Network
    gateway: IPv4Address


@dataclass(frozen=True, slots=True)
class Spec:
    """One container."""

    name: str
    command: Sequence[str]
    network: str = "none"  # a bridge's id, or the engine's "host"
    quota_us: int = 0  # processor time per period; 0: no limit
    period_us: int = 0
    memory_bytes: int = 0  # 0: no limit
    shapes_links: bool = False  # may change interfaces, and sees all of the host's processes
    sets_quotas: bool = False  # may change control groups, and sees all of the host's processes
    labels: Mapping[str, str] = field(default_factory=dict)


class DockerEngine:
    """A connection to the engine, for one run or, without a run, for cleaning up."""

    def __init__(self, run: str = "", owner: str = "") -> None:
        import docker  # takes half a second, and only Docker users need it

        self.address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self.local = self.address.startswith("unix://")  # or forwarded from another machine
        if self.address.startswith("ssh://"):
            raise UserError(
                f"DOCKER_HOST is {self.address}; containers' streams do not work over ssh: forward the engine's socket "
                "(ssh -NL /tmp/engine.sock:/var/run/docker.sock HOST), set DOCKER_HOST=unix:///tmp/engine.sock and "
                "launch.server_address"
            )
        self.run, self._labels = run, {RUN_LABEL: run, OWNER_LABEL: owner}
        with self._explained("answer"):
            self.client: Any = docker.from_env(timeout=TIMEOUT_S, max_pool_size=2 * THREADS)
            self.client.ping()

    def close(self) -> None:
        self.client.close()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn errors of the engine and the network into one line that says what to do."""
        import docker.errors
        import requests.exceptions

        try:
            yield
        except docker.errors.APIError as error:
            said = str(error.explanation or error).strip()
            if "exchange full" in said or "no available IPv4 addresses" in said.replace("ipv4", "IPv4"):
                raise EngineError(f"a bridge is full ({said}): take fewer containers, set fleet.pods") from None
            raise EngineError(f"the Docker engine at {self.address} could not {what}: {said}") from None
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            causes = list(_causes(error))
            if any(isinstance(cause, PermissionError) for cause in causes):
                raise UserError(
                    f"you may not use the Docker engine at {self.address}: run as root, or join the group docker "
                    "(sudo usermod -aG docker $USER, then log in again)"
                ) from None
            last = causes[-1]
            raise NoEngine(
                f"no Docker engine answers at {self.address} ({getattr(last, 'strerror', None) or last}): start it, "
                'set DOCKER_HOST to another one, or use launch.kind = "processes"'
            ) from None

    # ---- the image

    def image_sources(self, image: str) -> str | None:
        """The sources digest the image was made from, "" if it has none; None if there is no such image."""
        import docker.errors

        with self._explained(f"look for the image {image}"):
            try:
                labels: Mapping[str, str] = self.client.images.get(image).labels
                return labels.get(SOURCES_LABEL, "")
            except docker.errors.ImageNotFound:
                return None

    # ---- networks

    def used_ranges(self) -> list[IPv4Network]:
        """Ranges of the engine's networks, and of this host's routes if the engine is local."""
        found = host_routes() if self.local else []
        with self._explained("list its networks"):
            for network in self.client.networks.list():
                for config in (network.attrs.get("IPAM") or {}).get("Config") or []:
                    with contextlib.suppress(ValueError, KeyError):  # IPv6
                        found.append(IPv4Network(config["Subnet"]))
        return found

    def make_bridge(self, number: int, subnet: IPv4Network | None) -> Bridge:
        """A bridge on this range, or on the first free one that the engine accepts."""
        import docker.errors
        from docker.types import IPAMConfig, IPAMPool

        candidates = [subnet] if subnet is not None else list(free_subnets(self.used_ranges()))
        refused = "there is no free address range left"
        for candidate in candidates:
            gateway = next(candidate.hosts())
            pool = IPAMPool(subnet=str(candidate), gateway=str(gateway))
            name = f"cleave-{self.run}-{number}"
            with self._explained("make a network"):
                try:
                    made = self.client.networks.create(
                        name, driver="bridge", ipam=IPAMConfig(pool_configs=[pool]), labels=self._labels
                    )
                    return Bridge(made.id, name, candidate, gateway)
                except docker.errors.APIError as error:
                    refused = str(error.explanation or error)
                    if not any(word in refused.lower() for word in ("overlap", "conflict", "in use")):
                        raise
        raise UserError(f"the engine has no room for a bridge ({refused}): name a free range in launch.subnet")

    # ---- containers

    def create(self, spec: Spec, image: str) -> Any:
        """A container, created but not started, so that a caller can attach before its first output."""
        import docker.errors
        from docker.types import LogConfig

        with self._explained(f"make the container {spec.name}"):
            api, looks_out = self.client.api, spec.shapes_links or spec.sets_quotas
            limits = api.create_host_config(
                network_mode=spec.network,
                pid_mode="host" if looks_out else None,
                cgroupns="host" if spec.sets_quotas else None,
                binds=[f"/sys/fs/cgroup:{GROUPS}"] if spec.sets_quotas else None,
                log_config=LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
                cpu_quota=spec.quota_us or None,
                cpu_period=spec.period_us or None,
                mem_limit=spec.memory_bytes or None,
                memswap_limit=spec.memory_bytes or None,  # memory and swap together: no swap
                read_only=True,
                cap_drop=["ALL"],
                cap_add=SHAPES_LINKS if spec.shapes_links else None,
                security_opt=["apparmor=unconfined" if spec.shapes_links else "no-new-privileges"],
            )
            if spec.shapes_links:  # TCP settings of a container's network are under /proc/sys
                limits |= {"ReadonlyPaths": [], "MaskedPaths": []}
            try:
                made = api.create_container(
                    image,
                    list(spec.command),
                    name=spec.name,
                    labels=self._labels | dict(spec.labels),
                    stdin_open=True,
                    host_config=limits,
                    user="0:0" if looks_out else None,
                )
                return self.client.containers.get(made["Id"])
            except docker.errors.ImageNotFound:
                raise UserError(missing_image(image, self.address)) from None

    def start(self, spec: Spec, image: str) -> tuple[Any, Stream]:
        """A running container, attached from before it started."""
        container = self.create(spec, image)
        with self._explained(f"attach to {container.name}"):
            params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            stream = Stream(container.attach_socket(params=params))
        try:
            with self._explained(f"start {spec.name}"):
                container.start()
        except BaseException:
            stream.close()
            raise
        return container, stream

    def ask(self, spec: Spec, image: str, question: bytes) -> tuple[int, bytes, str]:
        """Run a container with this input until it ends: exit code, output, errors. Removes the container."""
        container, stream = self.start(spec, image)
        try:
            stream.send_all(question, last=True)
            output = stream.receive_all(TIMEOUT_S)
            return int(self.do(f"wait for {spec.name}", container.wait)["StatusCode"]), output, stream.errors.decode()
        finally:
            stream.close()
            self._remove(container, force=True, v=True)

    def do(self, what: str, action: Any, *arguments: Any, **options: Any) -> Any:
        """Call the SDK, with its errors explained."""
        with self._explained(what):
            return action(*arguments, **options)

    # ---- the end

    def runs(self) -> dict[str, str]:
        """Runs that have left anything here, and their owners."""
        found: dict[str, str] = {}
        with self._explained("list what is ours"):
            made = self.client.containers.list(all=True, filters={"label": RUN_LABEL}, ignore_removed=True)
            for thing in (*made, *self.client.networks.list(filters={"label": RUN_LABEL})):
                labels = thing.labels if hasattr(thing, "labels") else thing.attrs["Labels"]
                found[labels[RUN_LABEL]] = labels.get(OWNER_LABEL, "")
        return found

    def remove_containers(self, run: str) -> int:
        """Remove all containers of a run, running or not; returns their number."""
        label = {"label": f"{RUN_LABEL}={run}"}
        with self._explained("list what is ours"):
            found = self.client.containers.list(all=True, filters=label, ignore_removed=True)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda container: self._remove(container, force=True, v=True), found))
        return len(found)

    def remove_networks(self, run: str) -> int:
        """Remove all networks of a run, to which no container may be connected; returns their number."""
        with self._explained("list what is ours"):
            found = self.client.networks.list(filters={"label": f"{RUN_LABEL}={run}"})
        for network in found:
            self._remove(network)
        return len(found)

    def _remove(self, thing: Any, **options: Any) -> None:
        """Remove a container or network; tolerates another process removing it at the same time."""
        import docker.errors

        with self._explained(f"remove {thing.name}"):
            try:
                thing.remove(**options)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                if error.status_code != 409 or "already in progress" not in str(error):
                    raise


class Stream:
    """Standard input and output of a container over one socket. Only methods with "all" in their name block."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw  # keeps the SDK's response alive
        self._socket: Any = getattr(raw, "_sock", raw)
        self._socket.setblocking(False)
        self._received = b""
        self.errors = b""  # the end of the container's standard error

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def send_all(self, data: bytes, last: bool = False) -> None:
        """`last`: no more input follows."""
        self._socket.settimeout(TIMEOUT_S)
        self._socket.sendall(data)
        if last:
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.setblocking(False)

    def receive_all(self, limit_s: float) -> bytes:
        """Until end of stream; EngineError after `limit_s` of silence."""
        poll, output = select.poll(), b""
        poll.register(self.fileno(), select.POLLIN)
        while (received := self.receive()) is not None:
            output += received
            if not received and not poll.poll(int(1000 * limit_s)):
                raise EngineError(f"a container has said nothing for {limit_s:.0f} s")
        return output

    def send(self, data: bytes) -> int:
        """Bytes accepted; BlockingIOError if none are accepted now, BrokenPipeError if the container has ended."""
        try:
            return int(self._socket.send(data))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ConnectionError:
            raise BrokenPipeError from None

    def receive(self) -> bytes | None:
        """New standard output, b"" if there is none; None at end of stream."""
        ended = False
        while True:
            try:
                read = self._socket.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError:
                read = b""
            if not read:
                ended = True
                break
            self._received += read
        output = b""
        while len(self._received) >= HEADER.size:
            stream, size = HEADER.unpack_from(self._received)
            if len(self._received) < HEADER.size + size:
                break
            piece = self._received[HEADER.size : HEADER.size + size]
            self._received = self._received[HEADER.size + size :]
            if stream == STANDARD_ERROR:
                self.errors = (self.errors + piece)[-4096:]
            else:
                output += piece
        return None if ended and not output else output

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._raw.close()
            self._socket.close()


def missing_image(image: str, address: str) -> str:
    return (
        f'the Docker engine at {address} has no image "{image}": make it with `make image`, or without any registry '
        "with `make image BASE=debootstrap`"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, including causes that a library has only put among the arguments."""
    seen: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        found += [one.__cause__, one.__context__, getattr(one, "reason", None)]
        found += [argument for argument in one.args if isinstance(argument, BaseException)]
