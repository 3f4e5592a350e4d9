"""An invitation as it travels: a link with the server's addresses, its public key and a token.

    cleave://192.0.2.7:5555,[2001:db8::7]:5555/?key=...&token=...&expires=1767225600

The key and the token are base64 for addresses (RFC 4648 section 5), so that a shell, a QR code and a chat leave them as
they are; `expires` counts seconds since 1970. Whatever else is asked after the "?" is for later versions, and ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from zmq.utils import z85

from agent.errors import UserError
from agent.files import private_folder, write_private
from agent.keys import KEY_BYTES, check_key
from agent.wire import MAX_TOKEN

MAX_ADDRESSES = 16
_HOST_PORT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TOKEN}}}")


@dataclass(frozen=True, slots=True)
class Invitation:
    addresses: tuple[str, ...]  # HOST:PORT, to be tried in turn
    server_key: str  # Z85
    token: str  # empty once this device is known by its key
    expires_s: float | None = None  # since 1970

    def __repr__(self) -> str:
        return f"Invitation({','.join(self.addresses)})"  # a token does not belong into logs

    @property
    def endpoints(self) -> list[str]:
        return [f"tcp://{address}" for address in self.addresses]

    @property
    def link(self) -> str:
        key = base64.urlsafe_b64encode(z85.decode(self.server_key.encode())).decode().rstrip("=")
        asked = {"key": key}
        if self.token:
            asked["token"] = self.token
        if self.expires_s is not None:
            asked["expires"] = str(int(self.expires_s))
        return f"cleave://{','.join(self.addresses)}/?{urlencode(asked)}"


def parse_link(link: str) -> Invitation:
    """What the link says, or UserError: what is wrong with it."""
    link = link.strip()
    if not link.lower().startswith("cleave://"):
        raise UserError(f"the invitation begins with {link[:12]!r}; it must be a link that begins with cleave://")
    try:
        parts = urlsplit(link)
        asked = parse_qs(parts.query, max_num_fields=32)
    except ValueError:
        raise UserError("the invitation is not a link; copy it whole, and put it in quotes") from None
    if any(len(asked.get(name, ())) > 1 for name in ("key", "token", "expires")):
        raise UserError("the invitation says something twice; copy it again, whole")
    if "key" not in asked or "token" not in asked:
        missing = "key" if "key" not in asked else "token"
        raise UserError(f'the invitation has no {missing}; copy it whole, and put it in quotes: a shell ends it at "&"')
    return Invitation(_addresses(parts.netloc), _key(asked["key"][0]), _token(asked["token"][0]), _expiry(asked))


def check_host_port(address: str) -> str:
    found = _HOST_PORT.fullmatch(address)
    if not found or not 1 <= int(found[2]) <= 65535:
        raise UserError(f"the address {address[:80]!r} is not a host and a port, such as 192.0.2.7:5555")
    return address


def _addresses(text: str) -> tuple[str, ...]:
    try:
        addresses = tuple(check_host_port(address) for address in text.split(","))
    except UserError:  # not what it says: a damaged link may have its token there
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


# ---- what an agent remembers, so that a plain restart joins again


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
        return Invitation(_addresses(",".join(saved["addresses"])), saved["server_key"], saved["token"], expires)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not hold an invitation; give it once more: --invitation LINK") from None


def welcomed(folder: Path, invitation: Invitation) -> None:
    """The server knows this device's key now: the token is of no more use."""
    if invitation.token:
        remember(folder, replace(invitation, token="", expires_s=None))
