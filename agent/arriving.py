"""Is a message on its way, of which nothing can be seen yet?

ZeroMQ delivers whole messages. On a slow line one may take longer than silence is borne, and heartbeats wait behind it;
but the kernel knows when bytes last came. Linux (so Android, too) says so; elsewhere nobody knows, and silence counts.
"""

from __future__ import annotations

import socket
import struct

import zmq

NO_CONNECTION = -1
_LAST_DATA_RECEIVED = 52  # tcpi_last_data_recv, milliseconds, in struct tcp_info of linux/tcp.h


def descriptor(frame: zmq.Frame) -> int:
    """Of the TCP connection that this frame came over; NO_CONNECTION if it was no such connection."""
    try:
        found = frame.get(zmq.SRCFD)
    except (zmq.ZMQError, ValueError):
        return NO_CONNECTION
    return found if isinstance(found, int) else NO_CONNECTION


def arrived_within(connection: int, seconds: float) -> bool:
    """Have bytes come over it lately? It belongs to ZeroMQ, which may have closed it: it is only looked at. (If its
    number has been given to another connection since, that one is looked at once; nothing is lost by that.)"""
    if connection == NO_CONNECTION or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        view = socket.socket(fileno=connection)
    except OSError:
        return False  # it is closed
    try:
        info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    except OSError:
        return False  # something else has its number
    finally:
        view.detach()
    if len(info) < _LAST_DATA_RECEIVED + 4:
        return False
    (last_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)
    return bool(last_ms < 1000 * seconds)
