"""Which connections are accepted, and which keys an invitation enrols. Runs in the entrance's thread.

A shell around `ps/access/access_list.py`. Unknown and revoked keys are refused during ZeroMQ's handshake (ZAP), before
anything that they send is read. The User-Id of every message names its connection, behind a prefix that only this
process knows: a client may claim any User-Id, but it does not know the prefix.

The loopback data endpoint takes passwords: one for the pods of the run, and tickets that the entrance issues, each
valid for one connection and a short time.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from agent.identity.keys import fingerprint
from agent.protocol.errors import UserError
from agent.protocol.wire import Hello, printable
from ps.access.access_file import AccessFile
from ps.access.access_list import NO_INVITATION, AccessList, Budget, Enrolled, Refusal, admit

HANDSHAKES = (
    20.0,
    1.0,
)  # per key: burst, per second; an agent reconnects after half a second, then less often
# Share of the server's time that a key, or all clients of this machine, may cost with messages that are discarded: for
# the rest of the time they are not let in again. And how long that lasts at most: a key, and all clients of this
# machine, honest agents among them.
DISCARDED_SHARE, MOST_SHUT_OUT_S, MOST_SHUT_OUT_HERE_S = 0.1, 60.0, 5.0
LINES = 200  # most refusals logged per run
LOCAL, ENCRYPTED = b"local", b"encrypted"  # ZAP domains of the endpoints
NOT_WRITTEN = Refusal("the server cannot record new devices at present; try again in a moment")
ENROL_WAIT_S = 0.25  # for the file's lock, in the entrance's thread; the server's thread may hold it for milliseconds


@dataclass(frozen=True, slots=True)
class Caller:
    """The other end of a connection."""

    key: str  # public; empty: a local, unencrypted connection
    of_the_run: bool  # a pod started by this run
    line: int = 0  # unique number of this connection, whatever its routing id


class NotNow(Exception):
    """The connection may be let in, but not at this moment."""


class Refusals:
    """Logs each reason once per key, up to a limit per run. Shared by both threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.count = 0
        self._say = say
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def refuse(self, key: str, name: str, reason: str) -> None:
        self.count += 1
        who = f"{name} (key {fingerprint(key)})" if key else name
        self.say_once(key, f"refused {who}: {reason}", reason)

    def say_once(self, key: str, text: str, reason: str = "") -> None:
        about = (key, reason or text)
        with self._lock:
            if about in self._said or len(self._said) > LINES:
                return
            self._said.add(about)
            many = len(self._said) > LINES
        self._say("refused many; no more of them are logged in this run" if many else text)


class ConnectionAdmission:
    def __init__(
        self,
        access: AccessFile | None,
        tickets: Tickets,
        refusals: Refusals,
        now_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`access`: an instance that only this thread uses."""
        self._access, self._tickets, self._refusals, self._now_s = access, tickets, refusals, now_s
        self._monotonic_s = monotonic_s
        self._secret_prefix = secrets.token_hex(16)
        self.line = 0  # number of the latest connection that was let in
        self._latest = AccessList()  # the last one that could be read
        self._access_list: AccessList | None = None
        self._allowed: frozenset[str] = frozenset()  # keys that may connect, according to that list
        self._handshakes: dict[str, Budget] = {}  # by key; enrolled keys only
        self._shut_out: dict[str, float] = {}  # keys, and "" for this machine -> until when
        self.trusted: dict[str, Enrolled] = {}  # keys of this run only

    def trust(self, key: str, name: str, devices: int) -> None:
        """Accept a key of this run, without writing it to the access file."""
        now_s = self._now_s()
        self.trusted[key] = Enrolled(key, name, "", now_s, now_s, devices=devices)

    # ---- ZAP requests

    def user_id(self, domain: bytes, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        """User-Id of a new connection to the data endpoints; None: refused."""
        match domain, mechanism, credentials:
            case [b"local", b"PLAIN", [_, password]]:
                ticket = password.decode(errors="replace")
                now_s = self._monotonic_s()
                if not self._tickets.is_of_the_run(ticket) and now_s < self._shut_out.get("", 0.0):
                    self._tickets.prolong(ticket, now_s)
                    raise NotNow
                whose = self._tickets.take(ticket, now_s)
                if whose is None:
                    self._refusals.refuse("", "a connection", "it has no ticket from the entrance")
                    return None
                return self._user("r" if whose == POD else "t")
            case [b"encrypted", b"CURVE", [raw]]:
                key = z85.encode(raw).decode()
                if self.is_welcome(key):
                    self._count_handshake(key)
                    return self._user("r" if key in self.trusted else "k", key)
                self._refusals.refuse("", "a connection", "the server does not know its key, or has revoked it")
        return None

    def _count_handshake(self, key: str) -> None:
        """Limit handshakes per key: each makes a connection that may stay silent for seconds, under a routing id that
        the client may choose."""
        self._mind_shut_out(key)
        now_s = self._monotonic_s()
        budget = self._handshakes.setdefault(key, Budget.full(*HANDSHAKES, now_s))
        if key not in self.trusted and not budget.take(1, now_s):
            self._refusals.say_once(key, f"a connection (key {fingerprint(key)}) waits: it connects too often")
            raise NotNow

    def charge(self, caller: Caller, seconds: float) -> float:
        """For the server's thread: this caller's messages have cost it that much time for nothing. Returns for how long
        its key, or this machine, gets no new connection."""
        if caller.of_the_run:
            return 0.0
        most_s = MOST_SHUT_OUT_S if caller.key else MOST_SHUT_OUT_HERE_S
        lasts_s = min(most_s, seconds / DISCARDED_SHARE)
        now_s = self._monotonic_s()
        self._shut_out[caller.key] = max(self._shut_out.get(caller.key, 0.0), now_s + lasts_s)
        return lasts_s

    def _mind_shut_out(self, key: str) -> None:
        if self._monotonic_s() < self._shut_out.get(key, 0.0):
            raise NotNow

    def entrance_user_id(self, domain: bytes, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        """User-Id of a new connection to the entrance; None: refused."""
        match domain, mechanism, credentials:
            case [b"encrypted", b"CURVE", [raw]]:
                return self._user("k", z85.encode(raw).decode())
        return None

    def _user(self, kind: str, key: str = "") -> bytes:
        self.line += 1
        return f"{self._secret_prefix}{self.line:016x}{kind}{key}".encode()

    def caller(self, frame: zmq.Frame) -> Caller | None:
        """The connection that this frame came from; None if unknown."""
        try:
            user = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None
        if not user.startswith(self._secret_prefix):
            return None
        rest = user[len(self._secret_prefix) :]
        return Caller(rest[17:], rest[16] == "r", int(rest[:16], 16))

    def is_welcome(self, key: str) -> bool:
        if key in self.trusted:
            return True
        access_list = self.read()
        if access_list is not self._access_list:
            self._access_list, self._allowed = (
                access_list,
                frozenset(d.key for d in access_list.enrolled if d.revoked_s is None),
            )
        return key in self._allowed

    def read(self) -> AccessList:
        """The present access list. If the file cannot be read, the last one stays in force."""
        if self._access is None:
            return AccessList()
        try:
            self._latest = self._access.read()
        except UserError as error:
            self._refusals.say_once("", f"{error}")
        return self._latest

    # ---- at the entrance

    def ticket(self) -> str:
        return self._tickets.issue(self._monotonic_s())

    def hello(self, key: str, hello: Hello) -> Refusal | None:
        """Why a device with this key, and this token if it needs one, may not join; None if it may."""
        if key in self.trusted:
            return None
        name, now_s, access_list = printable(hello.name)[:60], self._now_s(), self.read()
        answer = admit(access_list, key, hello.token, name, now_s)[1]
        if isinstance(answer, Enrolled) and access_list.find(key) is None:
            answer = self._enrol(key, hello.token, name, now_s)
        if isinstance(answer, Enrolled):
            return None
        self._refusals.refuse(key, name, answer.reason)
        return answer

    def _enrol(self, key: str, token: str, name: str, now_s: float) -> Enrolled | Refusal:
        """Enrol the key for good. The file's contents at this moment decide, even if other devices use the same
        invitation."""
        if self._access is None:
            return NO_INVITATION
        try:
            return self._access.change(
                lambda access_list: admit(access_list, key, token, name, now_s), wait_s=ENROL_WAIT_S
            )
        except UserError as error:
            self._refusals.say_once("", f"{error}")
            return NOT_WRITTEN


# ---- tickets

TICKET_S = 10.0  # a device uses its ticket at once
MOST = 2048  # at the same time; the oldest are dropped first. The entrance accepts fewer: 128 at once, 100 per second
POD, TICKET = "pod", "ticket"  # kinds of passwords


class Tickets:
    """Used by the entrance's thread and by the code that starts pods."""

    def __init__(self) -> None:
        self.of_the_run = secrets.token_urlsafe(24)
        self._until_s: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def issue(self, now_s: float) -> str:
        password = secrets.token_urlsafe(16)
        with self._lock:
            self._until_s[password] = now_s + TICKET_S
            while len(self._until_s) > MOST or next(iter(self._until_s.values())) <= now_s:
                self._until_s.popitem(last=False)
        return password

    def prolong(self, password: str, now_s: float) -> None:
        """A ticket that could not be used now is as good as new."""
        with self._lock:
            if self._until_s.pop(password, 0.0) > now_s:
                self._until_s[password] = now_s + TICKET_S

    def is_of_the_run(self, password: str) -> bool:
        return hmac.compare_digest(password.encode(errors="replace"), self.of_the_run.encode())

    def take(self, password: str, now_s: float) -> str | None:
        """The kind of this password; None if it is unknown or has expired."""
        if self.is_of_the_run(password):
            return POD
        with self._lock:
            until_s = self._until_s.pop(password, 0.0)
        return TICKET if until_s > now_s else None
