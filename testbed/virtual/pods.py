"""Pods in virtual time: carry out the injector's orders at once on a `testbed.virtual.server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.launch.pods import Death, no_cable
from testbed.virtual.server import VirtualServer


class VirtualPods:
    """The injector's targets (`testbed.faults.inject.Targets`): devices dealt to `count` pods, as in a real run."""

    def __init__(self, server: VirtualServer, count: int) -> None:
        self._server, self._count = server, count
        self._orders: list[tuple[int, Mapping[str, Any]]] = []
        self._paused: dict[int, list[int]] = {}  # pod -> devices that were present

    @property
    def deaths(self) -> list[Death]:
        """None: virtual pods die only if the scenario asks for it."""
        return []

    def memory_bytes(self) -> int:
        return 0

    @property
    def pids(self) -> list[int]:
        return []

    def place(self, device: int) -> tuple[int, int]:
        return device % self._count, device // self._count

    def device(self, pod: int, index: int) -> int:
        return index * self._count + pod

    def order(self, pod: int, order: Mapping[str, Any]) -> None:
        self._orders.append((pod, order))

    def kill(self, pod: int) -> None:
        self._server.lose(self._members(pod), "its connection is gone")

    def pause(self, pod: int) -> None:
        """Simplified: the pod's work in hand is lost even if it resumes before the server would notice its silence."""
        self._paused[pod] = self._members(pod)
        self._server.vanish(self._paused[pod])

    def resume(self, pod: int) -> None:
        self._server.join([device for device in self._paused.pop(pod, []) if not self._server.is_present(device)])

    def disconnect(self, pod: int) -> None:
        raise no_cable()

    def reconnect(self, pod: int) -> None:
        raise no_cable()

    def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]:
        """Carry out the waiting orders at once; returns their reports."""
        orders, self._orders = self._orders, []
        return [(pod, self._obeyed(pod, order)) for pod, order in orders]

    def _members(self, pod: int) -> list[int]:
        return [device for device in self._server.present if device % self._count == pod]

    def _obeyed(self, pod: int, order: Mapping[str, Any]) -> dict[str, Any]:
        """As `emulator.pods.pod`: an absent device can neither leave nor freeze, a present device cannot return."""
        server, do = self._server, order["do"]
        named = [self.device(pod, index) for index in dict.fromkeys(order["devices"])]
        there = [device for device in named if server.is_present(device)]
        match do:
            case "return":
                there = [device for device in named if not server.is_present(device)]
                server.join(there)
            case "leave" if there:
                server.leave(there)
            case "vanish" if there:
                server.vanish(there)
            case "freeze" if there:
                server.freeze(there, order["seconds"])
            case "slow":
                there = named  # also applies to absent devices, once they return
                server.slow(there, order["factor"])
            case "lie":
                there = named
                server.lie(there)
            case "mute":
                there = named
                server.mute(there)
            case "corrupt":
                there = self._members(pod)
                server.lose(there, "it sent what makes no sense")
                server.join(there)
        indices = [self.place(device)[1] for device in there]
        told = {"at_ns": server.clock.now_ns(), "do": do, "devices": indices}
        return told | ({"number": order["number"]} if "number" in order else {})
