"""What the agent remembers between starts, besides its keys: small files in its state folder (`keys.agent_folder`).

A file is always replaced as a whole, and a damaged one counts as missing, so an agent killed at any point can start
again.

agent.json has one key, `device`: the ID of this device on an unencrypted connection, which survives a change of
address. updates.json holds the state of updates (agent/identity/update_state.py).
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any

from agent.identity.files import locked, private_folder, write_private
from agent.identity.keys import agent_folder

AGENT, LOCK = "agent.json", "state.lock"


def open_folder(given: str | None = None) -> Path:
    """The given folder, or this user's; created if missing."""
    return private_folder(Path(given) if given else agent_folder())


def read_json(path: Path) -> dict[str, Any]:
    """The object in this file; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, value: dict[str, Any], durable: bool = True) -> None:
    write_private(path, json.dumps(value, indent=1) + "\n", durable=durable)


def read_state(folder: Path) -> dict[str, Any]:
    return read_json(folder / AGENT)


def update_state(folder: Path, **values: Any) -> dict[str, Any]:
    """Change these keys and keep the others; None removes a key. Returns the new state."""
    with locked(folder / LOCK):
        known = {key: value for key, value in (read_state(folder) | values).items() if value is not None}
        write_json(folder / AGENT, known)
    return known


class Identity:
    """This device's ID on connections without a key. Two agents with one name on one machine are two devices: the
    second gets a new ID on every start."""

    def __init__(self, folder: Path, name: str) -> None:
        secret = read_state(folder).get("device") or update_state(folder, device=secrets.token_hex(16))["device"]
        safe = "".join(c if c.isalnum() else "-" for c in name)[:60]
        self._held = contextlib.ExitStack()  # holds the lock until this process ends
        mine = self._held.enter_context(locked(folder / f"name-{safe}.lock", wait=False))
        self.id = f"{secret if mine else secrets.token_hex(16)}-{name}"
