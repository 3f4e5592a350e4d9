"""Who may connect, and whom an invitation enrols: the access list, asked by the entrance's thread.

A shell around `ps/access/access_list.py`. Unknown and revoked keys are refused while ZeroMQ shakes hands (ZAP), before
anything that they send is read. The User-Id of all messages of a connection says whose it is, after a word that only
this process knows: a client may claim any User-Id of its own, but it does not know the word.

Passwords for the loopback's data endpoint: one for the pods of the run, and tickets that the entrance gives out,
good for one connection and a short time.
"""

from __future__ import annotations

import hmac
import itertools
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

HANDSHAKES = (20.0, 1.0)  # of one key, at once and a second; an agent comes again after half a second, and then later
LINES = 200  # of refusals, and then no more
LOCAL, ENCRYPTED = b"local", b"encrypted"  # what ZeroMQ calls the endpoints when it asks
NOT_WRITTEN = Refusal("the server cannot write down who joins at present; it may work in a moment")
ENROL_WAIT_S = 0.25  # for the file's lock, in the entrance's thread: the server's own may have it for some milliseconds


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose connection it is."""

    key: str  # public; empty: of this machine, in the clear
    of_the_run: bool  # a pod that this run has started
    line: int = 0  # the number of this connection, which no other ever has, whatever it calls itself


class TooOften(Exception):
    """It may connect, but not now."""


class Refusals:
    """Logged once for each reason and key, and not without end. For both threads."""

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
    ) -> None:
        """`access`: an instance of this thread's own."""
        self._access, self._tickets, self._refusals, self._now_s = access, tickets, refusals, now_s
        self._secret_prefix = secrets.token_hex(16)
        self._lines = itertools.count(1)
        self._latest = AccessList()  # that could be read
        self._access_list: AccessList | None = None
        self._allowed: frozenset[str] = frozenset()  # keys that may connect, by that access list
        self._handshakes: dict[str, Budget] = {}  # by key; only those that are enrolled have one
        self.trusted: dict[str, Enrolled] = {}  # for this run only

    def trust(self, key: str, name: str, devices: int) -> None:
        """A key of the run's own, which is not written down."""
        now_s = self._now_s()
        self.trusted[key] = Enrolled(key, name, "", now_s, now_s, devices=devices)

    # ---- ZeroMQ's questions

    def user_id(self, domain: bytes, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        """Of a new connection to the data endpoints; None: it may not come in."""
        match domain, mechanism, credentials:
            case [b"local", b"PLAIN", [_, password]]:
                whose = self._tickets.take(password.decode(errors="replace"), time.monotonic())
                if whose is None:
                    self._refusals.refuse("", "a connection", "it has no ticket of the entrance")
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
        """Each is a connection that need not say anything for some seconds, under a name that it may have chosen."""
        now_s = time.monotonic()
        budget = self._handshakes.setdefault(key, Budget.full(*HANDSHAKES, now_s))
        if key not in self.trusted and not budget.take(1, now_s):
            self._refusals.refuse(key, "a connection", "it connects too often")
            raise TooOften

    def entrance_user_id(self, domain: bytes, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        """The same of connections to the entrance."""
        match domain, mechanism, credentials:
            case [b"encrypted", b"CURVE", [raw]]:
                return self._user("k", z85.encode(raw).decode())
        return None

    def _user(self, kind: str, key: str = "") -> bytes:
        return f"{self._secret_prefix}{next(self._lines):016x}{kind}{key}".encode()

    def caller(self, frame: zmq.Frame) -> Caller | None:
        """Whose connection this came over; None if nobody knows."""
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
        """A file that cannot be read changes nothing: those who were in stay in, nobody else comes."""
        if self._access is None:
            return AccessList()
        try:
            self._latest = self._access.read()
        except UserError as error:
            self._refusals.say_once("", f"{error}")
        return self._latest

    # ---- at the entrance

    def ticket(self) -> str:
        return self._tickets.issue(time.monotonic())

    def hello(self, key: str, hello: Hello) -> Refusal | None:
        """May the holder of this key join, with this token if it needs one?"""
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
        """For good: what the file says at this moment decides, whoever else uses the same invitation."""
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

TICKET_S = 10.0  # a device that has one joins at once
MOST = 2048  # at the same time; the oldest go first. The entrance accepts 128 at once and 100 a second: fewer
POD, TICKET = "pod", "ticket"  # whose password it is


class Tickets:
    """Used by the thread of the entrance and by those who start pods."""

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

    def take(self, password: str, now_s: float) -> str | None:
        """Whose it is; None if it is nobody's, or was."""
        if hmac.compare_digest(password.encode(errors="replace"), self.of_the_run.encode()):
            return POD
        with self._lock:
            until_s = self._until_s.pop(password, 0.0)
        return TICKET if until_s > now_s else None
