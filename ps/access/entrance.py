"""The entrance: HELLO in, TICKET or REFUSED out. Runs in its own thread, with its own ZeroMQ context and sockets.

Clients that are not admitted reach only this thread, and cost at most a small share of a core and a few MiB. On this
machine every client gets a ticket, unencrypted; from elsewhere, over an encrypted connection, only those whose token
enrols their key. The thread also answers ZeroMQ's ZAP requests for the data endpoints, and cuts connections that do not
join (`ps/access/guard.py`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from agent.protocol.wire import Hello, Refused, Ticket, VersionMismatch, WireError, decode, encode
from ps.access.admission import NOT_WRITTEN, ConnectionAdmission, NotNow, Refusals
from ps.access.caller_sockets import CallerSocket, CallerSockets
from ps.access.guard import Guard
from ps.access.listening import HANDSHAKE_S
from ps.access.relay import LOCAL, LOCAL_CALLS, REMOTE, REMOTE_CALLS, Relay

log = logging.getLogger(__name__)

FRAMES = 8
MESSAGES_PER_TURN = 64
MOST_WAITING = 1024  # connections that wait to be let in; the guard (ps/access/guard.py) cuts the oldest before
# Share of a core that unknown clients may cost, and the burst: beyond that this thread sleeps, and they wait.
SHARE, AT_ONCE_S = 0.1, 0.05
LOOK_S, IDLE_S = 0.02, 0.5  # interval between checks of connections that have not joined; and if there are none

SAY_HELLO = Refused("this is the entrance: say HELLO first, and join where the ticket says", final=False)


class Questions:
    """ZeroMQ's requests whether to let new connections in (ZAP).

    One that cannot be decided yet waits here. The protocol's own answer, "try again" (status 300), makes libzmq leave
    the connection open and silent until its handshake times out, and by then its ticket has expired."""

    def __init__(
        self, socket: zmq.Socket[bytes], user_id: Callable[[bytes, bytes, Sequence[bytes]], bytes | None]
    ) -> None:
        """`user_id`: the User-Id of a connection; None to refuse it; NotNow to ask again later."""
        self.socket = socket
        self._user_id = user_id
        self._waiting: deque[tuple[float, list[bytes]]] = deque()  # until when, and the request

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def answer(self, now_s: float) -> bool:
        """Answer new and waiting requests, up to MESSAGES_PER_TURN of each. True if any was not let in."""
        old = [self._waiting.popleft() for _ in range(min(MESSAGES_PER_TURN, len(self._waiting)))]
        new: list[tuple[float, list[bytes]]] = []
        while len(new) < MESSAGES_PER_TURN and self.socket.poll(0):
            new.append((now_s + HANDSHAKE_S, self.socket.recv_multipart()))
        return sum([not self._answered(frames, until_s, now_s) for until_s, frames in (*old, *new)]) > 0

    def _answered(self, frames: list[bytes], until_s: float, now_s: float) -> bool:
        """Whether this connection is let in."""
        who, _, version, request, domain, _, _, mechanism, *credentials = frames
        try:
            user = self._user_id(domain, mechanism, credentials)
            answer = [b"400", b"not known here", b""] if user is None else [b"200", b"OK", user]
        except NotNow:
            if now_s < until_s and len(self._waiting) < MOST_WAITING:
                self._waiting.append((until_s, frames))
                return False
            user, answer = None, [b"300", b"try again", b""]
        except Exception:  # without an answer this connection would never get in
            log.exception("the entrance cannot decide about a connection")
            user, answer = None, [b"300", b"try again", b""]
        self.socket.send_multipart([who, b"", version, request, *answer, b""])
        return user is not None


class Entrance:
    def __init__(
        self,
        admission: ConnectionAdmission,
        refusals: Refusals,
        guard: Guard,
        questions: zmq.Socket[bytes],
        local: socket.socket,
        remote: Sequence[socket.socket],
        secret: str,
        data_port: int,
        bundle: Callable[[], tuple[str, str]],
    ) -> None:
        """`questions`: ZAP requests of the data endpoints. `local`, `remote`: where callers connect, unencrypted or
        encrypted with the server's `secret` key. `data_port`: where a ticket is valid."""
        self.refused = 0  # callers, and malformed messages
        self._admission, self._refusals, self._guard = admission, refusals, guard
        self._data_port, self._bundle = data_port, bundle
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 1 << 13)  # three per call; closed ones count for a moment
        own_questions = self._context.socket(zmq.ROUTER)
        own_questions.bind("inproc://zeromq.zap.01")
        self._questions = [Questions(own_questions, admission.entrance_user_id), Questions(questions, self._let_in)]
        self._caller_sockets = [CallerSockets(self._context), CallerSockets(self._context, secret)]
        in_the_clear, encrypted = self._caller_sockets
        now_s = time.monotonic()
        self._relays = [Relay(local, in_the_clear.open, refusals, LOCAL, LOCAL_CALLS, now_s)]
        self._relays += [Relay(there, encrypted.open, refusals, REMOTE, REMOTE_CALLS, now_s) for there in remote]
        guard.enrolled = len(admission.read().enrolled)
        self._waker, self._woken = socket.socketpair()
        self._stopping = False
        self._debt_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="entrance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        elif self._thread.ident is None:
            self._close()

    def _serve(self) -> None:
        turned_s = time.monotonic()
        try:
            while not self._stopping:
                try:
                    turned_s = self._turn(turned_s)
                except Exception:
                    log.exception("the entrance failed at one event")
                    time.sleep(0.1)
        finally:
            self._close()

    def _turn(self, turned_s: float) -> float:
        begun_s, strangers = time.thread_time(), False
        poller = zmq.Poller()
        poller.register(self._woken.fileno(), zmq.POLLIN)
        for source in (*(questions.socket for questions in self._questions), self._guard.monitor):
            poller.register(source, zmq.POLLIN)
        for relay in self._relays:
            relay.register(poller)
        waiting = any(relay.waiting for relay in self._relays) or any(some.waiting for some in self._questions)
        soon = self._guard.busy or waiting
        ready = dict(poller.poll(int(1000 * (LOOK_S if soon else IDLE_S))))
        now_s = time.monotonic()
        for relay in self._relays:
            try:
                for caller_socket in relay.speaking(ready):
                    self._listen(caller_socket)
                strangers |= relay.attend(ready, now_s)
            except Exception:  # ZAP requests must be answered whatever happens here
                log.exception("a relay of the entrance failed at one event")
        own, of_data_endpoints = self._questions
        own.answer(now_s)
        strangers |= of_data_endpoints.answer(now_s)
        strangers |= self._guard.attend()
        spent_s = time.thread_time() - begun_s if strangers else 0.0
        self._debt_s = max(0.0, self._debt_s + spent_s - SHARE * (now_s - turned_s))
        if self._debt_s > AT_ONCE_S and not self._stopping:
            self._rest(min(0.1, (self._debt_s - AT_ONCE_S) / SHARE))
        return now_s

    def _rest(self, seconds: float) -> None:
        """Make unknown clients wait, but keep checking what they send: bytes arrive even if we do not read them."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            self._guard.look(time.monotonic())

    def _let_in(self, domain: bytes, mechanism: bytes, credentials: Sequence[bytes]) -> bytes | None:
        """Admission to the data endpoints."""
        if not self._guard.hear():  # it must know each connection before the server's thread does
            raise NotNow
        if (user := self._admission.user_id(domain, mechanism, credentials)) is not None:
            self._guard.let_in(time.monotonic(), self._admission.line)
            self._guard.enrolled = len(self._admission.read().enrolled)
        return user

    def _listen(self, caller_socket: CallerSocket) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = caller_socket.zmq_socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._hear(caller_socket, frames)

    def _hear(self, caller_socket: CallerSocket, frames: Sequence[zmq.Frame]) -> None:
        caller = self._admission.caller(frames[0])
        answer: Refused | Ticket = SAY_HELLO
        try:
            if len(frames) > FRAMES:
                raise WireError(f"{len(frames)} frames, at most {FRAMES} are allowed")
            match decode(frames):
                case Hello() as hello:
                    if caller_socket.greeted:  # many tickets for one caller would displace those of others
                        self.refused += 1
                        return
                    caller_socket.greeted = True
                    answer = self._admit(caller.key if caller else "", hello)
        except VersionMismatch as error:
            answer = Refused(f"{error}; update the agent", True, *self._bundle())
        except WireError as error:
            answer = Refused(str(error), final=False)
        self.refused += isinstance(answer, Refused)
        with contextlib.suppress(zmq.ZMQError):
            caller_socket.zmq_socket.send_multipart(encode(answer), zmq.NOBLOCK)

    def _admit(self, key: str, hello: Hello) -> Refused | Ticket:
        if not key:
            return Ticket(self._data_port, self._admission.ticket())
        refusal = self._admission.hello(key, hello)
        return Ticket(self._data_port) if refusal is None else Refused(refusal.reason, final=refusal != NOT_WRITTEN)

    def _close(self) -> None:
        for relay in self._relays:
            relay.close()
        self._guard.close()
        for questions in self._questions:
            questions.socket.close(linger=0)
        self._context.term()
        for sockets in self._caller_sockets:
            sockets.close()
        self._waker.close()
        self._woken.close()
