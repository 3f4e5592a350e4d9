"""The sockets that devices connect to: their limits, and error messages if they cannot be opened.

ZeroMQ applies options when an endpoint is bound, so one ROUTER can have several mechanisms: passwords on the loopback's
data endpoint (PLAIN: no encryption, full speed), keys on all others (CURVE).
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

MESSAGES_AHEAD = 16  # messages that ZeroMQ may hold for a client that does not read
FRAME_BYTES = PART_BYTES + 1024  # encryption adds a little
HANDSHAKE_S = 10.0  # limit, whatever is sent meanwhile; a server slower than this loses its devices anyway
BACKLOG = 1024  # of the entrance: connections that arrive while it is busy
ENROL_PORTS = 20  # ports after the data port; the first free one is for enrolment


class AddressError(UserError):
    """The server cannot listen at this address."""


def new_router(io_threads: int = 1) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A context and its ROUTER, not bound yet."""
    raise_file_limit()
    unpredictable()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=io_threads)
    context.set(zmq.MAX_SOCKETS, 1 << 16)
    router = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, FRAME_BYTES),
        # No limit on unread messages: what a connection may send is limited in bytes (guard.py, allowance.py). At a
        # limit libzmq stops reading. If two connections chose the same id, the ROUTER takes no message from one of
        # them, so libzmq would never read that one again, nor notice that its client has closed: its descriptor would
        # stay open for good.
        (zmq.RCVHWM, 0),
        (zmq.SNDHWM, MESSAGES_AHEAD),
        (zmq.BACKLOG, 8192),
        (zmq.LINGER, 1000),
    ):
        router.setsockopt(option, value)
    return context, router


def bind_local(router: zmq.Socket[bytes], host: str) -> str:
    """Bind without encryption, for this machine only; clients need a password."""
    router.setsockopt(zmq.PLAIN_SERVER, 1)
    router.setsockopt(zmq.ZAP_DOMAIN, LOCAL)
    router.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
    return bind(router, f"tcp://{f'[{host}]' if ':' in host else host}:0")


def encrypt(router: zmq.Socket[bytes], secret: str) -> None:
    """Encrypt everything that is bound from now on, with the server's secret key."""
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    router.setsockopt(zmq.ZAP_DOMAIN, ENCRYPTED)


def listen_local(host: str, port: int) -> socket.socket:
    """The unencrypted entrance, for this machine only."""
    if not is_loopback(host):
        raise AddressError(
            f"cannot listen on {host} in the clear: that is only for this machine itself, 127.0.0.1. "
            f"For devices elsewhere say --listen tcp://{host}:{port or 5555}, and invite them: cleave invite"
        )
    return listen(host, port)


def listen_beside(address: str) -> socket.socket:
    """An entrance on the host of this data endpoint: on one of the ports after it, or on any free port."""
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
    """Bind, and return the address; port 0 takes any free port."""
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
    """Host names other than localhost count as remote."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
