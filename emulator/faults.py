"""What a pod needs in order to misbehave on demand: its orders, who is there, and how answers are made wrong.

The testbed writes orders to the pod's standard input, one JSON object a line; `at` and the right moment are its
business, a pod does at once what it is told. Devices are named by their index in the pod's part of the fleet. The
server knows them by another number, their index in the connection, which it never gives out twice: a `Roster` keeps
the two together.

    leave, return            orderly; who returns is a new device to the server
    vanish                   silent from now on, like a phone or a link that is dead while the connection seems open;
                             the server is told when it would have noticed by itself
    freeze  seconds          answers due in that time come when it ends; if that is longer than silence is borne, it is
                             a vanish, and a return when it ends
    slow    factor           computing and both directions of the link; the server is not told
    lie     how              wrong answers, see LIES
    corrupt                  one message of nonsense to the server, which then drops the connection
    exhaust                  takes memory until its container's limit kills it, without a word
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

from agent.kernels import Array

LIES = ("noise", "element", "stale", "zeros", "nan")
ORDERS = ("leave", "vanish", "return", "freeze", "slow", "lie", "corrupt", "exhaust")
READ_BYTES = 1 << 16
HOARD_BYTES = 16 << 20
NONSENSE = b"\xff\x00nonsense, as ordered\x00"


class OrderError(ValueError):
    """An order that a pod cannot carry out; the text says why."""


@dataclass(frozen=True, slots=True)
class Order:
    do: str
    devices: tuple[int, ...] = ()  # of the pod's part of the fleet; none for `corrupt`
    seconds: float = 0.0
    factor: float = 1.0
    how: str = ""
    number: int | None = None  # goes back with the report

    @classmethod
    def parse(cls, line: str, count: int) -> Order:
        """The order of this line, to a pod of so many devices."""
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
    """Lines from a file descriptor, taken as they come. Its end is not the pod's: there are no more orders, that is
    all."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.open = True
        self._rest = b""

    def first_line(self) -> str:
        """Waits for it."""
        while self.open and b"\n" not in self._rest:
            self._fill()
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def take(self, ready: bool) -> list[str]:
        """Complete lines that are there; `ready` says that reading will not block."""
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
                self._rest += b"\n"  # a last line without its end


class Roster:
    """Who is there, under which index in the connection."""

    def __init__(self, count: int, absent: Iterable[int] = ()) -> None:
        self._local: list[int | None] = [None] * count
        self.device = np.empty(0, np.int64)  # by index in the connection: which device of the fleet it is
        self.answering = np.empty(0, np.bool_)  # by index in the connection: False once gone
        away = set(absent)
        self.admit([device for device in range(count) if device not in away])

    @property
    def present(self) -> list[int]:
        return [device for device, local in enumerate(self._local) if local is not None]

    def is_present(self, device: int) -> bool:
        return self._local[device] is not None

    def admit(self, devices: list[int]) -> None:
        """They get the next indices, in this order; none of them may be there."""
        for local, device in enumerate(devices, start=len(self.device)):
            assert self._local[device] is None, f"device {device} is there already"
            self._local[device] = local
        self.device = np.concatenate((self.device, np.array(devices, np.int64)))
        self.answering = np.concatenate((self.answering, np.ones(len(devices), np.bool_)))

    def dismiss(self, devices: Iterable[int]) -> NDArray[np.uint32]:
        """They are gone; the indices under which the server knew them."""
        gone = []
        for device in devices:
            local = self._local[device]
            assert local is not None, f"device {device} is not there"
            self._local[device] = None
            gone.append(local)
        self.answering[gone] = False
        return np.array(gone, dtype="<u4")

    def renumber(self) -> list[int]:
        """A new connection: who is there counts from 0 again."""
        present = self.present
        self._local = [None] * len(self._local)
        self.device, self.answering = np.empty(0, np.int64), np.empty(0, np.bool_)
        self.admit(present)
        return present


class Liar:
    """Makes answers wrong, each device in its own way. Seeded; nothing is marked, the server has to find out."""

    def __init__(self, seed: int = 0) -> None:
        self._how: dict[int, str] = {}
        self._before: dict[int, Array] = {}  # what a stale device computed last
        self._rng = np.random.default_rng(seed)

    def __bool__(self) -> bool:
        return bool(self._how)

    def begin(self, device: int, how: str) -> None:
        self._how[device] = how

    def answer(self, device: int, product: Array) -> Array:
        """What the device says instead of the product; the product itself if it is honest."""
        how = self._how.get(device)
        if how is None:
            return product
        wrong: Array = product.copy()
        match how:
            case "noise":  # everywhere, as large as the values themselves
                wrong += self._scale(product) * self._rng.standard_normal(product.shape, dtype=np.float32)
            case "element":  # one cell
                wrong.flat[self._rng.integers(product.size)] += 2 * self._scale(product)
            case "stale":  # the block before this one; the first time a buffer that nobody has written to
                before = self._before.get(device)
                wrong = np.zeros_like(product) if before is None else np.resize(before, product.shape)
                self._before[device] = product
            case "zeros":
                wrong[:] = 0
            case "nan":  # one cell
                wrong.flat[self._rng.integers(product.size)] = np.nan
        return wrong

    @staticmethod
    def _scale(product: Array) -> np.float32:
        return np.float32(max(float(np.abs(product).max()), 1e-3))


def exhaust(limit_bytes: int) -> None:
    """Take memory until somebody ends this process; not without end, where nobody does."""
    hoard = []
    for _ in range(-(-limit_bytes // HOARD_BYTES)):
        hoard.append(b"x" * HOARD_BYTES)  # written, so that it is really there
    raise OrderError(f"nobody minds that this pod has {limit_bytes:,} bytes: no memory limit is in force here")


def report(at_ns: int, order: Order, devices: list[int], count: int) -> str:
    """One line for the testbed: this was done, to these devices; `count` is how often this pod has done it."""
    told: dict[str, Any] = {"at_ns": at_ns, "do": order.do, "devices": devices, "count": count}
    return json.dumps(told | ({} if order.number is None else {"number": order.number}))
