"""Which server an agent joins, and how: as an invitation says, as it remembers, or in the clear on its own machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.errors import UserError
from agent.files import locked, private_folder
from agent.invitation import parse_link, recall, remember, welcomed
from agent.keys import Curve, agent_folder, fingerprint, own_keys
from agent.probe import check_address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    endpoints: list[str]  # of one server, to be tried in turn
    curve: Curve | None  # None: in the clear
    token: str
    welcomed: Callable[[], None]


@contextmanager
def find_line(address: str | None, link: str | None, state: str | None) -> Iterator[Line]:
    """Holds the device's keys as long as it is used: two agents with one identity would drive each other out."""
    if address is not None:
        check_address(address)
        if not re.match(r"tcp://(127\.|localhost:|\[::1\])", address):
            log.warning("servers take devices from other machines only with an invitation: --invitation LINK")
        yield Line([address], None, "", lambda: None)
        return
    given = parse_link(link) if link is not None else None
    folder = private_folder(Path(state) if state else agent_folder())
    with locked(folder / "agent.lock", wait=False) as mine:
        if not mine:
            raise UserError(f"another agent uses the keys in {folder}; stop it, or give this one its own with --state")
        if given is not None:
            remember(folder, given)
        invitation = given or recall(folder)
        if invitation is None:
            raise UserError("which server? Give --invitation LINK once, or --ps ADDRESS for a server on this machine")
        keys = own_keys(folder)
        log.info("this device's key is %s", fingerprint(keys.public))
        curve = Curve(invitation.server_key, keys)
        yield Line(invitation.endpoints, curve, invitation.token, lambda: welcomed(folder, invitation))
