"""Invitations: links with the server's addresses, its public key and a token.

    cleave://192.0.2.7:5555,[2001:db8::7]:5555/?key=...&token=...&expires=1767225600&enrol=5556

The key and the token are URL-safe base64 (RFC 4648 section 5), so that shells, QR codes and chats leave them unchanged.
`expires` is in seconds since 1970; `enrol` is the port that takes the token; `signer` is the key that signs updates, if
there is one. Other parameters after the "?" are for later versions, and ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from zmq.utils import z85

from agent.identity.files import private_folder, write_private
from agent.identity.keys import KEY_BYTES, check_key
from agent.identity.release import is_key
from agent.protocol.errors import UserError
from agent.protocol.wire import MAX_TOKEN

MAX_ADDRESSES = 16
MAX_LINK = 8192  # characters
log = logging.getLogger(__name__)

_HOST_PORT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TOKEN}}}")


@dataclass(frozen=True, slots=True)
class Invitation:
    addresses: tuple[str, ...]  # HOST:PORT, to be tried in turn
    server_key: str  # Z85
    token: str  # empty once this device's key is enrolled
    expires_s: float | None = None  # since 1970
    enrol_port: int | None = None  # takes the token, on the same hosts; None: each address's port + 1
    signer: str = ""  # public key whose agent releases may be installed (agent/identity/release.py); empty: none

    def __repr__(self) -> str:
        return f"Invitation({','.join(self.addresses)})"  # keeps the token out of logs

    @property
    def endpoints(self) -> list[str]:
        return [f"tcp://{address}" for address in self.addresses]

    @property
    def entrances(self) -> list[str]:
        """Where this device presents its token, one per endpoint."""
        split = [endpoint.rpartition(":") for endpoint in self.endpoints]
        return [f"{host}:{self.enrol_port or min(int(port) + 1, 65535)}" for host, _, port in split]

    @property
    def link(self) -> str:
        key = base64.urlsafe_b64encode(z85.decode(self.server_key.encode())).decode().rstrip("=")
        asked = {"key": key}
        if self.token:
            asked["token"] = self.token
        if self.expires_s is not None:
            asked["expires"] = str(int(self.expires_s))
        if self.enrol_port is not None:
            asked["enrol"] = str(self.enrol_port)
        if self.signer:
            asked["signer"] = self.signer
        return f"cleave://{','.join(self.addresses)}/?{urlencode(asked)}"


def parse_link(link: str) -> Invitation:
    """Parse a link. UserError says what is wrong with it."""
    link = link.strip()
    if not link.lower().startswith("cleave://"):
        raise UserError(f"the invitation begins with {link[:12]!r}; it must be a link that begins with cleave://")
    try:
        parts = urlsplit(link)
        asked = parse_qs(parts.query, max_num_fields=32)
    except ValueError:
        raise UserError("the invitation is not a link; copy it whole, and put it in quotes") from None
    if any(len(asked.get(name, ())) > 1 for name in ("key", "token", "expires", "enrol", "signer")):
        raise UserError("the invitation says something twice; copy it again, whole")
    if "key" not in asked or "token" not in asked:
        missing = "key" if "key" not in asked else "token"
        raise UserError(f'the invitation has no {missing}; copy it whole, and put it in quotes: a shell ends it at "&"')
    addresses, signer = _addresses(parts.netloc), asked.get("signer", [""])[0]
    if signer and not is_key(signer):
        raise UserError("the invitation's signer is damaged; copy it again, whole")
    key, token = _key(asked["key"][0]), _token(asked["token"][0])
    return Invitation(addresses, key, token, _expiry(asked), _enrol_port(asked), signer)


def check_host_port(address: str) -> str:
    found = _HOST_PORT.fullmatch(address)
    if not found or not 1 <= int(found[2]) <= 65535:
        raise UserError(f"the address {address[:80]!r} is not a host and a port, such as 192.0.2.7:5555")
    return address


def _addresses(text: str) -> tuple[str, ...]:
    try:
        addresses = tuple(check_host_port(address) for address in text.split(","))
    except UserError:  # do not quote it: in a damaged link the token may be there
        raise UserError("the invitation's address is not a host and a port; copy it again, whole") from None
    if len(addresses) > MAX_ADDRESSES:
        raise UserError(f"the invitation has {len(addresses)} addresses, at most {MAX_ADDRESSES} are allowed")
    return addresses


def _key(text: str) -> str:
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != KEY_BYTES:
        raise UserError("the invitation's key is damaged; copy it again, whole")
    return z85.encode(raw).decode()


def _token(text: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise UserError("the invitation's token is damaged; copy it again, whole")
    return text


def _expiry(asked: dict[str, list[str]]) -> float | None:
    if "expires" not in asked:
        return None
    text = asked["expires"][0]
    if not re.fullmatch(r"\d{1,12}", text, re.ASCII):
        raise UserError("the invitation's time of expiry is damaged; copy it again, whole")
    return float(text)


def _enrol_port(asked: dict[str, list[str]]) -> int | None:
    if "enrol" not in asked:
        return None
    text = asked["enrol"][0]
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 1 <= int(text) <= 65535:
        raise UserError("the invitation's port of enrolment is damaged; copy it again, whole")
    return int(text)


# ---- a link in a file, not on the command line, which every user of the machine can read


def read_link(file: str) -> str | None:
    """The link in this file, or from standard input (-). None if there is no file: it was used and removed, and the
    server is remembered."""
    try:
        text = sys.stdin.read(MAX_LINK) if file == "-" else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the invitation in {file}: {error}") from None
    if len(text) > MAX_LINK:
        raise UserError(f"{file} does not hold an invitation: it is too long")
    return text.strip()


def forget_file(file: str) -> None:
    """Remove a used link: the device is enrolled and does not need it, but others could use it."""
    if file == "-":
        return
    try:
        Path(file).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the invitation in %s was used and cannot be removed: %s", file, error.strerror)


# ---- what an agent remembers, so that a restart without arguments joins again


def remember(folder: Path, invitation: Invitation) -> None:
    write_private(private_folder(folder) / "server.json", json.dumps(asdict(invitation)) + "\n")


def recall(folder: Path) -> Invitation | None:
    path = folder / "server.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        check_key(saved["server_key"])
        if saved["token"]:
            _token(saved["token"])
        expires = None if saved["expires_s"] is None else float(saved["expires_s"])
        enrol, signer = saved.get("enrol_port"), saved.get("signer", "")  # files of older agents lack both
        if not isinstance(signer, str) or (signer and not is_key(signer)):
            raise ValueError(signer)
        port = None if enrol is None else int(enrol)
        addresses = _addresses(",".join(saved["addresses"]))
        return Invitation(addresses, saved["server_key"], saved["token"], expires, port, signer)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not hold an invitation; give it once more: --invitation LINK") from None


def welcomed(folder: Path, invitation: Invitation) -> None:
    """Forget the token: the server has enrolled this device's key."""
    if invitation.token:
        remember(folder, replace(invitation, token="", expires_s=None))
