"""`make fuzz`: sends seeded nonsense to a real server, before and after admission; it must stay alive, correct and
small.

Seven kinds of callers, each message mutated from a valid one: bare TCP connections with noise and damaged handshakes;
at the entrance, callers on this machine and encrypted ones; at the data endpoints, unknown keys, invited devices that
have joined, devices of this machine with a ticket, and pods. Two hundred connections are open at the same time. One
honest agent works beside them, and the server's products are checked. Bounded: loopback only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import zmq

from agent.identity.invitation import parse_link
from agent.identity.keys import Credentials, Curve, Keys, Password
from agent.protocol.entrance import EntranceConnection, enter
from agent.protocol.errors import UserError
from agent.protocol.wire import Hello, Probe, Refused, WireError, Work, decode, encode
from ps.access.access_file import AccessFile
from ps.transport.roster import MOST_IDLE
from testbed.access.inviting import new_invitation
from testbed.faults.memory import EXACT, Memory
from testbed.faults.mutations import mutated, raw_bytes, valid_messages

BATCH = 50  # mutated messages per connection; the server ends an admitted connection at its first invalid message
RAW_BATCH = 10  # the same for bare connections
OPEN = 200  # simultaneous connections
ALIVE_EVERY = 20  # calls between checks that a well-behaved device is answered
JOINS_PER_KEY = 15  # fewer than a server allows in a row
# callers and their weights
KINDS = {"raw": 10, "entrance": 10, "enrolling": 10, "stranger": 15, "invited": 25, "pod": 25, "ticket": 5}
ENDPOINTS = ("plain", "data", "encrypted", "enrolment")
PATIENCE_S = 30.0
RESTS = 20  # per run: all callers leave, and the server's memory is measured
CALM, CALM_S = 5, 0.1  # checks at rest, and seconds between them: descriptors must be nearly back at the initial count
# Descriptors that may stay open after some 20,000 connections. One of five runs of a million messages left one: an
# eventfd, perhaps of a socket that Python had closed and libzmq had not. A leak of connections leaves thousands.
MOST_LEFT_OPEN = 4
# Warm-up: the fixed-size tables are full after 86,000 messages: 1,000 idle devices, 1,024 rejected connections, 1,000
# complaints.
WARM_MESSAGES = 100_000
# What a server keeps for good, which does not count as growth; tests/testbed/faults/test_fuzz.py finds no less.
PRODUCT_BYTES = 900  # boxes and times of a product, for the results
KEY_BYTES = 1700  # a row of the access list in each of two threads, and the budgets of the key
# Flat: at rest after the warm-up, memory in use, less the above, never exceeds its level by more than this; nor does
# memory outside malloc. 1 MiB is 1.2 bytes per message, 30 per connection, or 100 per join of a million messages.
# Resident memory is not judged: it includes memory that malloc holds free at rest, measured between 5 and 10 MiB.
FLAT_BYTES = 1 << 20
AT_ONCE = OPEN + 50  # most devices that these callers have present at once: each may need a number
JUDGED_FROM = 2 * WARM_MESSAGES  # messages; shorter runs are mostly warm-up


@dataclass(frozen=True, slots=True)
class Rest:
    """The server at rest."""

    messages: int  # sent so far
    keys: int
    products: int
    memory: Memory

    @property
    def unexplained_bytes(self) -> int:
        return self.memory.in_use_bytes - self.keys * KEY_BYTES - self.products * PRODUCT_BYTES


@dataclass
class Outcome:
    seed: int
    messages: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    blocks_to_strangers: int = 0
    left_open: int = 0  # descriptors of the server when all callers had left
    left_open_are: list[tuple[str, str]] = field(default_factory=list)  # what they are, as far as the kernel says
    rests: list[Rest] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)
    tracebacks: int = 0
    exit_code: int | None = None

    @property
    def warm(self) -> list[Rest]:
        """Rests after the warm-up."""
        return [rest for rest in self.rests if rest.messages >= WARM_MESSAGES]

    @property
    def grown_bytes(self) -> int:
        """Largest growth of unexplained memory in use since the end of the warm-up."""
        return _growth([rest.unexplained_bytes for rest in self.warm])

    @property
    def grown_outside_bytes(self) -> int:
        """The same for memory outside malloc."""
        return _growth([rest.memory.outside_bytes for rest in self.warm])

    @property
    def is_flat(self) -> bool:
        return max(self.grown_bytes, self.grown_outside_bytes) <= FLAT_BYTES

    @property
    def growth(self) -> str:
        grown, outside = self.grown_bytes / 2**20, self.grown_outside_bytes / 2**20
        return f"{grown:+.2f} MiB in use, {outside:+.2f} MiB beside malloc"

    @property
    def kept_too_many(self) -> bool:
        """The server keeps too many numbers of devices that are absent, never worked and did not leave recently."""
        kept = self.server.get("kept", {})
        return bool(kept) and kept["numbers"] > kept["worked"] + MOST_IDLE + AT_ONCE

    @property
    def wrong(self) -> list[str]:
        """Violations; empty if all is well."""
        checks = {
            "the server ended": self.exit_code != 0,
            f"its thread failed: {self.server.get('error')}": bool(self.server.get("error")),
            "a product was never complete": bool(self.server.get("waits")),
            "a product was wrong": bool(self.server.get("wrong")),
            "no product was complete": not self.server.get("products"),
            f"{self.tracebacks} tracebacks were logged": bool(self.tracebacks),
            f"{self.blocks_to_strangers} blocks went to devices that had not joined": bool(self.blocks_to_strangers),
            f"{self.left_open} of its descriptors stay open {self.left_open_are}": self.left_open > MOST_LEFT_OPEN,
            f"its memory grew: {self.growth}": not self.is_flat,
            "its memory could not be measured": self.messages >= JUDGED_FROM and len(self.warm) < 2,
            f"it keeps too many devices: {self.server.get('kept')}": self.kept_too_many,
        }
        return [text for text, is_so in checks.items() if is_so]


def fuzz(messages: int, seed: int, say: Callable[[str], None] = lambda text: None) -> Outcome:
    outcome, rng, begun = Outcome(seed), random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        log = stack.enter_context((Path(folder) / "log").open("w+"))
        process, where = stack.enter_context(_server(Path(folder), log))
        stack.enter_context(_honest_agent(where["plain"]))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        callers = _Callers(context, where, AccessFile(Path(folder) / "state"), outcome)
        stack.callback(callers.close)
        visit = _Visit(process)
        rests = RESTS if messages >= JUDGED_FROM else 1
        try:
            visit.begin()
            for rest in range(1, rests + 1):
                while outcome.messages < messages * rest // rests:
                    callers.call(rng)
                busy_bytes = visit.resident_bytes
                callers.close()
                visit.rest(outcome)
                seconds = time.monotonic() - begun
                say(f"{outcome.messages:,} messages, {busy_bytes / 2**20:.1f} MiB{visit.found}, {seconds:.0f} s")
        except (Unanswered, psutil.Error) as error:
            raise Unanswered(
                f"{error} after {outcome.messages:,} messages; it was at\n{_where(process, log)}"
            ) from None
        said, _ = process.communicate(timeout=2 * PATIENCE_S)
        outcome.exit_code = process.returncode
        outcome.server = json.loads(said)
        log.seek(0)
        outcome.tracebacks = log.read().count("Traceback (most recent call last)")
    outcome.seconds = time.monotonic() - begun
    return outcome


class Unanswered(RuntimeError):
    """The server is dead or seems so; the message says where its threads were."""


def _growth(bytes_: list[int]) -> int:
    return max(bytes_) - bytes_[0] if bytes_ else 0


class _Visit:
    """Inspects the server between calls."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._watched = process, psutil.Process(process.pid)
        self._descriptors = 0  # without callers
        self._at_first: dict[str, str] = {}  # descriptor -> what it is
        self.found = ""  # result of the last look

    @property
    def resident_bytes(self) -> int:
        return int(self._watched.memory_info().rss)

    def begin(self) -> None:
        """Wait for the honest agent."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._ask()["devices"]:
            if time.monotonic() > deadline_s:
                raise Unanswered(f"the honest agent has not joined within {PATIENCE_S:.0f} s")
            time.sleep(CALM_S)
        self._descriptors, self._at_first = min(self._looks()), self._open()

    def rest(self, outcome: Outcome) -> None:
        """Measure the server once all callers have left."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (left := max(self._looks()) - self._descriptors) > MOST_LEFT_OPEN and time.monotonic() < deadline_s:
            pass
        if left > outcome.left_open:
            outcome.left_open = left
            outcome.left_open_are = sorted(set(self._open().items()) - set(self._at_first.items()))
        look = self._ask()
        if look["memory"] is not None:
            memory = Memory(**look["memory"])
            outcome.rests.append(Rest(outcome.messages, outcome.sent["keys"], look["products"], memory))
            mib = (memory.resident_bytes / 2**20, memory.in_use_bytes / 2**20, memory.free_bytes / 2**20)
            self.found = "; at rest {:.1f} MiB, {:.2f} in use, {:.1f} free in malloc".format(*mib)

    def _looks(self) -> list[int]:
        found = []
        for _ in range(CALM):
            time.sleep(CALM_S)
            found.append(self._watched.num_fds())
        return found

    def _open(self) -> dict[str, str]:
        """The server's descriptors: number -> connection and state, or the target of the descriptor's link."""
        found: dict[str, str] = {}
        for link in Path(f"/proc/{self._watched.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[link.name] = str(link.readlink())
        for one in self._watched.net_connections():
            found[str(one.fd)] = f"{one.laddr} to {one.raddr}, {one.status}"
        return found

    def _ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # the server has ended: the code below reports it
            self._process.stdin.write("look\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            raise Unanswered(f"the server did not say within {PATIENCE_S:.0f} s what it keeps")
        if not (line := self._process.stdout.readline()):
            raise Unanswered("the server ended")
        found: dict[str, Any] = json.loads(line)
        return found


def _where(process: subprocess.Popen[str], log: IO[str]) -> str:
    process.send_signal(signal.SIGABRT)  # makes it dump its threads
    process.wait()
    log.seek(0)
    return "".join(log.readlines()[-100:])


class _Callers:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], where: dict[str, Any], access: AccessFile, outcome: Outcome
    ) -> None:
        self._context, self._where, self._access, self._outcome = context, where, access, outcome
        self._recorded = _record_handshake(context, where)
        self._keys, self._joins = Keys.new(), JOINS_PER_KEY
        self._token = ""
        self._open: deque[zmq.Socket[bytes] | socket.socket] = deque()
        self._calls = 0

    def call(self, rng: random.Random) -> None:
        self._calls += 1
        if self._calls % ALIVE_EVERY == 0:
            self._check_alive()
        kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
        if kind == "raw":
            self._raw(rng)
            return
        line = self._context.socket(zmq.DEALER)
        line.setsockopt(zmq.LINGER, 0)
        line.setsockopt(zmq.RECONNECT_IVL, -1)
        line.setsockopt(zmq.SNDHWM, BATCH + 2)
        self._keep(line)
        match kind:
            case "entrance":
                line.connect(self._where["plain"])
            case "enrolling":
                Curve(self._where["key"], Keys.new()).apply(line)
                line.connect(self._where["enrolment"])
            case "stranger":
                Curve(self._where["key"], Keys.new()).apply(line)
                line.connect(self._where["encrypted"])
            case "invited":
                Curve(self._where["key"], self._invited()).apply(line)
                line.connect(self._where["encrypted"])
            case "pod":
                Password(self._where["pass"]["password"]).apply(line)
                line.connect(self._where["data"])
            case "ticket":
                where, credentials = self._entered()
                credentials.apply(line)
                line.connect(where)
        self._session(line, kind, rng)
        self._listen()

    def _keep(self, line: zmq.Socket[bytes] | socket.socket) -> None:
        """Keep at most OPEN connections open; close the oldest."""
        self._open.append(line)
        if len(self._open) > OPEN:
            gone = self._open.popleft()
            if isinstance(gone, zmq.Socket):
                gone.close(linger=0)
            else:
                gone.close()

    def _session(self, line: zmq.Socket[bytes], kind: str, rng: random.Random) -> None:
        valid = valid_messages("x" * 22)
        if kind in ("invited", "ticket", "pod"):
            with contextlib.suppress(zmq.Again):  # cut already
                line.send_multipart(valid[0], zmq.NOBLOCK)  # it joins
            self._outcome.sent["joins"] += 1
        for _ in range(BATCH):
            with contextlib.suppress(zmq.Again):
                line.send_multipart(mutated(rng.choice(valid), rng) or [b""], zmq.NOBLOCK)
            self._count(kind)

    def _listen(self) -> None:
        """Read what arrived on some of the open connections."""
        for line in list(self._open)[:: max(1, len(self._open) // 8)]:
            if not isinstance(line, zmq.Socket):
                continue
            while line.poll(0):
                with contextlib.suppress(WireError):
                    message = decode(line.recv_multipart(copy=False))
                    if isinstance(message, Work) and line.getsockopt(zmq.MECHANISM) == zmq.NULL:
                        self._outcome.blocks_to_strangers += 1

    def _check_alive(self) -> None:
        """Check that a well-behaved device is admitted and answered. In a crowd its connection may be displaced when
        its ticket has been taken; as every agent does, it then asks for another one."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._answered(deadline_s):
            if time.monotonic() > deadline_s:
                raise Unanswered(f"the server did not answer within {PATIENCE_S:.0f} s")

    def _answered(self, deadline_s: float) -> bool:
        """False if the ticket was refused, or nothing came in time."""
        where, credentials = self._entered()
        with self._context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            credentials.apply(line)
            with line.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as refused:
                line.connect(where)
                line.send_multipart([bytes(frame) for frame in encode(Probe(1 << 40, 0, b""))])
                poller = zmq.Poller()
                poller.register(line, zmq.POLLIN)
                poller.register(refused, zmq.POLLIN)
                found = dict(poller.poll(max(0, int(1000 * (deadline_s - time.monotonic())))))
                line.disable_monitor()
        self._outcome.sent["tickets taken in vain"] += refused in found and line not in found
        return line in found

    def _entered(self) -> tuple[str, Credentials]:
        try:
            return enter(self._context, self._where["plain"], "fuzz")
        except UserError as error:
            raise Unanswered(str(error)) from None

    def _raw(self, rng: random.Random) -> None:
        for _ in range(RAW_BATCH):
            host, _, port = self._where[rng.choice(ENDPOINTS)].removeprefix("tcp://").rpartition(":")
            with contextlib.suppress(OSError):  # the server may be too busy
                line = socket.create_connection((host, int(port)), 0.5)
                self._keep(line)
                line.settimeout(0.5)
                line.sendall(raw_bytes(self._recorded, rng))
            self._count("raw")

    def _invited(self) -> Keys:
        """The same keys for JOINS_PER_KEY sessions, then new keys, which are first enrolled with an invitation."""
        if self._joins >= JOINS_PER_KEY:
            self._keys, self._joins = Keys.new(), 0
            if self._outcome.sent["keys"] % 100 == 0:
                self._token = parse_link(new_invitation(self._access, 100, 3600.0, []).link).token
            self._outcome.sent["keys"] += 1
            self._enrol(Curve(self._where["key"], self._keys))
        self._joins += 1
        return self._keys

    def _enrol(self, curve: Curve) -> None:
        """As an agent does: retry what is refused only for the moment."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            entrance = EntranceConnection(self._context, self._where["enrolment"], Hello("fuzz", self._token), curve)
            try:
                answer = entrance.answer() if entrance.socket.poll(int(1000 * PATIENCE_S)) else None
            finally:
                entrance.close()
            if isinstance(answer, Refused) and answer.final:
                raise Unanswered(f"the entrance refused a key: {answer.reason}")
            if isinstance(answer, tuple):
                return
        raise Unanswered(f"the entrance did not enrol a key within {PATIENCE_S:.0f} s")

    def _count(self, kind: str) -> None:
        self._outcome.messages += 1
        self._outcome.sent[kind] += 1

    def close(self) -> None:
        while self._open:
            self._open.popleft().close()


def _record_handshake(context: zmq.Context[zmq.Socket[bytes]], where: dict[str, Any]) -> bytes:
    """The first bytes of an encrypting device: what it sends before it is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        device = context.socket(zmq.DEALER)
        Curve(where["key"], Keys.new()).apply(device)
        device.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        line, _ = listener.accept()
        with line:
            line.settimeout(PATIENCE_S)
            line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31))
            recorded = b""
            while len(recorded) < 64 + 202:
                recorded += line.recv(4096)
        device.close(linger=0)
    return recorded


@contextmanager
def _server(folder: Path, log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.faults.fuzz_server", str(folder / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | EXACT,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


# the agent must not outlive this process, however this process ends
MORTAL_AGENT = """
import runpy
from emulator.pods.pod import die_with_parent
die_with_parent()
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""


@contextmanager
def _honest_agent(address: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", MORTAL_AGENT, "--ps", address, "--kernel", "numpy", "--name", "honest", "--once"],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.faults.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=JUDGED_FROM, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed sends the same (%(default)s)")
    options = parser.parse_args()
    try:
        outcome = fuzz(options.messages, options.seed, say=lambda text: print(text, flush=True))
    except Unanswered as error:
        print(f"fuzz: {error}; seed {options.seed}", file=sys.stderr)
        return 1
    rate = outcome.messages / outcome.seconds
    print(f"{outcome.messages:,} messages in {outcome.seconds:.0f} s, {rate:,.0f} per second: {dict(outcome.sent)}")
    print(json.dumps(outcome.server, indent=1))
    print(f"descriptors that stayed open: {outcome.left_open} {outcome.left_open_are or ''}")
    if warm := outcome.warm:
        verdict, last = "flat" if outcome.is_flat else "NOT flat", warm[-1]
        print(f"memory of the server: {verdict}; since {warm[0].messages:,} messages at most {outcome.growth}")
        for rest in (warm[0], last):
            print(f"  {rest}")
    for text in outcome.wrong:
        print(f"fuzz: {text}; seed {options.seed}", file=sys.stderr)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
