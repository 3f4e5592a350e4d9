"""The socket that all devices connect to: its limits, and what is wrong if it cannot be had."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import resource

import zmq

from agent.errors import UserError
from agent.wire import MAX_FRAME_BYTES

MESSAGES_AHEAD = 16  # what ZeroMQ may hold for a connection that does not read


class AddressError(UserError):
    """The server cannot listen where it was asked to."""


def new_router(io_threads: int = 1) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A context and its ROUTER, which is not bound yet."""
    _raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=io_threads)
    context.set(zmq.MAX_SOCKETS, 1 << 16)
    router = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.RCVHWM, 0),  # bounded by credit
        (zmq.SNDHWM, MESSAGES_AHEAD),
        (zmq.BACKLOG, 8192),
        (zmq.LINGER, 1000),
    ):
        router.setsockopt(option, value)
    return context, router


def bind_plain(router: zmq.Socket[bytes], host: str, port: int) -> str:
    """In the clear, for this machine alone."""
    if not is_loopback(host):
        raise AddressError(
            f"cannot listen on {host} in the clear: that is only for this machine itself, 127.0.0.1. "
            f"For devices elsewhere say --listen tcp://{host}:{port or 5555}, and invite them: cleave invite"
        )
    return bind(router, f"tcp://{f'[{host}]' if ':' in host else host}:{port}")


def bind(router: zmq.Socket[bytes], endpoint: str) -> str:
    """Port 0 is any free one: the address it has become."""
    host, port = split_endpoint(endpoint)
    router.setsockopt(zmq.IPV6, int(host.startswith("[")))
    try:
        router.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise AddressError(
            f"cannot listen on {host} port {port}: {zmq.strerror(error.errno or 0)}. "
            + (
                "Another server may be using it: stop that one, or take port 0 to get any free port"
                if error.errno == zmq.EADDRINUSE
                else "The host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
            )
        ) from None
    return router.getsockopt_string(zmq.LAST_ENDPOINT)


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


def _raise_file_limit() -> None:
    """A connection is a file: allow as many as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
