"""Uninvited clients, in a process of their own:
`python tests/helpers/flooding.py '{"plain": [...], "encrypted": [...]}'`.

Fifty connections for some seconds, each opened again and again: small messages as fast as possible, one of 420 MB, one
that never ends, 4 MB of JSON, noise, wrong passwords, and unknown keys. Only to addresses of this machine. Prints at
the end what was sent, and whether any of them got a block.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from agent.identity.keys import Curve, Keys, Password
from agent.protocol.entrance import enter
from agent.protocol.errors import UserError
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import MAGIC, VERSION, Heartbeat, Join, Kind, Probe, encode

WORK = MAGIC + bytes([VERSION, Kind.WORK])
JOIN = [bytes(f) for f in encode(Join(pack_profiles([Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 9)]), ["evil"], {}))]
PROBE = [bytes(f) for f in encode(Probe(1, 0, b""))]
BEAT = bytes(encode(Heartbeat())[0])
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
AGAIN_S = 0.05  # pause after being cut off: fifty connections without pauses would fill a core by themselves
HUGE = 420_000_000
JSON = b'{"labels":["evil"],"about":{' + b",".join(b'"%d":"x"' % i for i in range(320_000)) + b"}}"


def frame(data: bytes, more: bool = False) -> bytes:
    return bytes([2 | more]) + len(data).to_bytes(8, "big") + data


def message(*frames: bytes) -> bytes:
    return b"".join(frame(part, index + 1 < len(frames)) for index, part in enumerate(frames))


def small() -> Iterator[bytes]:
    yield message(*JOIN)
    while True:
        yield message(BEAT) * 100


def huge() -> Iterator[bytes]:
    yield bytes([2]) + HUGE.to_bytes(8, "big")
    for _ in range(HUGE >> 20):
        yield bytes(1 << 20)


def unfinished() -> Iterator[bytes]:
    """420 MB in frames of 4 KiB, none of them the last, and then silence."""
    yield frame(JOIN[0], more=True)
    for _ in range(HUGE >> 18):
        yield frame(bytes(4096), more=True) * 64
    while True:
        time.sleep(0.1)
        yield b""


def long_text() -> Iterator[bytes]:
    while True:
        yield message(JOIN[0], JOIN[1], JSON)


def noise() -> Iterator[bytes]:
    while True:
        yield os.urandom(4096)


def raw(
    address: str, words: Callable[[], Iterator[bytes]], mechanism: bytes, until_s: float, sent: Counter[str]
) -> None:
    """One connection, opened again whenever it is closed."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=0.5) as line:
            sent["connections"] += 1
            line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
            if mechanism == b"PLAIN":
                line.sendall(b"\x04\x10\x05HELLO\x04evil\x04evil")
            else:
                line.sendall(READY)
            heard = b""
            for part in words():
                line.sendall(part)
                sent["bytes"] += len(part)
                with contextlib.suppress(BlockingIOError):
                    heard = heard[-64:] + line.recv(1 << 16, socket.MSG_DONTWAIT)
                    sent["blocks"] += heard.count(WORK)
                if time.monotonic() >= until_s:
                    break
        time.sleep(AGAIN_S)


def unknown_key(address: str, server_key: str, until_s: float, sent: Counter[str]) -> None:
    while time.monotonic() < until_s:
        with zmq.Context() as context, context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            line.setsockopt(zmq.SNDTIMEO, 20)
            line.setsockopt(zmq.SNDHWM, 100)
            Curve(server_key, Keys.new()).apply(line)
            line.connect(address)
            sent["connections"] += 1
            again_s = min(until_s, time.monotonic() + 1.0)
            while time.monotonic() < again_s:
                with contextlib.suppress(zmq.Again):
                    line.send_multipart([BEAT, bytes(100)])
                    sent["bytes"] += 124
                while line.poll(0):
                    sent["blocks"] += line.recv_multipart()[0].startswith(WORK)


def talkative(address: str, password: str, until_s: float, sent: Counter[str]) -> None:
    """Admitted, and sends as fast as it can."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        line.setsockopt(zmq.SNDTIMEO, 20)
        if password:
            Password(password).apply(line)
        line.connect(address)
        line.send_multipart(JOIN)
        while time.monotonic() < until_s:
            with contextlib.suppress(zmq.Again):
                for _ in range(100):
                    line.send(BEAT)
                sent["bytes"] += 100 * len(BEAT)


def begins_and_never_ends(address: str, server_key: str, keys: Keys, until_s: float, sent: Counter[str]) -> None:
    """An enrolled key: one small PROBE, and then 15 MiB of a message that stops in the middle."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as between, zmq.Context() as context:
        line = context.socket(zmq.DEALER)
        line.setsockopt(zmq.LINGER, 0)
        line.setsockopt(zmq.RECONNECT_IVL, -1)
        Curve(server_key, keys).apply(line)
        line.connect(f"tcp://127.0.0.1:{between.getsockname()[1]}")
        line.send_multipart(PROBE)
        inside, _ = between.accept()
        with inside, socket.create_connection((host, int(port))) as outside:
            sent["connections"] += 1
            back = threading.Thread(target=carry, args=(outside, inside, 1 << 30, until_s))
            there = threading.Thread(target=carry, args=(inside, outside, 15 << 20, until_s))
            back.start()
            there.start()
            if line.poll(3000):
                sent["answered"] += 1
                line.send_multipart([bytes(1 << 18)] * 64, copy=False)
            there.join()
            back.join()
        line.close()


def carry(source: socket.socket, target: socket.socket, most: int, until_s: float) -> None:
    """Carry this number of bytes, then nothing more, but keep the connection."""
    source.settimeout(0.2)
    while time.monotonic() < until_s:
        if not most:
            time.sleep(0.1)
            continue
        try:
            data = source.recv(min(1 << 16, most))
            if not data:
                return
            target.sendall(data)
            most -= len(data)
        except TimeoutError:
            continue
        except OSError:
            return


def measures_without_end(address: str, until_s: float, sent: Counter[str]) -> None:
    """On this machine, with ticket after ticket: the smallest PROBEs, as fast as the server takes them."""
    while time.monotonic() < until_s:
        with zmq.Context() as context, contextlib.suppress(zmq.ZMQError, UserError):
            where, credentials = enter(context, address, "evil")
            with context.socket(zmq.DEALER) as line:
                for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 2), (zmq.SNDTIMEO, 500), (zmq.RECONNECT_IVL, -1)):
                    line.setsockopt(option, value)
                credentials.apply(line)
                line.connect(where)
                for _ in range(255):
                    line.send_multipart(PROBE)
                    sent["probes"] += 1
                    while line.poll(0):
                        line.recv_multipart()
                    if time.monotonic() >= until_s:
                        break


def comes_and_goes(address: str, a_second: float, words: bytes, until_s: float, sent: Counter[str]) -> None:
    """Connects from one address of this machine after another, and hangs up again."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    begun_s, come = time.monotonic(), 0
    while time.monotonic() < until_s:
        come += 1
        with contextlib.suppress(OSError), socket.socket() as line:
            line.settimeout(1.0)
            line.bind((f"127.0.0.{2 + come % 200}", 0))
            line.connect((host, int(port)))
            if words:
                line.sendall(words)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
            sent["connections"] += 1
        time.sleep(max(0.0, begun_s + come / a_second - time.monotonic()))


def main(asked: dict[str, Any]) -> None:
    for address in (*asked["plain"], *asked["encrypted"]):
        assert ipaddress.ip_address(address.removeprefix("tcp://").rpartition(":")[0]).is_loopback
    os.nice(19)  # the cost to the server is measured, not the cost to the machine
    until_s = time.monotonic() + asked["seconds"]
    sent: Counter[str] = Counter(blocks=0)
    threads = []
    for _ in range(asked.get("talkative", 0)):
        threads.append(threading.Thread(target=talkative, args=(asked["plain"][0], asked["password"], until_s, sent)))
    for _ in range(asked.get("begun", 0)):
        keys = Keys(*asked["keys"])
        threads.append(
            threading.Thread(
                target=begins_and_never_ends, args=(asked["encrypted"][0], asked["key"], keys, until_s, sent)
            )
        )
    for _ in range(asked.get("measuring", 0)):
        threads.append(threading.Thread(target=measures_without_end, args=(asked["plain"][0], until_s, sent)))
    for words in asked.get("coming", ()):
        for address in (*asked["plain"], *asked["encrypted"]):
            threads.append(
                threading.Thread(target=comes_and_goes, args=(address, 200.0, bytes.fromhex(words), until_s, sent))
            )
    for number in range(asked["connections"]):
        words = (small, small, small, huge, unfinished, long_text, noise)[number % 7]
        if number % 5 == 4:
            address = asked["encrypted"][number % len(asked["encrypted"])]
            threads.append(threading.Thread(target=unknown_key, args=(address, asked["key"], until_s, sent)))
        else:
            address = asked["plain"][number % len(asked["plain"])]
            mechanism = b"PLAIN" if number % 3 == 2 else b"NULL"
            threads.append(threading.Thread(target=raw, args=(address, words, mechanism, until_s, sent)))
    for thread in threads:
        thread.start()
    print("flooding", flush=True)
    for thread in threads:
        thread.join()
    print(json.dumps(sent), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
