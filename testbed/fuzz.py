"""`make fuzz`: seeded nonsense at a real server, before and after the handshake; it must stay alive, right and small.

Four kinds of callers, each message mutated from a valid one: bare TCP connections with noise and damaged handshakes,
strangers who encrypt but were never invited, invited devices that have joined, and plain ones on this machine. Beside
them one honest agent works, and the server's products are checked. Bounded: loopback only, one connection at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import zmq

from agent.invitation import parse_link
from agent.keys import Curve, Keys
from agent.wire import Heartbeat, Probe, WireError, Work, decode, encode
from ps.access_file import AccessFile
from ps.roster import MOST_IDLE
from testbed.inviting import new_invitation
from testbed.mutations import Frames, mutated, raw_bytes, valid_messages

BATCH = 50  # mutated messages, and then one that must be answered
JOINS_OF_A_KEY = 15  # fewer than a server allows in a row
PLAIN_JOINS = 500
PATIENCE_S = 30.0
LOOKS = 100  # at the server's memory
WARM_LOOKS = 10  # the first tenth is its warm-up
# Flat: from then on its resident memory is never higher than at that moment by more than this. A server does keep what
# it is asked to, about 1 KiB for every product that was completed and every key that was enrolled, of which a million
# messages bring some hundreds each. Of anything else this leaves about 2 bytes a message, or 100 for one that joins.
FLAT_BYTES = 2 << 20
AT_ONCE = 100  # devices that these callers have there at the same moment, at most: a number may be needed for each
JUDGED_FROM = 100_000  # messages; in fewer, what the allocator does first is more than what anything else could do


@dataclass
class Outcome:
    seed: int
    messages: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    blocks_to_strangers: int = 0
    memory_bytes: list[int] = field(default_factory=list)  # of the server: before anything, and after each hundredth
    server: dict[str, Any] = field(default_factory=dict)
    tracebacks: int = 0
    exit_code: int | None = None

    @property
    def grown_bytes(self) -> int:
        """How much higher than at the end of the warm-up it has been."""
        after = self.memory_bytes[WARM_LOOKS:]
        return max(after) - after[0] if after else 0

    @property
    def is_flat(self) -> bool:
        return self.grown_bytes <= FLAT_BYTES

    @property
    def kept_too_many(self) -> bool:
        """Numbers of devices that are not there, have not worked, and are not among the latest that have left."""
        kept = self.server.get("kept", {})
        return bool(kept) and kept["numbers"] > kept["worked"] + MOST_IDLE + AT_ONCE

    @property
    def wrong(self) -> list[str]:
        """What must not be; empty if all is well."""
        checks = {
            "the server ended": self.exit_code != 0,
            f"its thread failed: {self.server.get('error')}": bool(self.server.get("error")),
            "a product was never complete": bool(self.server.get("waits")),
            "a product was wrong": bool(self.server.get("wrong")),
            "no product was complete": not self.server.get("products"),
            f"{self.tracebacks} tracebacks were logged": bool(self.tracebacks),
            f"{self.blocks_to_strangers} blocks went to strangers": bool(self.blocks_to_strangers),
            f"its memory grew by {self.grown_bytes / 2**20:.1f} MiB": not self.is_flat and self.messages >= JUDGED_FROM,
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
        server = psutil.Process(process.pid)
        outcome.memory_bytes.append(server.memory_info().rss)
        for look in range(1, LOOKS + 1):
            while outcome.messages < messages * look // LOOKS:
                try:
                    callers.call(rng)
                except Unanswered as error:
                    raise Unanswered(
                        f"{error} after {outcome.messages:,} messages; it was at\n{_where(process, log)}"
                    ) from None
            outcome.memory_bytes.append(server.memory_info().rss)
            if look % (LOOKS // 10) == 0:
                seconds = time.monotonic() - begun
                say(f"{outcome.messages:,} messages, {outcome.memory_bytes[-1] / 2**20:.1f} MiB, {seconds:.0f} s")
        said, _ = process.communicate(timeout=2 * PATIENCE_S)
        outcome.exit_code = process.returncode
        outcome.server = json.loads(said)
        log.seek(0)
        outcome.tracebacks = log.read().count("Traceback (most recent call last)")
    outcome.seconds = time.monotonic() - begun
    return outcome


class Unanswered(RuntimeError):
    """The server is not alive, or does not look so; the text says where its threads were."""


def _where(process: subprocess.Popen[str], log: IO[str]) -> str:
    process.send_signal(signal.SIGABRT)  # then it writes that down
    process.wait()
    log.seek(0)
    return "".join(log.readlines()[-100:])


class _Callers:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], where: dict[str, str], access: AccessFile, outcome: Outcome
    ) -> None:
        self._context, self._where, self._access, self._outcome = context, where, access, outcome
        self._recorded = _record_handshake(context, where)
        self._keys, self._joins, self._plain_joins = Keys.new(), JOINS_OF_A_KEY, 0

    def call(self, rng: random.Random) -> None:
        kind = rng.choices(("raw", "stranger", "invited", "plain"), (10, 35, 35, 20))[0]
        if kind == "raw":
            self._raw(rng)
            return
        keys = None if kind == "plain" else self._invited() if kind == "invited" else Keys.new()
        line = self._context.socket(zmq.DEALER)
        try:
            if keys is not None:
                Curve(self._where["key"], keys).apply(line)
            line.connect(self._where["plain" if kind == "plain" else "encrypted"])
            self._session(line, kind, rng)
        finally:
            line.close(linger=0)

    def _session(self, line: zmq.Socket[bytes], kind: str, rng: random.Random) -> None:
        valid = valid_messages("x" * 22)
        if kind == "invited" or (kind == "plain" and self._plain_joins < PLAIN_JOINS):
            self._plain_joins += kind == "plain"
            line.send_multipart(valid_messages(self._token if kind == "invited" else "")[0])
        elif kind == "plain":
            valid = valid[2:]
        for _ in range(BATCH):
            frames: Frames = mutated(rng.choice(valid), rng)
            if kind == "plain" and self._plain_joins >= PLAIN_JOINS and frames and frames[0][5:6] == b"\x01":
                continue
            line.send_multipart(frames or [b""])
            self._count(kind)
        line.send_multipart([bytes(frame) for frame in encode(Probe(1 << 40, 0, b""))])
        self._listen(line, kind)

    def _listen(self, line: zmq.Socket[bytes], kind: str) -> None:
        """Until it is quiet; a server that says nothing at all is not alive."""
        patience_s = PATIENCE_S
        while line.poll(int(1000 * patience_s)):
            patience_s = 0.002
            with contextlib.suppress(WireError):
                message = decode(line.recv_multipart(copy=False))
                if isinstance(message, Work) and kind == "stranger":
                    self._outcome.blocks_to_strangers += 1
                if isinstance(message, Probe) and message.token == 1 << 40:
                    return
                if isinstance(message, Heartbeat):
                    continue
        if patience_s == PATIENCE_S:
            raise Unanswered(f"the server did not answer a caller ({kind}) within {PATIENCE_S:.0f} s")

    def _raw(self, rng: random.Random) -> None:
        for _ in range(BATCH):
            host, _, port = self._where[rng.choice(("plain", "encrypted"))].removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), PATIENCE_S) as line, contextlib.suppress(OSError):
                line.sendall(raw_bytes(self._recorded, rng))
                if rng.random() < 0.2:
                    line.settimeout(0.01)
                    line.recv(4096)
            self._count("raw")

    def _invited(self) -> Keys:
        """The same for some sessions, then a new one."""
        if self._joins >= JOINS_OF_A_KEY:
            self._keys, self._joins = Keys.new(), 0
            if self._outcome.sent["keys"] % 100 == 0:
                self._token = parse_link(new_invitation(self._access, 100, 3600.0, []).link).token
            self._outcome.sent["keys"] += 1
        self._joins += 1
        return self._keys

    def _count(self, kind: str) -> None:
        self._outcome.messages += 1
        self._outcome.sent[kind] += 1


def _record_handshake(context: zmq.Context[zmq.Socket[bytes]], where: dict[str, str]) -> bytes:
    """The first bytes of a device that encrypts: what it says before it is answered."""
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
def _server(folder: Path, log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.fuzz_server", str(folder / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


# it must not outlive us, whatever ends us
MORTAL_AGENT = """
import runpy
from emulator.pod import die_with_parent
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
    parser = argparse.ArgumentParser(prog="python -m testbed.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed sends the same (%(default)s)")
    options = parser.parse_args()
    try:
        outcome = fuzz(options.messages, options.seed, say=lambda text: print(text, flush=True))
    except Unanswered as error:
        print(f"fuzz: {error}; seed {options.seed}", file=sys.stderr)
        return 1
    rate = outcome.messages / outcome.seconds
    print(f"{outcome.messages:,} messages in {outcome.seconds:.0f} s, {rate:,.0f} a second: {dict(outcome.sent)}")
    print(json.dumps(outcome.server, indent=1))
    grown, warm = outcome.grown_bytes / 2**20, outcome.memory_bytes[WARM_LOOKS] / 2**20
    verdict = "flat" if outcome.is_flat else "NOT flat"
    print(f"memory of the server: {verdict}; {warm:.1f} MiB after the first tenth, at most {grown:+.1f} MiB since")
    for text in outcome.wrong:
        print(f"fuzz: {text}; seed {options.seed}", file=sys.stderr)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
