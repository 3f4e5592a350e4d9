"""Pods as containers on the run's host, one container per pod, all removed when the run is over.

A pod of one device is limited to the device's memory (`emulator.containers.allotments`), and its arithmetic to the
device's processor time (`emulator.containers.throttle`). A pod of many devices has no limits: their times are modelled.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import psutil

from agent.identity.keys import Curve
from agent.protocol.errors import Failure, UserError
from emulator.containers.allotments import Allotment, Quota, allotment
from emulator.containers.engine import THREADS, Bridge, DockerEngine, EngineError, Spec, Stream
from emulator.model.fleet import Fleet
from testbed.launch.container_host import ContainerHost
from testbed.launch.kernel_links import End, KernelLinks
from testbed.launch.pods import PodGroup, line_of, parts

GOODBYE_S = 3.0  # time for pods to end by themselves


class PodContainer:
    """A handle (`testbed.launch.pods`) for a container."""

    def __init__(self, engine: DockerEngine, container: Any, stream: Stream, bridge: Bridge) -> None:
        self._engine, self._container, self._stream, self._bridge = engine, container, stream, bridge
        self._lock = threading.Lock()  # the injector reads reports while the run checks whether the pod is alive
        self._unread = b""
        self._ended = False
        self._code: int | None = None
        self.out_of_memory = False  # known once the container has ended
        self.paused = False
        engine.do(f"look at {container.name}", container.reload)
        settings = container.attrs["NetworkSettings"]["Networks"]
        self.address = str(next(iter(settings.values()))["IPAddress"])
        self.engine_pid = int(container.attrs["State"]["Pid"])  # on the engine's machine

    @property
    def pid(self) -> int | None:
        """None unless the engine's processes run on this machine; a local socket alone does not prove that."""
        try:
            ours = self._engine.local and "emulator.pods.pod" in psutil.Process(self.engine_pid).cmdline()
        except psutil.Error:
            return None
        return self.engine_pid if ours else None

    def _take(self) -> None:
        received = self._stream.receive()
        if received is None:
            self._ended = True
        else:
            self._unread += received

    @property
    def code(self) -> int | None:
        with self._lock:
            if self._code is None:
                if not self._ended:
                    self._take()
                if self._ended:
                    name = self._container.name
                    self._code = int(self._engine.do(f"wait for {name}", self._container.wait)["StatusCode"])
                    self._engine.do(f"look at {name}", self._container.reload)
                    self.out_of_memory = bool(self._container.attrs["State"]["OOMKilled"])
        return self._code

    def fileno(self) -> int:
        return self._stream.fileno()

    def tell(self, first: bytes) -> None:
        """Send the line that the pod waits for, which may be long."""
        with contextlib.suppress(ConnectionError):  # the pod has ended; the next check reports it
            self._stream.send_all(first)

    def send(self, data: bytes) -> int:
        return self._stream.send(data)

    def receive(self) -> bytes | None:
        with self._lock:
            if not self._ended:
                self._take()
            unread, self._unread = self._unread, b""
            return None if self._ended and not unread else unread

    def last_words(self) -> str:
        return self._stream.errors.decode(errors="replace")

    def fate(self) -> str:
        return f"exit code {self.code}, " + ("out of memory" if self.out_of_memory else "not by us")

    def kill(self) -> None:
        self._engine.do("kill a container", self._container.kill)

    def pause(self) -> None:
        self._engine.do("pause a container", self._container.pause)
        self.paused = True

    def resume(self) -> None:
        if self.paused and self.code is None:
            self._engine.do("unpause a container", self._container.unpause)
        self.paused = False

    def disconnect(self) -> None:
        self._engine.do(
            "disconnect a container",
            self._engine.client.api.disconnect_container_from_network,
            self._container.id,
            self._bridge.id,
            force=True,
        )

    def reconnect(self) -> None:
        """Attach the network again, with the old address, like a cable that is plugged in again."""
        self._engine.do(
            "connect a container",
            self._engine.client.api.connect_container_to_network,
            self._container.id,
            self._bridge.id,
            ipv4_address=self.address,
        )

    def limit(self, quota: Quota) -> None:
        """Change the quota for everything in the container."""
        limits = {"cpu_quota": quota.quota_us, "cpu_period": quota.period_us}
        self._engine.do("limit a container", self._container.update, **limits)

    def used_bytes(self) -> int:
        if self.code is not None:
            return 0
        told = self._engine.do("ask how much memory is used", self._container.stats, stream=False, one_shot=True)
        return int(told["memory_stats"].get("usage", 0))

    def close(self) -> None:
        self._stream.close()


class ContainerPods(PodGroup):
    def __init__(
        self,
        container_host: ContainerHost,
        fleet: Fleet,
        count: int,
        address: str,
        links: str,
        absent: Iterable[int],
        scale: float,
        curve: Curve,
        bare: bool = False,
    ) -> None:
        """`curve`: keys of the pods' connections, which the server must trust. `bare`: only quotas and links make
        blocks take time; no answer waits until it is due by the model."""
        super().__init__(fleet, count, absent)
        self._container_host = container_host
        self.started = 0
        self.start_s = 0.0
        inside = container_host.look_inside(address, curve)
        self.allotments: list[Allotment] | None = None
        self._undivided = ""  # why messages share the quotas, if they do
        options = ["--ps", address, "--links", links, "--scale", str(scale)]
        if count == len(fleet):
            self.allotments = allotments(fleet, inside.core_flops * scale, links != "off")
            options += ["--compute-thread"]
        if bare:
            options += ["--bare"]
        if inside.clock_offset_ns:
            options += ["--clock-offset-ns", str(inside.clock_offset_ns)]
        self._command = ["emulator.pods.pod", *options]
        self._parts = list(parts(fleet, count, self._away, curve))
        self._running: list[PodContainer | None] = [None] * len(self._parts)
        self.links = KernelLinks(container_host) if links == "kernel" else None

    def start(self) -> None:
        """Start all containers, several at a time; shape their links; then send each its part of the fleet, whose
        devices join."""
        begun = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            waiting = [pool.submit(self._start, pod) for pod in range(len(self._parts))]
            try:
                for future in waiting:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if self.allotments is not None:
            self._throttle(self.allotments)
        self.start_s = time.monotonic() - begun
        if self.links is not None:
            ends = [End(pod.engine_pid, pod.address) for pod in self._handles]
            for part, more in zip(self._parts, self.links.shape(self.fleet, ends), strict=True):
                part |= more
        for pod, part in zip(self._handles, self._parts, strict=True):
            pod.tell(line_of(part))

    def _start(self, pod: int) -> None:
        engine, bridges = self._container_host.engine, self._container_host.bridges
        bridge = bridges[pod % len(bridges)]
        spec = Spec(f"cleave-{engine.run}-{pod}", self._command, bridge.id, labels={"cleave.pod": str(pod)})
        if self.allotments is not None:
            limits, whole = self.allotments[pod], self.allotments[pod].container
            spec = replace(spec, quota_us=whole.quota_us, period_us=whole.period_us, memory_bytes=limits.memory_bytes)
        container, stream = engine.start(spec, self._container_host.image)
        self._running[pod] = PodContainer(engine, container, stream, bridge)
        self.started += 1

    def _throttle(self, allotments: Sequence[Allotment]) -> None:
        """Set quotas for the devices' arithmetic or, if the engine's machine does not allow that, for whole
        containers."""
        engine, handles = self._container_host.engine, self._handles
        pods = [
            {"process": pod.engine_pid} | asdict(limits.arithmetic)
            for pod, limits in zip(handles, allotments, strict=True)
        ]
        spec = Spec(f"cleave-{engine.run}-quotas", ["emulator.containers.throttle"], sets_quotas=True)
        try:
            code, _, errors = engine.ask(spec, self._container_host.image, json.dumps({"pods": pods}).encode())
            if code != 0:
                raise EngineError((errors.strip() or f"exit code {code}").removeprefix("throttle: ").splitlines()[-1])
        except EngineError as error:
            self._undivided = str(error)
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda pod, limits: pod.limit(limits.undivided), handles, allotments))

    def look_after(self) -> list[str]:
        """A container that has ended is not restarted: its address and its links are gone."""
        told = super().look_after()
        if self.links is not None:
            self.links.check()
        return told

    @property
    def links_told(self) -> str:
        return "modelled" if self.links is None else self.links.told()

    def reconnect(self, pod: int) -> None:
        """Also shape the new interface, which has none of the old one's limits. Does nothing if the container has died
        meanwhile."""
        handle = self._handles[pod]
        try:
            if handle.code is None:
                super().reconnect(pod)
                if self.links is not None:
                    self.links.again(pod)
        except (UserError, Failure):
            if handle.code is None:
                raise

    def limits_told(self) -> str:
        """The quotas as text."""
        if self.allotments is None:
            return ""
        given = [limits.undivided if self._undivided else limits.arithmetic for limits in self.allotments]
        shares = sorted(quota.share for quota in given)
        capped = sum(limits.capped for limits in self.allotments)
        told = f"; CPU quotas {shares[0]:.2f} to {shares[-1]:.2f} of a core"
        told += f", messages within them ({self._undivided})" if self._undivided else " for arithmetic"
        return told + (f", {capped} devices are faster than a core of that host" if capped else "")

    @property
    def _handles(self) -> Sequence[PodContainer]:
        return [pod for pod in self._running if pod is not None]

    def memory_bytes(self) -> int:
        if self.pids:
            return super().memory_bytes()
        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(PodContainer.used_bytes, self._handles))

    def stop(self) -> None:
        """Also removes containers that threads started after an error: everything with the run's label."""
        if self.links is not None:
            self.links.close()
        for pod in self._handles:
            pod.resume()  # a paused pod cannot react
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline and any(pod.code is None for pod in self._handles):
            time.sleep(0.05)
        for pod in self._handles:
            pod.close()
        self._container_host.engine.remove_containers(self._container_host.engine.run)


def allotments(fleet: Fleet, core_flops: float, modelled: bool) -> list[Allotment]:
    rates, budgets = fleet.profiles["flops"].tolist(), fleet.profiles["memory_bytes"].tolist()
    return [allotment(rate, budget, core_flops, modelled) for rate, budget in zip(rates, budgets, strict=True)]
