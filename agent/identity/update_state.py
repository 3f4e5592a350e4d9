"""The state of updates, in updates.json of the state folder: the pinned signer, the highest release run or installed,
the release that waits for the owner's approval, and the last refusal."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from agent.identity.files import locked
from agent.identity.release import is_key, signer_fingerprint
from agent.identity.release_number import RELEASE
from agent.identity.state import LOCK, read_json, write_json
from agent.protocol.errors import UserError

log = logging.getLogger(__name__)

FILE = "updates.json"


def pinned_signer(folder: Path) -> str:
    """The signer whose releases are accepted. Empty: no invitation named one, so nothing is installed."""
    found = read_json(folder / FILE).get("signer")
    return found if isinstance(found, str) and is_key(found) else ""


def pin_signer(folder: Path, signer: str, trust: bool = False) -> None:
    """Pin the first signer that an invitation names; replace it only if the owner says so (`trust`)."""
    pinned = pinned_signer(folder)
    if not signer or signer == pinned:
        return
    if pinned and not trust:
        raise UserError(
            f"this invitation names another signer of updates ({signer_fingerprint(signer)}) than the one that this "
            f"device trusts ({signer_fingerprint(pinned)}). Ask the server's owner; if it is meant, give the "
            "invitation again with --trust-signer"
        )
    remember(folder, signer=signer, waiting=None)
    log.info("updates are taken from the signer %s only", signer_fingerprint(signer))


def highest_release(folder: Path) -> int:
    """The highest release that this device has run or installed."""
    found = read_json(folder / FILE).get("highest")
    return max(RELEASE, found) if type(found) is int else RELEASE


def note_running(folder: Path) -> None:
    if RELEASE and read_json(folder / FILE).get("highest") != (highest := highest_release(folder)):
        remember(folder, highest=highest)


def waiting_release(folder: Path) -> int | None:
    """A release that waits for the owner's approval, if it is newer than every release run or installed."""
    found = read_json(folder / FILE).get("waiting")
    return found if type(found) is int and found > highest_release(folder) else None


def note_refusal(folder: Path, reason: str) -> None:
    log.warning("update refused: %s", reason)
    remember(folder, refused={"at": time.time(), "reason": reason})


def last_refusal(folder: Path) -> tuple[float, str] | None:
    match read_json(folder / FILE).get("refused"):
        case {"at": int() | float() as at, "reason": str(reason)}:
            return float(at), reason
    return None


def remember(folder: Path, **values: Any) -> None:
    """Change these keys and keep the others; None removes a key."""
    with locked(folder / LOCK):
        known = read_json(folder / FILE) | values
        write_json(folder / FILE, {key: value for key, value in known.items() if value is not None})
