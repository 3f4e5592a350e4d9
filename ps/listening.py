"""The socket that all devices connect to: its limits, and what is wrong if it cannot be had."""

from __future__ import annotations

import zmq

from agent.errors import UserError
from agent.limits import raise_file_limit
from agent.wire import MAX_FRAME_BYTES

MESSAGES_AHEAD = 16  # what ZeroMQ may hold for a connection that does not read


class AddressError(UserError):
    """The server cannot listen where it was asked to."""


def listening(host: str, port: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A context and its ROUTER, bound; port 0 is any free one."""
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
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
    try:
        router.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        router.close()
        context.term()
        raise AddressError(
            f"cannot listen on {host} port {port}: {zmq.strerror(error.errno or 0)}. "
            + (
                "Another server may be using it: stop that one, or take port 0 to get any free port"
                if error.errno == zmq.EADDRINUSE
                else "The host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
            )
        ) from None
    return context, router
