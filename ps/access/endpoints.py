"""Opens every listening socket: the entrance for unknown clients, and the ROUTER that only admitted ones reach."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from ps.access.access_file import AccessFile
from ps.access.admission import ConnectionAdmission, Refusals, Tickets
from ps.access.entrance import Entrance
from ps.access.guard import Guard
from ps.access.joining import JoinAdmission
from ps.access.listening import (
    AddressError,
    address_of,
    bind,
    bind_local,
    encrypt,
    listen_beside,
    listen_local,
    new_router,
    port_of,
)
from ps.access.routing_ids import RoutingIds
from ps.outside import Outside

IO_THREADS = 2  # one thread encrypts about 1 GB/s


class Watch(Protocol):
    """Runs beside the server's loop: admits connections, and cuts those that do not join."""

    refused: int

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Endpoints:
    context: zmq.Context[zmq.Socket[bytes]]
    router: zmq.Socket[bytes]  # of admitted connections
    entrance: Watch
    routing_ids: RoutingIds  # of the router's connections
    guard: Guard
    admission: ConnectionAdmission
    join_admission: JoinAdmission
    tickets: Tickets
    refusals: Refusals
    public_key: str  # empty if nothing is encrypted
    address: str  # the entrance on this machine
    data_address: str  # where its tickets are valid
    public_addresses: list[str]  # encrypted, for invited devices
    unlisted_addresses: list[str]  # encrypted, but not named in invitations
    enrolment_addresses: list[str]  # the entrances next to the public addresses


def open_endpoints(
    host: str,
    port: int,
    listen: Sequence[str],
    unlisted: Sequence[str],
    access: AccessFile | None,
    say: Callable[[str], None],
    bundle: Callable[[], tuple[str, str]],
    outside: Outside,
) -> Endpoints:
    """Open all endpoints, or none if one of them fails."""
    encrypted = [*listen, *unlisted]
    if encrypted and access is None:
        raise AddressError(f"cannot listen on {encrypted[0]}: nothing says who may join there")
    if not encrypted:
        access = None
    listeners: list[socket.socket] = []
    context, router = new_router(io_threads=IO_THREADS if encrypted else 1)
    try:
        listeners.append(listen_local(host, port))
        questions = context.socket(zmq.ROUTER)
        questions.bind("inproc://zeromq.zap.01")
        tickets, refusals = Tickets(), Refusals(say)
        routing_ids, guard = RoutingIds(context, router), Guard(router, refusals, outside)
        data_address = bind_local(router, host)
        guard.local_port = port_of(data_address)
        public: list[str] = []
        hidden: list[str] = []
        if access is not None:
            encrypt(router, access.keys.secret)
            public, hidden = ([bind(router, endpoint) for endpoint in some] for some in (listen, unlisted))
            listeners += [listen_beside(address) for address in public]
        own = access.impatient() if access is not None else None  # for the entrance's thread
        admission = ConnectionAdmission(own, tickets, refusals)
        join_admission = JoinAdmission(access, admission, refusals)
        enrolment = [address_of(listener) for listener in listeners[1:]]
        if public:
            join_admission.listens(public, port_of(enrolment[0]))
        secret = access.keys.secret if access is not None else ""
        local, *remote = listeners
        at = port_of(data_address)
        return Endpoints(
            context=context,
            router=router,
            entrance=Entrance(admission, refusals, guard, questions, local, remote, secret, at, bundle),
            routing_ids=routing_ids,
            guard=guard,
            admission=admission,
            join_admission=join_admission,
            tickets=tickets,
            refusals=refusals,
            public_key=access.keys.public if access is not None else "",
            address=address_of(local),
            data_address=data_address,
            public_addresses=public,
            unlisted_addresses=hidden,
            enrolment_addresses=enrolment,
        )
    except BaseException:
        for listener in listeners:
            listener.close()
        context.destroy(linger=0)
        raise
