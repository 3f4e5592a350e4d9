"""A server that speaks a later protocol has an agent that speaks it, too: fetch it, check it, put it in its place.

Only an agent that runs from a bundle (one zip file, as phones have it) replaces itself; a checkout or an installed
package is its owner's business. What is fetched is taken only if its checksum is the one that the server has said over
the line that refused us, which for an invited device is encrypted and the server's for certain. A server that says none
is believed only by what cannot be changed on the way: https, or this machine itself.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import agent
from agent.errors import UserError
from agent.state import read_state, update_state
from agent.wire import Refused

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
FETCH_S = 60.0
TRY_S = 120.0


class NotNow(Exception):
    """It may work later: there is no network, or the server hands out nothing at present."""


def update(folder: Path, refused: Refused) -> None:
    """From now on the bundle is the new agent. UserError: not without somebody's help. NotNow: try again later."""
    place = Path(agent.__file__).parents[1]
    if not place.is_file():
        raise UserError(
            f"this agent is too old for the server and was not installed by one: it is in {place}. "
            "Update it the way it was installed (git pull, or pip install --upgrade), then start it again"
        )
    known = read_state(folder)
    url = refused.bundle_url or str(known.get("bundle_url") or "")
    if not url:
        raise UserError(
            "this agent is too old for the server, and nobody has said where a new one is: "
            "run the command of the invitation once more"
        )
    wanted = refused.bundle_sha256 or _promised(url)
    data = _fetch(url)
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise UserError(f"what came from {url} is not what the server promised (wrong checksum): it was thrown away")
    if found == hashlib.sha256(place.read_bytes()).hexdigest():
        raise UserError(f"{url} hands out the agent that is here already; ask the server's owner for a newer one")
    _replace(place, data)
    update_state(folder, bundle_url=url, bundle_sha256=found)
    log.info("updated from %s", url)


def _promised(url: str) -> str:
    """The checksum beside the bundle, where nobody on the way can have changed both."""
    if not is_safe(url):
        raise UserError(
            f"this agent is too old for the server. It is not updated from {url}, because anybody on the way could "
            "change what comes: run the command of the invitation once more"
        )
    text = _fetch(f"{url}.sha256").decode(errors="replace")
    if not (found := re.match(r"[0-9a-f]{64}\b", text)):
        raise UserError(f"{url}.sha256 is not a checksum")
    return found[0]


def is_safe(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    here = (parts.hostname or "") in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", parts.hostname or "")
    return parts.scheme == "https" or (parts.scheme == "http" and bool(here))


def _fetch(url: str) -> bytes:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"the new agent is at {url!r}, which is not an address of the web")
    try:
        with urllib.request.urlopen(url, timeout=FETCH_S) as answer:
            data: bytes = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotNow(f"cannot fetch {url}: {error}") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"what comes from {url} is larger than {MOST_BYTES} bytes: that is no agent")
    return data


def _replace(place: Path, data: bytes) -> None:
    """In one move, and only if it runs here at all."""
    beside = place.with_name(f"{place.name}.new")
    try:
        beside.write_bytes(data)
        environment = os.environ | {"PYTHONPATH": str(beside)}
        trial = [sys.executable, "-c", "import agent.__main__, agent.worker, agent.known; print(agent.__file__)"]
        done = subprocess.run(
            trial, env=environment, cwd=beside.parent, capture_output=True, timeout=TRY_S, check=False, text=True
        )
        if done.returncode or not done.stdout.startswith(str(beside)):
            said = done.stderr.strip().splitlines()
            raise UserError(f"the server's agent does not run here ({said[-1] if said else 'no reason given'})")
        beside.replace(place)
    except subprocess.TimeoutExpired:
        raise UserError(f"the server's agent does not start here within {TRY_S:.0f} s") from None
    except OSError as error:
        raise NotNow(f"cannot write {beside}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
