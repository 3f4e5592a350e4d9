"""Tells a slow message from a silent peer, by asking the kernel when bytes last arrived.

ZeroMQ delivers whole messages only. On a slow line a message may take longer than the silence timeout, and heartbeats
queue behind it. Linux (and so Android) reports when a connection last received bytes; elsewhere silence counts as
silence.
"""

from __future__ import annotations

import socket
import struct

import zmq

NO_CONNECTION = -1
Address = tuple[object, ...]
_STATE, _ESTABLISHED = 0, 1  # tcpi_state
_LAST_DATA_RECEIVED = 52  # tcpi_last_data_recv, milliseconds, in struct tcp_info of linux/tcp.h
_BYTES_RECEIVED = 128  # tcpi_bytes_received, in the same struct


def descriptor(frame: zmq.Frame) -> int:
    """File descriptor of the TCP connection that this frame came over; NO_CONNECTION if it was not TCP."""
    try:
        found = frame.get(zmq.SRCFD)
    except (zmq.ZMQError, ValueError):
        return NO_CONNECTION
    return found if isinstance(found, int) else NO_CONNECTION


def arrived_within(connection: int, seconds: float) -> bool:
    """True if bytes arrived on this connection in the last `seconds`. The descriptor belongs to ZeroMQ, which may have
    closed it, so it is only inspected. If another connection has reused its number, one answer is about that
    connection, which does no harm."""
    info = _told(connection)
    if len(info) < _LAST_DATA_RECEIVED + 4:
        return False
    (last_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)
    return bool(last_ms < 1000 * seconds)


def established(connection: int) -> bool:
    """True if the kernel considers the connection alive; it does even while the process at the other end is stopped."""
    info = _told(connection)
    return len(info) > _STATE and info[_STATE] == _ESTABLISHED


def bytes_received(connection: int) -> int:
    """Total bytes received over the connection, read or not; 0 if not known."""
    info = _told(connection)
    if len(info) < _BYTES_RECEIVED + 8:
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])


def local_port(connection: int) -> int:
    """Local port of a TCP connection; -1 if the descriptor is not one, or is closed."""
    try:
        view = socket.socket(fileno=connection)
    except OSError:
        return -1
    try:
        found = view.getsockname()
        return int(found[1]) if isinstance(found, tuple) else -1
    except OSError:
        return -1
    finally:
        view.detach()


def other_end(connection: int) -> Address | None:
    """Peer address of a TCP connection; None if the descriptor is not one, or is closed."""
    if connection == NO_CONNECTION:
        return None
    try:  # AF_INET6 for every family: to detect it, Python needs two more calls, and it does not matter here
        view = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=connection)
    except OSError:
        return None
    try:
        found = view.getpeername()
        return found if isinstance(found, tuple) else None
    except OSError:
        return None
    finally:
        view.detach()


def _told(connection: int) -> bytes:
    """The connection's struct tcp_info; empty if there is none."""
    if connection == NO_CONNECTION or not hasattr(socket, "TCP_INFO"):
        return b""
    try:
        view = socket.socket(fileno=connection)
    except OSError:
        return b""  # closed
    try:
        return view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return b""  # the number belongs to something else
    finally:
        view.detach()
