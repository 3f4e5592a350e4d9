"""What the agent remembers between two starts: one folder, `agent.json` in it, and what others keep beside it.

The folder is $CLEAVE_STATE, or ~/.local/state/cleave. Nobody else may read it. A file is replaced as a whole: whoever
reads it, at whatever moment, finds the old one or the new one. What is damaged counts as not there; an agent that is
killed in the middle of anything starts again.

Keys of agent.json: `device` (what this device is recognised by, also after its address has changed), `bundle_url`,
`bundle_sha256` and `bundle_folder` (where the agent was installed from, what came, where it is; see agent/update.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.errors import UserError

AGENT = "agent.json"


def state_folder() -> Path:
    """Made if it is not there."""
    given = os.environ.get("CLEAVE_STATE")
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(given).expanduser() if given else Path(home).expanduser() / "cleave"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; name a folder that can be in CLEAVE_STATE") from None
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Empty if it is not there or makes no sense."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_text(path: Path, text: str) -> None:
    """All of it or nothing, also if the disk is full or the process is killed meanwhile."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_state() -> dict[str, Any]:
    return read_json(state_folder() / AGENT)


def update_state(**values: Any) -> dict[str, Any]:
    """These keys are changed, the others stay; None takes one away. What there is then."""
    folder = state_folder()
    with locked(folder / "lock"):
        known = {key: value for key, value in (read_state() | values).items() if value is not None}
        write_json(folder / AGENT, known)
    return known


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; a lock ends with its process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Identity:
    """What this device is recognised by. Two agents of one name on one machine are two devices: the second one is
    somebody new each time."""

    def __init__(self, name: str) -> None:
        secret = read_state().get("device") or update_state(device=secrets.token_hex(16))["device"]
        safe = "".join(c if c.isalnum() else "-" for c in name)[:60]
        self._file = (state_folder() / f"name-{safe}.lock").open("a")  # held for as long as this process lives
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.id = f"{secret}-{name}"
        except OSError:
            self.id = f"{secrets.token_hex(16)}-{name}"
