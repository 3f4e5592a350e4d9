"""Messages to the kernel's traffic control, interfaces and routes, in batches, in any network namespace.

pyroute2 encodes and decodes the messages; this module opens its own sockets. One pyroute2 call per class would take
seconds for thousands of classes. Here one write carries hundreds of messages, and the kernel answers only the last
message and those that fail.

A thread may be in a different network namespace from the rest of its process, and a socket stays in the namespace in
which it was made. So a short-lived thread enters the namespace to make the socket, and no other thread ever moves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from pyroute2.netlink import nla
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

REQUEST, ACKNOWLEDGE, EXCLUSIVE, CREATE, DUMP = 0x1, 0x4, 0x200, 0x400, 0x300
REPLACE = 0x100
ERROR, DONE, MULTI = 2, 3, 0x2
NEW_LINK, GET_LINK = 16, 18
NEW_ADDRESS, GET_ADDRESS = 20, 22
NEW_ROUTE, DELETE_ROUTE = 24, 25
NEW_QDISC, DELETE_QDISC, GET_QDISC = 36, 37, 38
NEW_CLASS, GET_CLASS = 40, 42
NEW_FILTER = 44
BATCH_BYTES = 1 << 16
_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_CLONE_NEWNET = 0x40000000
_HEADER = struct.Struct("=IHHII")
T = TypeVar("T")


class NetlinkError(OSError):
    """The kernel refused a message; has `errno` and the kernel's text."""


class _HtbOptions(nla):  # type: ignore[misc]
    """pyroute2's version computes tables of 512 rates per class that current kernels do not read."""

    nla_map = (
        ("TCA_HTB_UNSPEC", "none"),
        ("TCA_HTB_PARMS", "cdata"),
        ("TCA_HTB_INIT", "cdata"),
    )


class _BpfOptions(nla):  # type: ignore[misc]
    """pyroute2's version does not carry a classic BPF program."""

    nla_map = (
        ("TCA_BPF_UNSPEC", "none"),
        ("TCA_BPF_ACT", "none"),
        ("TCA_BPF_POLICE", "none"),
        ("TCA_BPF_CLASSID", "uint32"),
        ("TCA_BPF_OPS_LEN", "uint16"),
        ("TCA_BPF_OPS", "cdata"),
    )


class _FifoOptions(nla):  # type: ignore[misc]
    fields = (("limit", "I"),)


class TrafficMessage(tcmsg):  # type: ignore[misc]
    @staticmethod
    def get_options(self: tcmsg, *arguments: Any, **named: Any) -> Any:
        kind = self.get_attr("TCA_KIND")
        ours = {"htb": _HtbOptions, "bpf": _BpfOptions, "bfifo": _FifoOptions}
        return ours.get(kind) or self.get_plugin("options", *arguments, **named)


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    index: int
    peer: int | None  # index of the other end, in its own namespace
    master: int | None  # index of the bridge it is a port of
    segments: int  # most packets per lump


def _interface(message: Any) -> Interface:
    told = [message.get_attr(f"IFLA_{name}") for name in ("IFNAME", "LINK", "MASTER", "GSO_MAX_SEGS")]
    return Interface(told[0], message["index"], told[1], told[2], told[3] or 65_535)


def encoded(message: Any, kind: int, flags: int, attributes: Sequence[Any]) -> bytes:
    message["header"]["type"], message["header"]["flags"] = kind, REQUEST | flags
    message["attrs"] = list(attributes)
    message.encode()
    return bytes(message.data)


class Netlink:
    """A socket to the kernel, in one namespace."""

    def __init__(self, namespace: int | str | None = None) -> None:
        """`namespace`: the id of a process in it, its name or path, or None for the current namespace."""
        self._socket = _open() if namespace is None else in_namespace(namespace, _open)
        self._sequence = 0

    # ---- messages

    def traffic(
        self, kind: int, flags: int, index: int, handle: int, parent: int, *attributes: Any, info: int = 0
    ) -> bytes:
        message = TrafficMessage()
        message["index"], message["handle"], message["parent"], message["info"] = index, handle, parent, info
        return encoded(message, kind, flags, attributes)

    def link(self, index: int, *attributes: Any, flags: int = 0, change: int = 0) -> bytes:
        """`change`: the interface flags to set."""
        message = ifinfmsg()
        message["index"], message["flags"], message["change"] = index, change, change
        return encoded(message, NEW_LINK, flags, attributes)

    def route(self, kind: int, flags: int, length: int, type_: int, table: int, scope: int, *attributes: Any) -> bytes:
        message = rtmsg()
        message["family"], message["dst_len"], message["type"] = socket.AF_INET, length, type_
        message["table"], message["scope"], message["proto"] = table, scope, 4  # static
        return encoded(message, kind, flags, attributes)

    # ---- talking

    def send(self, messages: Sequence[bytes]) -> None:
        """Send all messages, in order. Raises NetlinkError for the first that fails; the rest of its batch is carried
        out."""
        batch: list[bytes] = []
        size = 0
        for message in messages:
            if size + len(message) > BATCH_BYTES:
                self._exchange(batch)
                batch, size = [], 0
            batch.append(message)
            size += len(message)
        if batch:
            self._exchange(batch)

    def _exchange(self, batch: Sequence[bytes]) -> None:
        numbered = []
        for at, message in enumerate(batch):
            self._sequence += 1
            length, kind, flags, _, _ = _HEADER.unpack_from(message)
            flags |= ACKNOWLEDGE if at == len(batch) - 1 else 0
            numbered.append(_HEADER.pack(length, kind, flags, self._sequence, 0) + message[_HEADER.size :])
        self._socket.send(b"".join(numbered))
        failed: NetlinkError | None = None
        while True:
            for kind, message in _messages(self._socket.recv(1 << 20)):
                if kind == ERROR:
                    failed = failed or _failure(message)
                    if _HEADER.unpack_from(message)[3] == self._sequence:
                        if failed:
                            raise failed
                        return

    def dump(self, kind: int, message: Any, make: Callable[[bytes], Any]) -> list[Any]:
        """All objects of a kind."""
        self._sequence += 1
        message["header"]["type"], message["header"]["flags"] = kind, REQUEST | DUMP
        message["header"]["sequence_number"] = self._sequence
        message.encode()
        self._socket.send(bytes(message.data))
        found: list[Any] = []
        while True:
            for reply, whole in _messages(self._socket.recv(1 << 20)):
                if reply == DONE:
                    return found
                if reply == ERROR:
                    raise _failure(whole) or NetlinkError(errno.EIO, "no answer")
                found.append(make(whole))

    def interfaces(self) -> dict[str, Interface]:
        """All interfaces, by name."""
        found = [_interface(message) for message in self.dump(GET_LINK, ifinfmsg(), _decoder(ifinfmsg))]
        return {one.name: one for one in found}

    def interface(self, which: str | int) -> Interface | None:
        """One interface, by name or index; None if it does not exist. Avoids a full dump on hosts with hundreds of
        interfaces."""
        asked = ifinfmsg()
        asked["index"] = which if isinstance(which, int) else 0
        name = [("IFLA_IFNAME", which)] if isinstance(which, str) else []
        self._socket.send(encoded(asked, GET_LINK, 0, name))
        (kind, message), *_ = _messages(self._socket.recv(1 << 20))
        return None if kind == ERROR else _interface(_decoder(ifinfmsg)(message))

    def address(self, index: int) -> str | None:
        """The first IPv4 address of an interface."""
        asked = ifaddrmsg()
        asked["family"] = socket.AF_INET
        for message in self.dump(GET_ADDRESS, asked, _decoder(ifaddrmsg)):
            if message["index"] == index and message["family"] == socket.AF_INET:
                return str(message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS"))
        return None

    def of_interface(self, kind: int, index: int) -> Iterator[Any]:
        """The classes (GET_CLASS) or queueing disciplines (GET_QDISC) of an interface."""
        asked = TrafficMessage()
        asked["index"] = index
        decode = _decoder(TrafficMessage)
        for whole in self.dump(kind, asked, bytes):  # the kernel reports other interfaces too
            if struct.unpack_from("=i", whole, _HEADER.size + 4)[0] == index:
                yield decode(whole)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _decoder(make: Any) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        message = make(data)
        message.decode()
        return message

    return decode


def _messages(read: bytes) -> Iterator[tuple[int, bytes]]:
    """Each message with its kind."""
    at = 0
    while at < len(read):
        length, kind, _, _, _ = _HEADER.unpack_from(read, at)
        yield kind, read[at : at + length]
        at += (length + 3) & ~3


def _failure(message: bytes) -> NetlinkError | None:
    (code,) = struct.unpack_from("=i", message, _HEADER.size)
    if code == 0:
        return None
    said = os.strerror(-code)
    at = 4 + 2 * _HEADER.size  # after its own header and that of the request; then the kernel's explanation
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind & 0x3FFF == 1:
            said = message[at + 4 : at + length].rstrip(b"\0").decode(errors="replace")
        at += max(4, (length + 3) & ~3)
    return NetlinkError(-code, said)


def _open() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        made.setsockopt(_NETLINK, _CAP_ACK, 1)
        made.setsockopt(_NETLINK, _EXT_ACK, 1)
        made.bind((0, 0))
        made.settimeout(30.0)  # the kernel answers at once, or never
    except BaseException:
        made.close()
        raise
    return made


# ---- namespaces


def enter(namespace: int | str) -> None:
    """Move this thread, and any thread that it starts, to the namespace."""
    if isinstance(namespace, int):
        path = Path(f"/proc/{namespace}/ns/net")
    else:
        path = Path(namespace if "/" in namespace else f"/run/netns/{namespace}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def in_namespace(namespace: int | str, act: Callable[[], T]) -> T:
    """Run `act` in the namespace and return its result."""
    return _elsewhere(lambda: enter(namespace), act)


def setting(namespace: int | str | None, key: str) -> str | None:
    """A value under /proc/sys in that namespace (None: the current one); None if its kernel does not know the key."""
    read = Path("/proc/sys", key).read_text
    try:
        return (read() if namespace is None else in_namespace(namespace, read)).strip()
    except FileNotFoundError:
        return None


def set_setting(namespace: int | str, key: str, value: int | str) -> None:
    in_namespace(namespace, lambda: Path("/proc/sys", key).write_text(str(value)))


def in_new_namespace(act: Callable[[], T]) -> T:
    """Run `act` in a new namespace that has only a loopback interface, which is down, and is gone afterwards."""
    return _elsewhere(lambda: _call("unshare", _CLONE_NEWNET), act)


def _elsewhere(go: Callable[[], None], act: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            go()
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
