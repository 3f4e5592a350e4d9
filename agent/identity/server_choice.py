"""Picks the server to join: from an invitation, as remembered, or unencrypted on this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.identity.files import locked, private_folder
from agent.identity.invitation import parse_link, recall, remember, welcomed
from agent.identity.keys import Curve, agent_folder, fingerprint, own_keys
from agent.identity.update_state import pin_signer
from agent.measure.link import check_address
from agent.protocol.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    endpoints: list[str]  # of one server, to be tried in turn
    curve: Curve | None  # None: unencrypted
    token: str
    entrances: list[str]  # where to ask for admission, one per endpoint
    welcomed: Callable[[], None]


@contextmanager
def find_line(address: str | None, link: str | None, state: str | None, trust_signer: bool = False) -> Iterator[Line]:
    """Locks the device's keys while in use: two agents with one identity would displace each other at the server.
    `trust_signer`: replace the pinned signer with the invitation's."""
    if address is not None:
        check_address(address)
        if not re.match(r"tcp://(127\.|localhost:|\[::1\])", address):
            log.warning("servers take devices from other machines only with an invitation: --invitation LINK")
        yield Line([address], None, "", [address], lambda: None)
        return
    given = parse_link(link) if link is not None else None
    folder = private_folder(Path(state) if state else agent_folder())
    with locked(folder / "agent.lock", wait=False) as mine:
        if not mine:
            raise UserError(f"another agent uses the keys in {folder}; stop it, or give this one its own with --state")
        if given is not None:
            pin_signer(folder, given.signer, trust_signer)
            remember(folder, given)
        invitation = given or recall(folder)
        if invitation is None:
            raise UserError("which server? Give --invitation LINK once, or --ps ADDRESS for a server on this machine")
        keys = own_keys(folder)
        log.info("this device's key is %s", fingerprint(keys.public))
        curve = Curve(invitation.server_key, keys)
        yield Line(
            invitation.endpoints, curve, invitation.token, invitation.entrances, lambda: welcomed(folder, invitation)
        )
