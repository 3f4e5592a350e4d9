"""Where a run takes place: a server with pods as processes or containers, or both in virtual time. The rest of the run
cannot tell the difference.

Each kind yields a Host whose devices have joined, and ends everything that it started, whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent.identity.keys import Curve, Keys
from agent.protocol.clock import Clock, ScaledClock
from agent.protocol.errors import Failure
from agent.protocol.units import parse_duration
from android.bundle import NAME
from android.serving import Serving
from emulator.model.fleet import Fleet
from ps.access.access_file import AccessFile, server_folder
from ps.access.listening import is_loopback, split_endpoint
from ps.graph.executor import Engine
from ps.planning.planner import Planner
from ps.transport.attendance import Attendance
from ps.transport.jobs import Totals
from ps.transport.records import Records
from ps.transport.server import HEARTBEAT_S, Server
from testbed.access.inviting import own_addresses
from testbed.access.releases import handed_out
from testbed.faults.inject import Injector, Targets, injecting
from testbed.launch.container_host import ContainerHost
from testbed.launch.container_pods import ContainerPods
from testbed.launch.pods import Death, PodGroup
from testbed.launch.processes import Pods
from testbed.runs import interrupts
from testbed.runs.collecting import not_collecting
from testbed.runs.display import Display
from testbed.runs.real_devices import wait_for_phones
from testbed.runs.scenario import Launch, Scenario
from testbed.runs.watchdog import Watchdog
from testbed.virtual.pods import VirtualPods
from testbed.virtual.server import VirtualServer

JOIN_TIMEOUT_S = 120.0  # without a further device joining; loading NumPy in many pods on a busy host took up to 20 s
HEARTBEATS_PER_S = 250  # each way: 1,000 per second took a third of a core, over server, pods and kernel


class RunError(Failure):
    """The run could not be completed; the text says why."""


class Accounts(Engine, Protocol):
    """What a run needs of a server: an engine that keeps records."""

    totals: Totals
    records: Records
    labels: list[str]
    suspended: dict[int, str]
    attendance: Attendance

    @property
    def devices(self) -> int: ...
    @property
    def profiles(self) -> NDArray[np.void]: ...
    @property
    def absent(self) -> list[int]: ...
    @property
    def late_blocks_helped(self) -> int: ...


class Launcher(Protocol):
    """How pods are started."""

    def pods_at(self, port: int) -> str | None:
        """Address where the server must listen for pods outside this machine; None if there are no such pods."""
        ...

    def start(self, place: Place, server: Server, scale: float, display: Display) -> PodGroup:
        """Start pods for this server, on a clock of this scale."""
        ...


class Hosted(Targets, Protocol):
    """What a run needs of its pods."""

    @property
    def pids(self) -> list[int]: ...
    @property
    def deaths(self) -> list[Death]:
        """Pods that ended without the scenario asking for it."""
        ...

    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """What a run is to host."""

    scenario: Scenario
    fleet: Fleet
    pod_count: int
    absent: list[int]  # devices that are away at the start
    planner: Planner


@dataclass(frozen=True, slots=True)
class Host:
    server: Accounts
    pods: Hosted
    clock: Clock
    injecting: Callable[[Injector], AbstractContextManager[None]]
    fleet: Fleet
    joined_s: float  # real seconds from the start of the first pod until all had joined
    links: str = "modelled"  # for the summary
    watch: Watchdog | None = None  # None in virtual time, where nothing can die


Note = Callable[..., None]  # an event and its fields


class OnThisMachine:
    """Pods are processes next to the server's."""

    def pods_at(self, port: int) -> str | None:
        return None

    def start(self, place: Place, server: Server, scale: float, display: Display) -> PodGroup:
        asked = place.scenario
        return Pods(
            place.fleet,
            place.pod_count,
            server.address,
            asked.links.kind,
            place.absent,
            scale,
            pod_pass=server.pod_pass,
            restarts=asked.launch.restarts,
        )


class InContainers:
    """Pods are containers of a Docker engine. Their devices join from the containers' own addresses, encrypted, with a
    key that the server trusts for this run."""

    def __init__(self, container_host: ContainerHost) -> None:
        self._container_host = container_host

    def pods_at(self, port: int) -> str | None:
        return f"tcp://{self._container_host.server_host()}:{port}"

    def start(self, place: Place, server: Server, scale: float, display: Display) -> PodGroup:
        count, keys = place.pod_count, Keys.new()
        server.trust(keys.public, "containers of this run", max(2, len(place.fleet)))  # with 1 a device could not move
        address, links = self._container_host.server_at(server.unlisted_addresses[0]), place.scenario.links.kind
        display.say(f"containers join at {address}, encrypted")
        curve = Curve(server.public_key, keys)
        pods = ContainerPods(self._container_host, place.fleet, count, address, links, place.absent, scale, curve)
        try:
            with display.phase(
                f"{count:,} containers start", lambda: pods.started / count, lambda: f"{pods.started:,} of {count:,}"
            ):
                pods.start()
        except BaseException:
            pods.stop()
            raise
        display.say(f"{count:,} containers started in {pods.start_s:.1f} s{pods.limits_told()}")
        if pods.links is not None:
            display.say(f"{len(place.fleet):,} links, up and down, in {pods.links.seconds:.1f} s: {pods.links_told}")
        return pods


@contextmanager
def launcher(asked: Launch, pods: int) -> Iterator[Launcher]:
    """Prepare what the scenario's pods need to start; remove it afterwards."""
    if asked.kind == "processes":
        yield OnThisMachine()
        return
    with ContainerHost(asked, pods) as container_host:
        yield InContainers(container_host)


@contextmanager
def on_pods(
    place: Place, server: Server, clock: ScaledClock, display: Display, note: Note, launch: Launcher
) -> Iterator[Host]:
    """The server in this process and pods outside it, on the same clock."""
    expected, wanted = len(place.fleet) - len(place.absent), place.scenario.fleet

    def notice(text: str) -> None:
        display.say(text)
        note("notice", text=text)

    server.notice, server.note = notice, note
    server.start()
    display.say(f"server at {server.address}; another device may join: python -m agent --ps {server.address}")
    for address in server.public_addresses:
        display.say(f"invited devices may join at {address}, encrypted: cleave invite")
    note("server", address=server.address)
    begun = time.monotonic()
    try:
        pods = launch.start(place, server, clock.scale, display)
    except BaseException:
        server.stop()
        raise
    watch = Watchdog(server, parse_duration(place.scenario.training.wait_for_devices), notice)
    # the watchdog ends last: pods that it restarted end with its thread
    with watch, _ended(pods), serving_files(place.scenario, server, display):
        try:
            with (
                not_collecting(),
                display.phase(
                    f"{expected:,} devices join",
                    lambda: _emulated(server) / max(1, expected),
                    lambda: f"{_emulated(server):,} of {expected:,}",
                ),
            ):
                _wait_for_devices(server, pods, expected)
            joined_s = time.monotonic() - begun
            display.say(f"{expected:,} devices joined in {joined_s:.1f} s")
            if wanted.phones:
                wait_for_phones(server, wanted.phones, parse_duration(wanted.phones_wait), display)
            note("joined", devices=server.devices)
            watch.begin(pods.look_after)
            told = pods.links_told
            yield Host(
                server, pods, clock, lambda injector: injecting(injector, clock), place.fleet, joined_s, told, watch
            )
        finally:
            watch.rest()
            with interrupts.held():
                server.stop()


@contextmanager
def _ended(pods: PodGroup) -> Iterator[None]:
    try:
        yield
    finally:
        with interrupts.held():
            pods.stop()


@contextmanager
def serving_files(asked: Scenario, server: Server, display: Display) -> Iterator[None]:
    """If the scenario asks for it, serve what phones install and, if signed, the update for outdated agents."""
    port = asked.server.files
    if not port:
        yield
        return
    here = (own_addresses() or ["127.0.0.1"])[0]
    local = not asked.server.listen or is_loopback(split_endpoint(asked.server.listen)[0])
    url = f"http://{'127.0.0.1' if local else here}:{port}"
    given_out = handed_out(server_folder())
    with Serving("127.0.0.1" if local else "0.0.0.0", port, url, given_out.bundle, given_out.release) as serving:
        if given_out.release is not None:  # unsigned bundles are not offered as updates
            server.bundle = (f"{serving.url}/{NAME}", serving.bundle.sha256)
        display.say(f"phones fetch the agent at {serving.url}: cleave phones invite --port {port}")
        yield


def _wait_for_devices(server: Server, pods: PodGroup, count: int) -> None:
    deadline, most = time.monotonic() + JOIN_TIMEOUT_S, 0
    while _emulated(server) < count:
        server.wait_for_devices(count + len(server.attendance.present), 0.25)
        if _emulated(server) > most:
            deadline, most = time.monotonic() + JOIN_TIMEOUT_S, _emulated(server)
        if server.error is not None:
            raise RunError(f"the server has stopped: {server.error}")
        interrupts.check()
        for text in pods.check():
            server.notice(text)
        if time.monotonic() > deadline:
            raise RunError(f"{_emulated(server):,} of {count:,} devices joined, and for {JOIN_TIMEOUT_S:.0f} s no more")


def _emulated(server: Server) -> int:
    return server.devices - len(server.attendance.present)


@contextmanager
def in_virtual_time(place: Place, server: VirtualServer, display: Display, note: Note) -> Iterator[Host]:
    """No sockets, no processes, no waiting."""

    def notice(text: str) -> None:
        display.say(text)
        note("notice", text=text)

    server.notice = notice
    display.say(f"{server.devices:,} devices in virtual time: no waiting, and the server's own work takes no time")
    note("server", address="")
    note("joined", devices=server.devices)
    yield Host(server, VirtualPods(server, place.pod_count), server.clock, server.injecting, place.fleet, 0.0)


def real_server(place: Place, clock: ScaledClock, launch: Launcher) -> Server:
    """A listening server, or an error that says why it cannot listen."""
    asked = place.scenario
    connections = len(place.fleet) if asked.links.kind == "kernel" else place.pod_count
    listen = [asked.server.listen] if asked.server.listen else []
    pods_at = launch.pods_at(asked.server.port)
    return Server(
        asked.server.host,
        asked.server.port if pods_at is None else 0,
        run=asked.name,
        heartbeat_s=max(HEARTBEAT_S, connections / HEARTBEATS_PER_S),
        planner=place.planner,
        clock=clock,
        listen=listen,
        unlisted=[] if pods_at is None else [pods_at],
        access=AccessFile(server_folder()) if listen or pods_at else None,
        remember=AccessFile(server_folder(), keys=False).impatient(),
    )


def virtual_server(place: Place) -> VirtualServer:
    arithmetic = place.scenario.clock.arithmetic
    fleet = place.fleet
    return VirtualServer(
        fleet.profiles,
        fleet.labels,
        place.planner,
        place.absent,
        arithmetic,
        links=fleet.links,
        models=fleet.models,
        wait_s=parse_duration(place.scenario.training.wait_for_devices),
    )
