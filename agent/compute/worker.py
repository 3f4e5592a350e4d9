"""The agent's main loop: join, receive, compute, return; rejoin when the connection breaks; leave when asked to.

Download, compute and upload overlap. ZeroMQ's own thread moves bytes, the protocol thread (agent/compute/session.py)
handles messages, the compute thread (agent/compute/computer.py) computes. The protocol thread never computes, so
heartbeats continue during the longest block. While a chunk of a streamed block waits or is computed, nothing more is
read: one chunk waits in ZeroMQ, one is in flight, and TCP backpressure stops the sender, so memory stays within three
chunks.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from agent.compute.computer import PART_S
from agent.compute.kernels import Kernel
from agent.compute.session import Owner, Session, Stop, Tally, why_leave
from agent.identity.keys import Credentials, Curve
from agent.owner.rules import Decision
from agent.protocol.connection import NOT_THE_SERVER, Connection
from agent.protocol.entrance import MAX_BYTES, PATIENCE_S, EntranceConnection
from agent.protocol.incoming import InboundLimit, Unfinished
from agent.protocol.units import format_duration
from agent.protocol.wire import MAX_NAME_BYTES, VERSION, Goodbye, Hello, Join, Leave, Refused

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 30.0)
EXCUSE_S = 3.0  # time limit for telling the server why we do not join
UNKNOWN_TRIES = 3  # a server that briefly cannot read its own file rejects our key, too
SUSPENDED_AGAIN_S = 600.0  # a suspended device asks again at least this often: the suspension may have been lifted
OF_THE_NETWORK = frozenset({"only_on_wifi", "data_cap_a_day"})
RESTART, UPDATE = 75, 76  # exit codes for the launcher: start again; start again with another bundle


class Worker:
    def __init__(
        self,
        endpoints: Sequence[str],
        join: Join,
        kernel: Kernel,
        stop: Stop,
        owner: Owner,
        *,
        once: bool = False,
        curve: Curve | None = None,
        token: str = "",
        entrances: Sequence[str] | None = None,
        on_welcome: Callable[[], None] | None = None,
        tell: Callable[[str, str, float | None], None] = lambda state, why, until_s: None,
    ) -> None:
        """`endpoints` of one server are tried in turn. Without keys (`curve`), or with a `token`, the worker first asks
        for admission at the `entrances`, by default the endpoints themselves. `on_welcome` is called on admission.
        `tell` is called on every change with what the agent does, why, and for how many seconds."""
        self._endpoints, self._join, self._stop, self._owner, self._once = endpoints, join, stop, owner, once
        self._entrances, self._token = list(entrances or endpoints), token
        self._endpoint, self._entrance = endpoints[0], self._entrances[0]
        self._unknown = 0  # consecutive times that the server did not know our key
        self._curve, self._on_welcome, self._tell = curve, on_welcome, tell
        self._kernel, self._part_flops = kernel, PART_S * float(join.profiles["flops"][0])
        self._said_why = False  # the server was told why we do not work
        self._broke = ""  # why the last session ended, if the server did not say
        self.outdated: Refused | None = None  # the refusal of a server with a newer protocol version
        self.tally = Tally()

    @property
    def endpoint(self) -> str:
        """The server's endpoint that was tried last."""
        return self._endpoint

    def run(self) -> int:
        """Serve until told to stop; return the exit code. 2: the server refused this device."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        backoff_s = BACKOFF_S[0]
        turns = itertools.cycle(zip(self._endpoints, self._entrances, strict=True))
        try:
            while not self._stop.requested:
                if self._owner.restart:
                    return RESTART
                if not self._owner.decision.may_work:
                    self._wait_for_permission(context)
                    backoff_s = BACKOFF_S[0]
                    continue
                served, begun = self.tally.blocks, time.monotonic()
                self._endpoint, self._entrance = next(turns)
                self._tell("joining", self._endpoint, None)
                ending = self._session(context)
                if isinstance(ending, Refused) and ending.final:
                    log.error("the server at %s refused this device: %s", self._endpoint, ending.reason)
                    self._tell("refused", ending.reason, None)
                    return UPDATE if self.outdated else 2
                if self._stop.requested or (self._once and isinstance(ending, Goodbye)):
                    break
                if self._must_leave() is not None:
                    continue
                if self.tally.blocks > served or time.monotonic() - begun > BACKOFF_S[1]:
                    backoff_s = BACKOFF_S[0]
                wait_s = backoff_s * random.uniform(0.5, 1.0)
                state, why = "waiting", ending.reason if ending is not None else self._broke
                if isinstance(ending, Refused) and ending.until_s is not None:
                    if self._once:
                        log.error("suspended by the server: %s", why)
                        self._tell("suspended by the server", why, ending.until_s)
                        return 2
                    wait_s = max(wait_s, min(ending.until_s, SUSPENDED_AGAIN_S))
                    state = "suspended by the server"
                    log.warning("suspended by the server: %s; joining again in %s", why, format_duration(wait_s))
                else:
                    log.info("joining again in %.1f s", wait_s)
                self._tell(state, why, wait_s)
                self._stop.wait(wait_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])
            return 0
        finally:
            context.destroy(linger=500)

    def _wait_for_permission(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Wait until the owner's rules change their answer or the owner stops the agent. Tell the server why, unless it
        knows already or the rule restricts the network."""
        decision = self._owner.decision
        log.info("not working: %s%s", decision.reason, _until(decision))
        self._tell("suspended", decision.reason, decision.until_s)
        if not self._said_why and not decision.broken & OF_THE_NETWORK:
            no_devices = np.empty(0, "<u4")
            excuse = Leave(no_devices, decision.reason, decision.until_s, self._join.labels[0])
            entered = self._enter(context, EXCUSE_S, lambda: self._stop.requested)
            if isinstance(entered, tuple):
                where, credentials = entered
                Connection(context, where, excuse, credentials=credentials, count=self._owner.count).close(EXCUSE_S)
        self._said_why = False
        poller = zmq.Poller()
        for source in (self._stop.fileno(), self._owner.fileno()):
            poller.register(source, zmq.POLLIN)
        while not self._stop.requested and not self._owner.restart and self._owner.decision.broken == decision.broken:
            poller.poll(60_000)
            self._owner.heard()

    def _session(self, context: zmq.Context[zmq.Socket[bytes]]) -> Refused | Goodbye | None:
        """Run one session; return the server's last message, None if the connection broke."""
        self._broke = f"no word from {self._endpoint}"
        entered = self._enter(context, PATIENCE_S, lambda: self._must_leave() is not None)
        if not isinstance(entered, tuple):
            return entered
        session = Session(
            context,
            *entered,
            self._join,
            self._kernel,
            self._part_flops,
            self._stop,
            self._owner,
            self.tally,
            self._welcomed,
        )
        ending = session.run()
        self._said_why, self._broke, self.outdated = session.said_why, session.broke, session.outdated
        return self._turned_away(session.turned_away) if session.turned_away else ending

    def _welcomed(self, run: str) -> None:
        log.info("joined %s, run %s", self._endpoint, run)
        self._tell("working", run, None)
        self._token, self._unknown = "", 0  # from here on our key is enough
        if self._on_welcome is not None:
            self._on_welcome()

    def _enter(
        self, context: zmq.Context[zmq.Socket[bytes]], patience_s: float, give_up: Callable[[], bool]
    ) -> tuple[str, Credentials] | Refused | None:
        """Where to join and with which credentials: ask the entrance, unless our key is enough. None: no answer."""
        if self._curve is not None and not self._token:
            return self._endpoint, self._curve
        hello = Hello(self._join.labels[0][:MAX_NAME_BYTES], self._token)
        inbound = InboundLimit(
            self._entrance, self._curve is not None, _too_long_an_answer, lambda: None, self._owner.count
        )
        entrance = EntranceConnection(context, self._entrance, hello, self._curve, self._owner.count)
        poller, deadline_s = zmq.Poller(), time.monotonic() + patience_s
        for source in (entrance.socket, self._stop.fileno(), self._owner.fileno()):
            poller.register(source, zmq.POLLIN)
        inbound.start()
        try:
            while not give_up() and not self._owner.restart and (left_s := deadline_s - time.monotonic()) > 0:
                events = dict(poller.poll(int(1000 * min(left_s, 0.5)) + 1))
                if self._owner.fileno() in events:
                    self._owner.heard()
                if inbound.cut:
                    log.warning("%s: %s", self._entrance, inbound.cut)
                    return None
                match entrance.answer():
                    case (where, credentials):
                        return where or self._endpoint, credentials
                    case Refused() as refused:
                        log.info("the server said: %s", refused.reason)
                        if (entrance.their_version or 0) > VERSION:
                            self.outdated = refused
                        return refused
                if self._curve is not None and entrance.turned_away:
                    return self._turned_away(NOT_THE_SERVER)
            log.info("no word from %s: is the server running?", self._entrance)
            return None
        finally:
            inbound.end()
            entrance.close()

    def _turned_away(self, why: str) -> Refused | None:
        """The handshake failed. Final once the server has rejected our key UNKNOWN_TRIES times in a row."""
        if why == NOT_THE_SERVER:
            log.warning("%s is not the server of the invitation (it has not its key), or is too busy", self._endpoint)
            return None
        if self._curve is None:
            return None  # a ticket is valid for one connection: ask for another
        self._unknown += 1
        log.warning("the server at %s does not know this device's key, or has revoked it", self._endpoint)
        if self._unknown < UNKNOWN_TRIES:
            return None
        return Refused("it does not know this device's key, or has revoked it: ask for a new invitation", final=True)

    def _must_leave(self) -> Leave | None:
        return why_leave(self._stop, self._owner, np.arange(len(self._join.profiles), dtype="<u4"))


def _too_long_an_answer(unfinished: Unfinished) -> str:
    too_much = unfinished.arrived_bytes > 16 * MAX_BYTES
    return "it sends more than an answer, and was cut off" if too_much else ""


def _until(decision: Decision) -> str:
    return "" if decision.until_s is None else f"; for another {format_duration(decision.until_s)}"
