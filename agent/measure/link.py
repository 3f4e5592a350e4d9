"""Measures the link to a server: round trips of small messages, then transfers of larger ones in each direction.

A PROBE says how many bytes the answer must have. The server answers at once, even before the device has joined, if the
device is admitted: by a ticket on the server's own machine, or by an enrolled key. The transfer time of a large message
is its round trip minus that of a small one.
"""

from __future__ import annotations

import re
import time
from typing import Any

import zmq

from agent.identity.keys import Credentials, Curve
from agent.protocol.entrance import enter
from agent.protocol.errors import UserError
from agent.protocol.wire import MAX_FRAME_BYTES, MAX_PROBE_BYTES, Probe, Refused, WireError, decode, encode, send_frames

ROUND_TRIPS = 20
TRANSFERS = 9
ENOUGH_S = 0.2  # stop doubling the size once a transfer takes this long
PATIENCE_S = 20.0


def check_address(address: str) -> None:
    found = re.fullmatch(r"tcp://(?:[^:/\s]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", address)
    if not found or not 1 <= int(found[1]) <= 65535:
        raise UserError(f"--ps is {address!r}; give an address such as tcp://192.0.2.7:5555")


def measure_link(address: str, curve: Curve | None = None) -> dict[str, Any]:
    """Raw samples: round trips in seconds; per transfer down and up its bytes, seconds and CPU seconds."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        where, credentials = (address, curve) if curve is not None else enter(context, address, "measurement")
        socket = _connected(context, where, credentials)
        kept: list[Any] = []
        _trip(socket, address, 0, 0, 0, kept)  # includes connecting, so it is not recorded
        trips_s = [_trip(socket, address, number + 1, 0, 0, kept)[0] for number in range(ROUND_TRIPS)]
        down = _transfers(socket, address, True, kept)
        up = _transfers(socket, address, False, kept)
        return {"address": address, "round_trip_s": trips_s, "down": down, "up": up}
    finally:
        context.destroy(linger=0)


def _connected(context: zmq.Context[zmq.Socket[bytes]], address: str, credentials: Credentials) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    credentials.apply(socket)
    socket.connect(address)
    return socket


def both(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Merge two measurements of a link."""
    return one | {key: one[key] + two[key] for key in ("round_trip_s", "down", "up")}


def _transfers(socket: zmq.Socket[bytes], address: str, down: bool, kept: list[Any]) -> list[list[float]]:
    """Double the size until a transfer takes ENOUGH_S, then repeat that size."""
    size, token, found = 1 << 14, 1000 if down else 2000, []
    while True:
        times = _trip(socket, address, token, 0 if down else size, size if down else 0, kept)
        token += 1
        if times[0] >= ENOUGH_S or size >= MAX_PROBE_BYTES:
            break
        size *= 2
    found.append([float(size), *times])
    while len(found) < TRANSFERS:
        found.append([float(size), *_trip(socket, address, token, 0 if down else size, size if down else 0, kept)])
        token += 1
    return found


def _trip(
    socket: zmq.Socket[bytes], address: str, token: int, up_bytes: int, down_bytes: int, kept: list[Any]
) -> tuple[float, float]:
    """Wall and CPU seconds of one probe. The answer's data are kept, as operands are, so that the next answer needs
    fresh memory."""
    frames = encode(Probe(token, down_bytes, bytes(up_bytes)))
    running, begin = time.process_time(), time.perf_counter()
    send_frames(socket, frames)
    while True:
        left_s = begin + PATIENCE_S - time.perf_counter()
        if left_s <= 0 or not socket.poll(int(1000 * left_s)):
            raise UserError(
                f"no answer from {address} within {PATIENCE_S:.0f} s: does a server run there that knows this device?"
            )
        try:
            answer = decode(socket.recv_multipart(copy=False))
        except WireError as error:
            raise UserError(f"{address} sent an invalid answer ({error}); is it a Cleave server?") from None
        match answer:
            case Probe(token=returned) if returned == token:
                kept.append(answer.data)
                return time.perf_counter() - begin, time.process_time() - running
            case Refused(reason=reason):
                raise UserError(f"{address} refused to be measured: {reason}")
