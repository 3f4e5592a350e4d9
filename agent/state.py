"""What the agent remembers between two starts, beside its keys: small files in its state folder (`keys.agent_folder`).

A file is replaced as a whole. What is damaged counts as not there; an agent that is killed in the middle of anything
starts again.

Keys of agent.json: `device` (what this device is recognised by on a plain line, also after its address has changed),
`bundle_url` and `bundle_sha256` (where the agent was installed from, and what came; see agent/update.py).
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any

from agent.files import locked, private_folder, write_private
from agent.keys import agent_folder

AGENT, LOCK = "agent.json", "state.lock"


def open_folder(given: str | None = None) -> Path:
    """The one that was named, or this user's; made if it is not there."""
    return private_folder(Path(given) if given else agent_folder())


def read_json(path: Path) -> dict[str, Any]:
    """Empty if it is not there or makes no sense."""
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
    """These keys are changed, the others stay; None takes one away. What there is then."""
    with locked(folder / LOCK):
        known = {key: value for key, value in (read_state(folder) | values).items() if value is not None}
        write_json(folder / AGENT, known)
    return known


class Identity:
    """What this device is recognised by where it has no keys. Two agents of one name on one machine are two devices:
    the second one is somebody new each time."""

    def __init__(self, folder: Path, name: str) -> None:
        secret = read_state(folder).get("device") or update_state(folder, device=secrets.token_hex(16))["device"]
        safe = "".join(c if c.isalnum() else "-" for c in name)[:60]
        self._held = contextlib.ExitStack()  # for as long as this process lives
        mine = self._held.enter_context(locked(folder / f"name-{safe}.lock", wait=False))
        self.id = f"{secret if mine else secrets.token_hex(16)}-{name}"
