"""The encrypted way in: binds it, tells who sent a message, asks the access book whether they may join.

A shell around `ps/access.py`, in the server's thread. ZeroMQ takes options when an endpoint is bound, so one ROUTER has
both: its loopback endpoint in the clear and, once CURVE is switched on, every other one encrypted. ZeroMQ asks its
authenticator (ZAP) about each new connection; ours lets every key through and writes it, after a word that only this
process knows, into the connection's User-Id, which all its messages carry. A client may claim any User-Id of its own,
but it does not know the word; what has none is dropped. Whether a key may join is decided where there are words to
answer with.

Whoever is refused is logged once for each reason, and costs no more than the answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from agent.connection import HANDSHAKE_FAILED
from agent.errors import UserError
from agent.keys import fingerprint
from agent.wire import Join
from ps.access import NO_INVITATION, REVOKED, Book, Budget, Enrolled, Refusal, admit, seen
from ps.access_file import AccessFile
from ps.listening import AddressError, bind, bind_plain, new_router
from ps.peers import printable

JOINS = (20.0, 0.1)  # at once, a second: of one key
PROBED_BYTES = (256e6, 1e6)
LINES = 200  # of refusals, and then no more
IO_THREADS = 2  # one of them encrypts about 1 GB/s
HANDSHAKE_S = 10.0  # and no longer, whatever is sent meanwhile; devices take a server for gone that is as slow as that
AHEAD = 64  # messages of a connection that wait for us; more wait in its network

PLAIN, ENCRYPTED = b"plain", b"encrypted"  # what ZeroMQ calls the endpoints when it asks
TOO_OFTEN = Refusal("this device joins too often; it may again in a minute")
TOO_MANY = Refusal("this device's key may bring fewer devices than that")
NOT_WRITTEN = Refusal("the server cannot write down who joins; its owner must make room")
PASSING = (TOO_OFTEN, NOT_WRITTEN)  # what may be otherwise the next time

_HANDSHAKES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has another server's key, or repeats what somebody else has sent",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not encrypt",
}


def open_router(
    host: str,
    port: int,
    listen: Sequence[str],
    unlisted: Sequence[str],
    access: AccessFile | None,
    say: Callable[[str], None],
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes], str, Door | None]:
    """A context, its ROUTER, and where it takes plain connections; no door if it takes no others. `unlisted` ones are
    encrypted like those of `listen`, but nobody is invited to come there."""
    encrypted = [*listen, *unlisted]
    if encrypted and access is None:
        raise AddressError(f"cannot listen on {encrypted[0]}: nothing says who may join there")
    context, router = new_router(io_threads=IO_THREADS if encrypted else 1)
    try:
        door = Door(context, router, access, say) if encrypted and access is not None else None
        address = bind_plain(router, host, port)
        if door is not None:
            door.open(listen, unlisted)
        return context, router, address, door
    except BaseException:
        context.destroy(linger=0)
        raise


class Door:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        access: AccessFile,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._access, self._say, self._now_s = access, say, now_s
        self._book: Book = access.read()
        self._word = secrets.token_hex(16)
        self._trusted: dict[str, Enrolled] = {}  # for this run only
        self._joins: dict[str, Budget] = {}  # of enrolled keys
        self._probes: dict[str, Budget] = {}
        self._said: set[tuple[str, str]] = set()
        self.refused = 0
        self._authenticator = context.socket(zmq.REP)
        self._authenticator.bind("inproc://zeromq.zap.01")
        self._router = router
        self._monitor: zmq.Socket[bytes] = router.get_monitor_socket(HANDSHAKE_FAILED)
        self._router.setsockopt(zmq.ZAP_DOMAIN, PLAIN)
        self.addresses: list[str] = []
        self.unlisted_addresses: list[str] = []
        self._mine: tuple[str, ...] = ()
        self.public_key = access.keys.public

    def open(self, listen: Sequence[str], unlisted: Sequence[str] = ()) -> None:
        """From now on whatever is bound is encrypted."""
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, self._access.keys.secret.encode())
        self._router.setsockopt(zmq.ZAP_DOMAIN, ENCRYPTED)
        self._router.setsockopt(zmq.RCVHWM, AHEAD)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
        self.addresses = [bind(self._router, endpoint) for endpoint in listen]
        self.unlisted_addresses = [bind(self._router, endpoint) for endpoint in unlisted]
        mine = self._mine = tuple(address.removeprefix("tcp://") for address in self.addresses)
        self._change(lambda book: (replace(book, listening=mine), None))

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """When one of them is readable, `attend`."""
        return self._authenticator, self._monitor

    def trust(self, key: str, name: str, devices: int) -> None:
        """A key of the run's own, which is not written down."""
        now_s = self._now_s()
        self._trusted[key] = Enrolled(key, name, "", now_s, now_s, devices=devices)

    def attend(self) -> None:
        """Answer ZeroMQ's questions about new connections, and hear of those whose handshake failed."""
        while self._authenticator.poll(0):
            version, request, domain, _, _, mechanism, *credentials = self._authenticator.recv_multipart()
            match domain, mechanism, credentials:
                case [b"plain", b"NULL", []]:
                    answer = [b"200", b"OK", self._word.encode()]
                case [b"encrypted", b"CURVE", [key]]:
                    answer = [b"200", b"OK", self._word.encode() + z85.encode(key)]
                case _:
                    answer = [b"400", b"no key", b""]
            self._authenticator.send_multipart([version, request, *answer, b""])
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            why = "it broke off the handshake: it does not encrypt, or is no device at all"
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                why = _HANDSHAKES.get(event["value"], "what it sent is no handshake")
            self._refuse("", "a connection", why)

    def key_of(self, frame: zmq.Frame) -> str | None:
        """Of the connection that this came over; empty if it came in the clear, None if nobody knows."""
        try:
            user = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None
        return user.removeprefix(self._word) if user.startswith(self._word) else None

    def admit(self, key: str, join: Join, present: int) -> Enrolled | Refusal:
        """May the holder of this key join, with so many devices beside those `present` on its connection?"""
        now_s, name = self._now_s(), printable(join.labels[0])[:60]
        book = self._read()
        answer = self._trusted.get(key) or admit(book, key, join.token, name, now_s)[1]
        if isinstance(answer, Enrolled):
            if present + len(join.profiles) > answer.devices:
                answer = TOO_MANY
            elif key in self._trusted:
                pass
            elif not self._joins.setdefault(key, Budget.full(*JOINS, now_s)).take(1, now_s):
                answer = TOO_OFTEN
            else:
                answer = self._enrol(key, join.token, name, now_s, known=book.find(key) is not None)
        if isinstance(answer, Refusal):
            self._refuse(key, name, answer.reason)
        return answer

    def _enrol(self, key: str, token: str, name: str, now_s: float, known: bool) -> Enrolled | Refusal:
        """For good: what the file says at this moment decides, whoever else uses the same invitation."""
        try:
            return self._access.change(lambda book: admit(book, key, token, name, now_s), durable=not known)
        except UserError as error:
            self._say_once("", f"{error}")
            found = self._book.find(key)
            return found if known and found is not None else NOT_WRITTEN

    def may_probe(self, key: str, wanted_bytes: int) -> Refusal | None:
        known, now_s = self._trusted.get(key) or self._read().find(key), self._now_s()
        if known is None or known.revoked_s is not None:
            refusal = NO_INVITATION if known is None else REVOKED
            self._refuse(key, "a device", refusal.reason)
            return refusal
        budget = self._probes.setdefault(key, Budget.full(*PROBED_BYTES, now_s))
        return None if budget.take(wanted_bytes + 1000, now_s) else TOO_OFTEN

    def revoked(self, keys: Iterable[str]) -> set[str]:
        """Those of these keys that may be here no longer."""
        return {device.key for device in self._read().enrolled if device.revoked_s is not None}.intersection(keys)

    def left(self, keys: Iterable[str]) -> None:
        """Devices with these keys have been here until now."""
        gone, now_s = [key for key in keys if key and key not in self._trusted], self._now_s()

        def write(book: Book) -> tuple[Book, None]:
            for key in gone:
                book = seen(book, key, now_s)
            return book, None

        if gone:
            self._change(write)

    def close(self) -> None:
        self._change(lambda book: (replace(book, listening=tuple(set(book.listening) - set(self._mine))), None))
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.close(linger=0)

    def _change(self, how: Callable[[Book], tuple[Book, None]]) -> None:
        try:
            self._access.change(how, durable=False)
        except UserError as error:
            self._say_once("", f"{error}")

    def _read(self) -> Book:
        """A file that cannot be read changes nothing: those who were in stay in, nobody else comes."""
        try:
            self._book = self._access.read()
        except UserError as error:
            self._say_once("", f"{error}")
        return self._book

    def _refuse(self, key: str, name: str, reason: str) -> None:
        self.refused += 1
        who = f"{name} (key {fingerprint(key)})" if key else name
        self._say_once(key, f"refused {who}: {reason}", reason)

    def _say_once(self, key: str, text: str, reason: str = "") -> None:
        about = (key, reason or text)
        if about in self._said or len(self._said) > LINES:
            return
        self._said.add(about)
        self._say(text if len(self._said) <= LINES else "refused many; no more of them are logged in this run")
