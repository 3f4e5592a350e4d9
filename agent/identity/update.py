"""Updates the agent to a release signed by the key that the invitation named, if the owner allows it.

The server is not trusted with code: it hands out what was signed elsewhere (agent/identity/release.py). A release is
installed only

- by an agent that runs from a bundle (one zip file, as on phones) and connects encrypted, by invitation;
- because its server refused it, over that encrypted connection, as too old;
- if the pinned key signed it, its number is above all that this device has had, and every byte is as signed;
- when the owner's rule `updates` allows it: "auto" at once, "ask" after `python -m agent update`, "never" not at all.

The bundle is fetched over plain HTTP from the server's own host: the signature protects it, not the connection.
Refusals are logged with their reason and shown by `python -m agent status`. A new bundle is on trial until it has
started (agent/identity/bundle_file.py).
"""

from __future__ import annotations

import argparse
import http.client
import logging
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.identity.bundle_file import bad_releases, bundle_place, install, is_launched
from agent.identity.files import locked
from agent.identity.release import (
    MOST_BYTES as MOST_RELEASE_BYTES,
)
from agent.identity.release import (
    SUFFIX,
    Rejected,
    Release,
    check_bundle,
    check_number,
    check_signature,
    parse_release,
    signer_fingerprint,
)
from agent.identity.release_number import RELEASE
from agent.identity.state import open_folder
from agent.identity.update_state import highest_release, note_refusal, pinned_signer, remember, waiting_release
from agent.owner.rules_file import read_rules, rules_file
from agent.protocol.errors import UserError
from agent.protocol.wire import Refused

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
READ_S, FETCH_S = 10.0, 120.0  # time limits per read and in total, so that a trickling server cannot hold us up
WAITING = "update.zip"  # in the state folder: verified, awaiting the owner's approval
BY_HAND = "To update by hand, run the command of a new invitation"


class NotNow(Exception):
    """The update may work later: there is no network, or the server hands out nothing at present."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A server's refusal of an outdated agent, and the connection it came over."""

    refused: Refused
    endpoint: str  # tcp://HOST:PORT
    encrypted: bool


def update(folder: Path, offer: Offer, rule: str) -> bool:
    """True: a new agent is installed, restart. UserError: refused, or the owner must act. NotNow: try again later."""
    place = bundle_place()
    if place is None:
        raise UserError(
            "this agent is too old for the server and was not installed by one. "
            "Update it the way it was installed (git pull, or pip install --upgrade), then start it again"
        )
    try:
        release, data = _fetch_checked(folder, place, offer, rule)
    except Rejected as error:
        note_refusal(folder, str(error))
        raise UserError(f"this agent is too old for the server, and is not updated: {error}. {BY_HAND}") from None
    if rule == "auto" and is_launched():
        _install(folder, place, release, data)
        return True
    _keep(folder, release, data)
    without = "" if rule == "ask" else "it was not started by cleave-agent, which brings the previous one back; "
    raise UserError(
        f"this agent is too old for the server. {without}release {release.number}, signed by "
        f"{signer_fingerprint(release.signer)}, waits for its owner: cleave-agent update (or python -m agent update)"
    )


def _fetch_checked(folder: Path, place: Path, offer: Offer, rule: str) -> tuple[Release, bytes]:
    """Fetch and verify a release. Cheap checks come first, so that a refused release is not fetched."""
    if not offer.encrypted:
        raise Rejected("it was offered over an unencrypted connection, where any machine could pose as the server")
    if rule == "never":
        raise Rejected('the owner\'s rule is updates = "never"')
    if not (signer := pinned_signer(folder)):
        raise Rejected("the invitation named no signer, so no key may sign updates")
    if not offer.refused.bundle_url:
        raise Rejected("the server offers none")
    url = own_url(offer.refused.bundle_url, offer.endpoint)
    release = parse_release(_fetch(url + SUFFIX, MOST_RELEASE_BYTES))
    check_signature(release, signer)
    check_number(release, RELEASE, highest_release(folder), bad_releases(place))
    promised = offer.refused.bundle_sha256
    if promised and promised != release.sha256:
        raise Rejected(f"release {release.number} is not the one that the server promised (another checksum)")
    data = _fetch(url, MOST_BYTES)
    check_bundle(release, data)
    return release, data


def own_url(url: str, endpoint: str) -> str:
    """The URL, with the host at which we reach the server: an agent must not become a way into its owner's network.
    Raises Rejected unless the URL is plain HTTP with a port."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme != "http" or not parts.path.startswith("/"):
        raise Rejected(f"it is at {url[:200]!r}, which is not an address such as http://HOST:PORT/agent.zip")
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return urllib.parse.urlunsplit(("http", f"{host}:{port}", parts.path, "", ""))


def _fetch(url: str, most_bytes: int) -> bytes:
    try:
        with _OPENER.open(url, timeout=READ_S) as answer:
            data, deadline = bytearray(), time.monotonic() + FETCH_S
            while len(data) <= most_bytes and (piece := answer.read1(most_bytes + 1 - len(data))):
                data += piece
                if time.monotonic() > deadline:
                    raise NotNow(f"cannot fetch {url}: it takes more than {FETCH_S:g} s")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404 and url.endswith(SUFFIX):
            raise Rejected("it is not signed") from None
        raise NotNow(f"cannot fetch {url}: {error}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NotNow(f"cannot fetch {url}: {error}") from None
    if len(data) > most_bytes:
        raise Rejected(f"what comes from {url} is larger than {most_bytes} bytes")
    return bytes(data)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def _install(folder: Path, place: Path, release: Release, data: bytes) -> None:
    install(place, data, release.number, release.sha256)
    remember(folder, highest=release.number, waiting=None)
    _drop_waiting(folder)
    log.info("release %d is in place of %d, signed by %s", release.number, RELEASE, signer_fingerprint(release.signer))


# ---- a release that waits for the owner's approval


def _keep(folder: Path, release: Release, data: bytes) -> None:
    try:
        (folder / WAITING).write_bytes(data)
        (folder / f"{WAITING}{SUFFIX}").write_text(release.dump(), encoding="utf-8")
    except OSError as error:
        raise NotNow(f"cannot write {folder / WAITING}: {error.strerror}") from None
    remember(folder, waiting=release.number)


def _drop_waiting(folder: Path) -> None:
    for name in (WAITING, f"{WAITING}{SUFFIX}"):
        (folder / name).unlink(missing_ok=True)


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agent update",
        description='Install the release that waits for the owner\'s yes (rule updates = "ask"). It is checked again: '
        "signature, number, checksum.",
    )
    parser.add_argument("--state", metavar="FOLDER", help="of the agent, if it has its own")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        folder = open_folder(options.state)
        with locked(folder / "update.lock"):
            return _install_waiting(folder, options.yes)
    except (UserError, NotNow) as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2


def _install_waiting(folder: Path, sure: bool) -> int:
    place = bundle_place()
    if place is None:
        raise UserError("this agent does not run from a bundle: update it the way it was installed")
    if waiting_release(folder) is None:
        raise UserError("no update waits; one is fetched when the server says that this agent is too old")
    if read_rules(rules_file()).updates == "never":
        raise UserError(
            'the owner\'s rule is updates = "never"; change it first: python -m agent rules set updates ask'
        )
    try:
        release = parse_release((folder / f"{WAITING}{SUFFIX}").read_bytes()[: MOST_RELEASE_BYTES + 1])
        data = (folder / WAITING).read_bytes()
        check_signature(release, pinned_signer(folder))
        check_number(release, RELEASE, highest_release(folder), bad_releases(place))
        check_bundle(release, data)
    except OSError:
        raise UserError("the update that waited is gone; start the agent, it fetches it again") from None
    except Rejected as error:
        note_refusal(folder, str(error))
        raise
    print(f"release {release.number} for release {RELEASE}, signed by {signer_fingerprint(release.signer)}")
    if not sure and sys.stdin.isatty() and not input("Install it? [y/N] ").strip().lower().startswith("y"):
        return 1
    _install(folder, place, release, data)
    print("installed; it is on trial until it has started: cleave-agent start")
    return 0
