"""How a pod misbehaves on demand: its orders, which devices are present, and how it falsifies answers.

The testbed writes orders to the pod's standard input, one JSON object per line. The testbed decides when; a pod
carries out orders at once. Orders name devices by their index in the pod's part of the fleet. The server knows them by
another number, their index in the connection, which is never reused; `DeviceNumbers` maps one to the other.

    leave, return            orderly; a returning device is new to the server
    vanish                   silent from now on, like a dead phone or link whose connection seems open; the server is
                             told when it would have noticed by itself
    freeze  seconds          answers due in that time are sent when it ends; a freeze longer than the tolerated silence
                             is a vanish, with a return at the end
    slow    factor           computing and both directions of the link; the server is not told
    lie     how              wrong answers, see LIES
    mute                     stays connected but never answers a block, like a phone with a hung kernel; also after a
                             return
    corrupt                  sends the server one nonsense message, after which the server drops the connection
    exhaust                  takes memory until its container's limit kills it, without notice
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.compute.kernels import Array

LIES = ("noise", "element", "stale", "zeros", "nan", "signs", "bias")
FLIPPED = 0.05  # share of the cells, by "signs"
BIAS = 1e-5  # relative to the largest cell, by "bias"
ORDERS = ("leave", "vanish", "return", "freeze", "slow", "lie", "mute", "corrupt", "exhaust")
READ_BYTES = 1 << 16
HOARD_BYTES = 16 << 20
NONSENSE = b"\xff\x00nonsense, as ordered\x00"


class OrderError(ValueError):
    """An order that a pod cannot carry out; the message says why."""


@dataclass(frozen=True, slots=True)
class Order:
    do: str
    devices: tuple[int, ...] = ()  # indices in the pod's part of the fleet; none for `corrupt`
    seconds: float = 0.0
    factor: float = 1.0
    how: str = ""
    number: int | None = None  # returned with the report

    @classmethod
    def parse(cls, line: str, count: int) -> Order:
        """The order on this line, for a pod of `count` devices."""
        try:
            table = json.loads(line)
        except ValueError as error:
            raise OrderError(f"an order is not JSON: {error}") from None
        if not isinstance(table, dict) or table.get("do") not in ORDERS:
            raise OrderError(f"an order must be one of {', '.join(ORDERS)}, not {line[:80]}")
        try:
            order = cls(
                str(table["do"]),
                tuple(int(device) for device in table.get("devices", ())),
                float(table.get("seconds", 0.0)),
                float(table.get("factor", 1.0)),
                str(table.get("how", "")),
                table.get("number"),
            )
        except (TypeError, ValueError) as error:
            raise OrderError(f"an order does not add up: {error}; it was {line[:80]}") from None
        if not all(0 <= device < count for device in order.devices):
            raise OrderError(f"an order names a device beyond the {count} of this pod: {line[:80]}")
        if not (order.factor > 0 and math.isfinite(order.factor)):
            raise OrderError(f"a device cannot be slower by a factor of {order.factor}")
        if not (order.seconds >= 0 and math.isfinite(order.seconds)):
            raise OrderError(f"a device cannot be frozen for {order.seconds} s")
        if order.do == "lie" and order.how not in LIES:
            raise OrderError(f'a device cannot lie by "{order.how}"; it can by {", ".join(LIES)}')
        return order


class Orders:
    """Order lines from a file descriptor, read as they come. End of file means no more orders; the pod goes on."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.open = True
        self._rest = b""

    def first_line(self) -> str:
        """Blocks until the first line is complete."""
        while self.open and b"\n" not in self._rest:
            self._fill()
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def take(self, ready: bool) -> list[str]:
        """Complete lines received so far; `ready` says that reading will not block."""
        if ready and self.open:
            self._fill()
        if b"\n" not in self._rest:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines if line.strip()]

    def _fill(self) -> None:
        read = os.read(self.descriptor, READ_BYTES)
        self._rest += read
        if not read:
            self.open = False
            if self._rest:
                self._rest += b"\n"  # a last line without a newline


class DeviceNumbers:
    """Which devices are present, and their index in the connection."""

    def __init__(self, count: int, absent: Iterable[int] = ()) -> None:
        self._local: list[int | None] = [None] * count
        self.device = np.empty(0, np.int64)  # by index in the connection: device of the fleet
        self.answering = np.empty(0, np.bool_)  # by index in the connection: False once gone
        away = set(absent)
        self.admit([device for device in range(count) if device not in away])

    @property
    def present(self) -> list[int]:
        return [device for device, local in enumerate(self._local) if local is not None]

    def is_present(self, device: int) -> bool:
        return self._local[device] is not None

    def admit(self, devices: list[int]) -> None:
        """Give these devices the next indices, in this order; none of them may be present."""
        for local, device in enumerate(devices, start=len(self.device)):
            assert self._local[device] is None, f"device {device} is there already"
            self._local[device] = local
        self.device = np.concatenate((self.device, np.array(devices, np.int64)))
        self.answering = np.concatenate((self.answering, np.ones(len(devices), np.bool_)))

    def dismiss(self, devices: Iterable[int]) -> NDArray[np.uint32]:
        """Mark these devices as gone; returns the indices under which the server knew them."""
        gone = []
        for device in devices:
            local = self._local[device]
            assert local is not None, f"device {device} is not there"
            self._local[device] = None
            gone.append(local)
        self.answering[gone] = False
        return np.array(gone, dtype="<u4")

    def renumber(self, present: list[int] | None = None) -> list[int]:
        """Number the present devices, or those given, from 0 again, for a new connection."""
        present = self.present if present is None else present
        self._local = [None] * len(self._local)
        self.device, self.answering = np.empty(0, np.int64), np.empty(0, np.bool_)
        self.admit(present)
        return present


class Liar:
    """Makes answers wrong, each device in its own way. Seeded. Wrong answers are not marked: the server has to find
    them."""

    def __init__(self, seed: int = 0) -> None:
        self._how: dict[int, str] = {}
        self._before: dict[int, Array] = {}  # the last product of a stale device
        self._rng = np.random.default_rng(seed)

    def __bool__(self) -> bool:
        return bool(self._how)

    def begin(self, device: int, how: str) -> None:
        self._how[device] = how

    def answer(self, device: int, product: Array) -> Array:
        """The device's answer in place of the product; the product itself if the device is honest."""
        how = self._how.get(device)
        if how is None:
            return product
        wrong: Array = product.copy()
        match how:
            case "noise":  # everywhere, as large as the values themselves
                wrong += self._scale(product) * self._rng.standard_normal(product.shape, dtype=np.float32)
            case "element":  # one cell
                wrong.flat[self._rng.integers(product.size)] += 2 * self._scale(product)
            case "stale":  # the previous block; the first time, an unwritten buffer
                before = self._before.get(device)
                wrong = np.zeros_like(product) if before is None else np.resize(before, product.shape)
                self._before[device] = product
            case "zeros":
                wrong[:] = 0
            case "nan":  # one cell
                wrong.flat[self._rng.integers(product.size)] = np.nan
            case "signs":  # of some cells, at least one
                flipped = max(1, round(FLIPPED * product.size))
                wrong.flat[self._rng.choice(product.size, flipped, replace=False)] *= -1
            case "bias":  # the same everywhere, a hundred times too small to notice in a single cell
                wrong += np.float32(BIAS) * self._scale(product)
        return wrong

    @staticmethod
    def _scale(product: Array) -> np.float32:
        return np.float32(max(float(np.abs(product).max()), 1e-3))


def exhaust(limit_bytes: int) -> None:
    """Take memory until the process is killed; stops at `limit_bytes` if no limit is in force."""
    hoard = []
    for _ in range(-(-limit_bytes // HOARD_BYTES)):
        hoard.append(b"x" * HOARD_BYTES)  # written, so that the memory is really allocated
    raise OrderError(f"this pod has {limit_bytes:,} bytes and was not stopped: no memory limit is in force here")


def report(at_ns: int, order: Order, devices: list[int], count: int) -> str:
    """One line for the testbed: the order and the devices it was carried out on; `count` is how often this pod has done
    it."""
    told: dict[str, Any] = {"at_ns": at_ns, "do": order.do, "devices": devices, "count": count}
    return json.dumps(told | ({} if order.number is None else {"number": order.number}))
