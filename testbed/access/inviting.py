"""`cleave invite`: records an invitation, and shows it as a link, a command and a QR code."""

from __future__ import annotations

import io
import secrets
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import segno

from agent.identity.invitation import MAX_ADDRESSES, Invitation, check_host_port
from agent.protocol.errors import UserError
from ps.access.access_file import AccessFile
from ps.access.access_list import TOKEN_BYTES, AccessList, invite
from testbed.access.releases import trusted_signer
from testbed.access.signing import read_signer

OWN_ADDRESSES = 3  # most addresses of this machine in a link: a QR code must stay small enough to scan
EVERYWHERE = ("0.0.0.0", "[::]", "*")


@dataclass(frozen=True, slots=True)
class Invited:
    id: str
    link: str
    uses: int
    expires_s: float

    @property
    def command(self) -> str:
        return f"python -m agent --invitation {shlex.quote(self.link)}"

    def qr_code(self) -> str:
        return qr_code(self.link)


def qr_code(text: str) -> str:
    """QR code for a terminal, two rows of squares per line."""
    out = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(out, compact=True, border=2)
    return out.getvalue()


def new_invitation(
    access: AccessFile,
    uses: int,
    lifetime_s: float,
    given: Sequence[str],
    enrol_port: int = 0,
    signer: str | None = None,
) -> Invited:
    """`enrol_port`: where devices present the token, if not at the server's own port. `signer`: whose releases the
    device may install; by default the signer that the server trusts, if any."""
    named = read_signer(signer) if signer else trusted_signer(access.path.parent)
    addresses = reachable(access.read(), given)
    token, id_, now_s = secrets.token_urlsafe(TOKEN_BYTES), secrets.token_hex(3), time.time()

    def write(access_list: AccessList) -> tuple[AccessList, None]:
        return invite(access_list, id_, token, uses, lifetime_s, now_s), None

    access.change(write)
    port = enrol_port or access.read().enrolling or None
    link = Invitation(tuple(addresses), access.keys.public, token, now_s + lifetime_s, port, named).link
    return Invited(id_, link, uses, now_s + lifetime_s)


def reachable(access_list: AccessList, given: Sequence[str]) -> list[str]:
    """Addresses where a device may find the server: those given, or those where a server listens now."""
    ports = [address.rpartition(":")[2] for address in access_list.listening]
    if given:
        addresses = [_with_port(address, ports) for address in given]
    elif access_list.listening:
        addresses = [found for address in access_list.listening for found in _seen_from_elsewhere(address)]
    else:
        raise UserError(
            "no server listens for invited devices; start one with `cleave run SCENARIO --listen tcp://0.0.0.0:5555`, "
            "or say where one will be: --address HOST:PORT"
        )
    if len(addresses) > MAX_ADDRESSES:
        raise UserError(f"{len(addresses)} addresses; an invitation takes at most {MAX_ADDRESSES}")
    return [check_host_port(address) for address in addresses]


def _with_port(address: str, ports: Sequence[str]) -> str:
    address = address.removeprefix("tcp://")
    if ":" in address and not address.endswith("]"):
        return address
    if len(set(ports)) != 1:
        raise UserError(f"--address {address} has no port, and it is not known which is meant; write {address}:5555")
    return f"{address}:{ports[0]}"


def _seen_from_elsewhere(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    if host not in EVERYWHERE:
        return [address]
    return [f"{own}:{port}" for own in own_addresses()] or [f"127.0.0.1:{port}"]


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine, the one of the default route first."""
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith(("127.", "169.254."))
    ]
    outside = _address_outside()
    return sorted(dict.fromkeys(found), key=lambda address: address != outside)[:OWN_ADDRESSES]


def _address_outside() -> str:
    """Sends nothing: connecting a datagram socket only chooses its own address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
