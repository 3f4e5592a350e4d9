"""Simulated pods and agents for the loop's world: they speak the real wire format, hold pieces in the agent's own
store and compute real products. testbed/faults/loop_world.py decides what goes wrong with them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agent.compute.kernels import NumpyKernel
from agent.compute.pieces import BlockRow, Operands, block_rows
from agent.protocol.connection import SILENT_AFTER
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    ANSWER,
    DONE,
    Cancel,
    Frame,
    Goodbye,
    Heartbeat,
    Join,
    Leave,
    Message,
    Refused,
    Result,
    Welcome,
    Work,
    decode,
    encode,
)
from ps.access.admission import ConnectionAdmission, NotNow
from ps.access.guard import Guard
from testbed.faults.loop_network import Connection, Network

POD, LOCAL, ENROLLED = range(3)  # pod of the run; agent of this machine, with a ticket; agent with a key
TOGETHER_S = 0.001  # answers this close together travel in one message
COME_BACK_S = 0.4
FOREVER_S = 1e9
Answered = tuple[int, int, int]  # device of the line, job, block


class Line:
    """One connection of a process, with what arrived on it. The process may have moved on to another connection."""

    def __init__(self, process: Process, connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.network = process.network
        self.operands = Operands()
        self.welcome = self.goodbye = False
        self.excused = False  # the process gave the server a reason to end this connection
        self.heard_s = self.network.now
        self._queues: dict[int, deque[BlockRow]] = {}
        self._cancelled: set[Answered] = set()  # blocks of which more chunks are to come
        self._busy: set[int] = set()
        self._ready: list[tuple[Answered, NDArray[np.float32]]] = []
        self._last: list[Frame] = []  # the last RESULT
        self._spoke_s = -FOREVER_S

    @property
    def present(self) -> bool:
        """Whether the process works on this connection."""
        return self.process.line is self and self.connection.open

    @property
    def idle(self) -> bool:
        return not self._ready and not self._busy and not any(self._queues.values())

    def say(self, message: Message | list[Frame], extra_s: float = 0.0) -> None:
        if self.connection.open and not self.process.vanished:
            self._spoke_s = self.network.now
            self.connection.say(message if isinstance(message, list) else encode(message), extra_s)

    def beat(self) -> None:
        """As agent/protocol/connection.py: fewer heartbeats to a silent server, because they may pile up unread."""
        if not self.present or self.goodbye:
            return
        every_s = self.process.heartbeat_s
        silent = self.network.now - self.heard_s > SILENT_AFTER * every_s
        if self.network.now - self._spoke_s >= every_s * (SILENT_AFTER if silent else 1) - 1e-6:
            self.say(Heartbeat())
        self.process.later(every_s, self.beat)

    def hear(self, connection: Connection, frames: list[bytes]) -> None:
        message = decode(frames)
        self.network.seen[f"heard {type(message).__name__}"] += 1
        self.process.log(f"{self.process.name} hears {type(message).__name__}")
        self.heard_s = self.network.now
        match message:
            case Welcome():
                self.welcome = True
                self.process.left = False
            case Work():
                self.operands.accept(message)  # WireError: a block names a piece that is missing
                for row in block_rows(message.blocks):
                    if row.key in self._cancelled:
                        self._skip(row)
                        continue
                    self._queues.setdefault(row.device, deque()).append(row)
                    self._next(row.device)
            case Cancel():
                self._cancel(set(message.blocks.tolist()))
            case Refused():
                self.process.refusals[message.reason] += 1
                connection.end()
            case Goodbye():
                self.goodbye = True

    def _cancel(self, keys: set[Answered]) -> None:
        """Blocks that are being computed are still answered."""
        for queue in self._queues.values():
            for row in [row for row in queue if row.key in keys]:
                queue.remove(row)
                self._skip(row)

    def _skip(self, row: BlockRow) -> None:
        """Chunks of a cancelled block still come, as they do to an agent."""
        self.operands.skip(row)
        (self._cancelled.discard if row.is_last else self._cancelled.add)(row.key)

    def _next(self, device: int) -> None:
        queue = self._queues[device]
        if device in self._busy or not queue:
            return
        row = queue.popleft()
        profile = self.process.profiles[device]
        try:
            flops = 2.0 * row.batch * row.rows * row.columns * self.operands.inner(row.left)
            cells = self.operands.product(row, NumpyKernel())
        except KeyError:  # its pieces were dropped while it waited: another device has answered
            self._next(device)
            return
        self._busy.add(device)
        takes_s = (profile.overhead_s + flops / profile.flops) * self.process.slowness
        self.process.later(takes_s, lambda: self._computed(row, cells))

    def _computed(self, row: BlockRow, cells: NDArray[np.float32] | None) -> None:
        self._busy.discard(row.device)
        if cells is not None:
            if not self._ready:
                self._answer_soon(TOGETHER_S)
            self._ready.append((row.key, np.ascontiguousarray(cells)))
        self._next(row.device)

    def _answer_soon(self, delay_s: float) -> None:
        self.process.later(max(delay_s, self.process.mute_until_s - self.network.now), self._answer)

    def _answer(self) -> None:
        if self.network.now < self.process.mute_until_s:
            self._answer_soon(0.0)
            return
        if late_s := self.process.take_late():
            self._answer_soon(late_s)
            return
        rows = [(*key, DONE, cells.size, 0.001, 0) for key, cells in self._ready]
        data = np.concatenate([cells.ravel() for _, cells in self._ready])
        self._ready = []
        self._last = encode(Result(np.array(rows, ANSWER), data))
        self.say(self._last, self.process.take_trickle())

    def answer_twice(self) -> bool:
        """Send the last result again."""
        if self._last:
            self.say(list(self._last))
        return bool(self._last)


class Process:
    """A pod with many devices, or an agent with one."""

    def __init__(
        self,
        network: Network,
        admission: ConnectionAdmission,
        guard: Guard,
        pod_password: str,
        number: int,
        kind: int,
        profiles: Sequence[Profile],
        heartbeat_s: float,
        log: Callable[[str], None],
    ) -> None:
        self.network, self.kind, self.profiles, self.heartbeat_s, self.log = network, kind, profiles, heartbeat_s, log
        self.number, self.name = number, f"process-{number}"
        self.line: Line | None = None
        self.lines: list[Line] = []
        self.slowness = 1.0
        self.mute_until_s = self.frozen_until_s = self.excused_until_s = self.flooded_s = -FOREVER_S
        self.vanished = self.left = self.staying_away = False
        self.refusals: Counter[str] = Counter()
        self._admission, self._guard, self._pod_password = admission, guard, pod_password
        self._late_s = self._trickle_s = 0.0

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(4, "big") * 8

    @property
    def healthy(self) -> bool:
        """Whether the process is present and answers."""
        line, now = self.line, self.network.now
        there = line is not None and line.welcome and line.connection.open and not line.excused
        return there and not self.vanished and not self.left and now >= max(self.mute_until_s, self.frozen_until_s)

    def may_be_lost(self, line: Line) -> bool:
        return (
            line is not self.line
            or line.excused
            or self.vanished
            or not line.connection.open
            or self.network.now < self.excused_until_s
        )

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """After a delay; a frozen process does it once it goes on, a vanished process never."""

        def then() -> None:
            if self.network.now < self.frozen_until_s:
                self.network.at(self.frozen_until_s, then)
            elif not self.vanished:
                what()

        self.network.at(self.network.now + delay_s, then)

    def come(self) -> None:
        """Connect and join, on a new connection if the process already has one."""
        if self.staying_away or self.vanished:
            return
        user = self._let_in()
        if user is None:
            self.later(5 * COME_BACK_S, self.come)
            return
        line: Line
        connection = self.network.connect(user, lambda c, frames: line.hear(c, frames), lambda c: self._closed(line))
        self._guard.hear()
        self._guard.let_in(self.network.now, self._admission.line)
        line = Line(self, connection)
        self.line = line
        self.lines.append(line)
        self.log(f"{self.name} comes by descriptor {connection.descriptor}")
        about = {"kind": "pod"} if self.kind == POD else {"device": f"secret of {self.name}"}
        labels = [f"{self.name}.{n}" for n in range(len(self.profiles))]
        line.say(Join(pack_profiles(self.profiles), labels, about))
        line.beat()

    def _let_in(self) -> bytes | None:
        match self.kind:
            case 0:
                return self._admission.user_id(b"local", b"PLAIN", [b"", self._pod_password.encode()])
            case 1:
                return self._admission.user_id(b"local", b"PLAIN", [b"", self._admission.ticket().encode()])
        try:
            return self._admission.user_id(b"encrypted", b"CURVE", [self.key])
        except NotNow:
            return None

    def _closed(self, line: Line) -> None:
        if line is self.line:
            self.line = None
            self.later(COME_BACK_S, self._come_back)

    def _come_back(self) -> None:
        if self.line is None:
            self.come()

    def take_late(self) -> float:
        late_s, self._late_s = self._late_s, 0.0
        return late_s

    def take_trickle(self) -> float:
        trickle_s, self._trickle_s = self._trickle_s, 0.0
        return trickle_s

    # ---- faults; False: the fault makes no difference now

    def suffer(self, kind: str, milliseconds: int) -> bool:
        line, now, seconds = self.line, self.network.now, milliseconds / 1000
        if self.vanished or line is None or not line.welcome or line.goodbye:
            return False
        match kind:
            case "slow reader":
                line.connection.deaf_until_s = max(line.connection.deaf_until_s, now + seconds)
            case "mute":
                self.mute_until_s = now + seconds
            case "late":
                self._late_s = seconds
            case "trickle":
                self._trickle_s = seconds
            case "freeze":
                self.frozen_until_s = max(self.frozen_until_s, now + seconds)
                line.connection.deaf_until_s = max(line.connection.deaf_until_s, self.frozen_until_s)
                if seconds > (SILENT_AFTER - 1.5) * self.heartbeat_s:
                    self.excused_until_s = now + seconds + 2.0
            case "vanish":
                self.vanished = True
                line.connection.deaf_until_s = FOREVER_S
            case "drop":
                line.connection.end()
            case "leave":
                line.say(Leave(np.arange(len(self.profiles), dtype=np.uint32), "its owner needs it"))
                self.left = line.excused = True
                self.later(seconds + 0.1, line.connection.end)
            case "move":
                self._move(line)
            case "garbage":
                line.excused = True
                line.say([b"CLVE\x03\x05"[: milliseconds % 7], b"?" * (milliseconds % 50)])
            case "flood":
                return self._flood(line, milliseconds)
            case "twice":
                return line.answer_twice()
            case _:
                raise ValueError(f"there is no fault {kind!r}")
        return True

    def _move(self, line: Line) -> None:
        """Join on another connection before the server misses the first; a pod ends its first connection itself."""
        line.excused = True
        if self.kind == POD:
            line.connection.end()
        self.come()

    def _flood(self, line: Line, count: int) -> bool:
        """Many heartbeats at once, within the limits of the process."""
        if self.kind != POD:
            count = min(count, 24)
            if self.network.now < self.flooded_s + 8.0:
                return False
        self.flooded_s = self.network.now
        for _ in range(count):
            line.say(Heartbeat())
        return True
