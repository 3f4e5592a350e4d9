"""The sockets that devices connect to: their limits, and what is wrong if they cannot be had.

ZeroMQ takes options when an endpoint is bound, so one ROUTER has several mechanisms: passwords on the loopback's data
endpoint (PLAIN: no encryption, as fast as none at all), keys on all others (CURVE).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket

import zmq

from agent.protocol.errors import UserError
from agent.protocol.limits import raise_file_limit
from agent.protocol.wire import PART_BYTES
from ps.access.admission import ENCRYPTED, LOCAL
from ps.access.routing_ids import unpredictable

MESSAGES_AHEAD = 16  # what ZeroMQ may hold for a connection that does not read
MESSAGES_WAITING = 256  # of a connection, for us; more wait in its network
MESSAGES_WAITING_ENCRYPTED = 64
FRAME_BYTES = PART_BYTES + 1024  # encryption adds a little
HANDSHAKE_S = 10.0  # and no longer, whatever is sent meanwhile; devices take a server for gone that is as slow as that
BACKLOG = 1024  # of the entrance: those wait who come while it is busy
ENROL_PORTS = 20  # after the port for data, of which the first free one is for enrolment


class AddressError(UserError):
    """The server cannot listen where it was asked to."""


def new_router(io_threads: int = 1) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A context and its ROUTER, which is not bound yet."""
    raise_file_limit()
    unpredictable()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=io_threads)
    context.set(zmq.MAX_SOCKETS, 1 << 16)
    router = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, FRAME_BYTES),
        (zmq.RCVHWM, MESSAGES_WAITING),
        (zmq.SNDHWM, MESSAGES_AHEAD),
        (zmq.BACKLOG, 8192),
        (zmq.LINGER, 1000),
    ):
        router.setsockopt(option, value)
    return context, router


def bind_local(router: zmq.Socket[bytes], host: str) -> str:
    """Without encryption, for this machine alone; those connect who have a password."""
    router.setsockopt(zmq.PLAIN_SERVER, 1)
    router.setsockopt(zmq.ZAP_DOMAIN, LOCAL)
    router.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
    return bind(router, f"tcp://{f'[{host}]' if ':' in host else host}:0")


def encrypt(router: zmq.Socket[bytes], secret: str) -> None:
    """Whatever is bound from now on, with the server's secret key."""
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    router.setsockopt(zmq.ZAP_DOMAIN, ENCRYPTED)
    router.setsockopt(zmq.RCVHWM, MESSAGES_WAITING_ENCRYPTED)


def listen_local(host: str, port: int) -> socket.socket:
    """The entrance in the clear, for this machine alone."""
    if not is_loopback(host):
        raise AddressError(
            f"cannot listen on {host} in the clear: that is only for this machine itself, 127.0.0.1. "
            f"For devices elsewhere say --listen tcp://{host}:{port or 5555}, and invite them: cleave invite"
        )
    return listen(host, port)


def listen_beside(address: str) -> socket.socket:
    """An entrance on the host of this data endpoint, on one of the ports after its own, or on any."""
    host, port = split_endpoint(address)
    for candidate in (*range(port + 1, min(port + 1 + ENROL_PORTS, 65536)), 0):
        try:
            return listen(host, candidate)
        except AddressError:
            if not candidate:
                raise
    raise AssertionError("unreachable")


def listen(host: str, port: int) -> socket.socket:
    found = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(found, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]").replace("*", "0.0.0.0"), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error.errno or 0) from None
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def bind(router: zmq.Socket[bytes], endpoint: str) -> str:
    """Port 0 is any free one: the address it has become."""
    host, port = split_endpoint(endpoint)
    router.setsockopt(zmq.IPV6, int(host.startswith("[")))
    try:
        router.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise _cannot_listen(host, port, error.errno or 0) from None
    return router.getsockopt_string(zmq.LAST_ENDPOINT)


def _cannot_listen(host: str, port: int, number: int) -> AddressError:
    return AddressError(
        f"cannot listen on {host} port {port}: {zmq.strerror(number)}. "
        + (
            "Another server may be using it: stop that one, or take port 0 to get any free port"
            if number == zmq.EADDRINUSE
            else "The host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        )
    )


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def split_endpoint(endpoint: str) -> tuple[str, int]:
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):(\d{1,5})", endpoint)
    if not found or int(found[2]) > 65535:
        raise AddressError(f"cannot listen on {endpoint!r}; give an address such as tcp://0.0.0.0:5555")
    return found[1], int(found[2])


def is_loopback(host: str) -> bool:
    """Names other than localhost are taken for places elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
