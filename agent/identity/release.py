"""A signed release of the agent: name, number, bundle checksum, signer.

The release is published beside the bundle as `agent.zip.release`, a few lines of JSON. The signature covers a canonical
text of the fields that begins with its purpose, so no other signature by the same key can pass for a release. Numbers
only rise. Pure: no files, no network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import asdict, dataclass

from agent.identity.ed25519 import KEY_BYTES, SIGNATURE_BYTES, verifies
from agent.protocol.errors import UserError

BUNDLE = "agent.zip"
SUFFIX = ".release"  # of the file beside the bundle
PURPOSE = "cleave agent release, format 1"
MOST_BYTES = 4096  # of the file
MOST_NUMBER = 2**53  # largest integer that every JSON reader keeps exact


class Rejected(UserError):
    """This release is refused; the text says why."""


@dataclass(frozen=True, slots=True)
class Release:
    name: str
    number: int
    sha256: str  # of the bundle
    signer: str  # public key, as `key_text` writes it
    signature: str  # of `text`, in the same encoding

    @property
    def text(self) -> bytes:
        """The signed text."""
        lines = (
            PURPOSE,
            f"name {self.name}",
            f"number {self.number}",
            f"sha256 {self.sha256}",
            f"signer {self.signer}",
        )
        return "".join(f"{line}\n" for line in lines).encode()

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def parse_release(data: bytes) -> Release:
    """Parse a release file, or raise Rejected. Does not check the signature."""
    try:
        said = json.loads(data) if len(data) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        said = None
    match said:
        case {
            "name": str(name),
            "number": int(number),
            "sha256": str(sha256),
            "signer": str(signer),
            "signature": str(signature),
        } if not isinstance(number, bool):
            pass
        case _:
            raise Rejected("what lies beside the bundle is not a signed release")
    named, summed = re.fullmatch(r"[a-z0-9.-]{1,40}", name), re.fullmatch(r"[0-9a-f]{64}", sha256)
    keyed = is_key(signer) and _raw(signature, SIGNATURE_BYTES) is not None
    if not (named and summed and keyed and 0 < number < MOST_NUMBER):
        raise Rejected("what lies beside the bundle is not a signed release: a field is damaged")
    return Release(name, number, sha256, signer, signature)


def check_signature(release: Release, signer: str) -> None:
    """Raise Rejected unless this signer signed exactly this release."""
    if release.signer != signer:
        raise Rejected(
            f"release {release.number} is signed by {signer_fingerprint(release.signer)}, "
            f"this device trusts {signer_fingerprint(signer)}"
        )
    key, signature = _raw(signer, KEY_BYTES), _raw(release.signature, SIGNATURE_BYTES)
    if key is None or signature is None or not verifies(key, release.text, signature):
        raise Rejected(f"release {release.number}: the signature is wrong")
    if release.name != BUNDLE:
        raise Rejected(f"release {release.number} is of {release.name}, not of {BUNDLE}")


def check_number(release: Release, running: int, highest: int, bad: frozenset[int] = frozenset()) -> None:
    """Raise Rejected unless the release is newer: an old one, though signed, would bring its old faults back."""
    if release.number in bad:
        raise Rejected(f"release {release.number} did not start here and was rolled back: it is not tried again")
    highest = max(running, highest, *bad)
    if release.number <= highest:
        raise Rejected(f"release {release.number} is not newer: release {running} runs, {highest} was the highest")


def check_bundle(release: Release, data: bytes) -> None:
    """Raise Rejected unless these are the signed bytes and they carry the release's own number."""
    if hashlib.sha256(data).hexdigest() != release.sha256:
        raise Rejected(f"release {release.number}: the bundle is not the one that was signed (wrong checksum)")
    if (inside := number_inside(data)) != release.number:
        raise Rejected(f"release {release.number}: the bundle says that it is release {inside}")


def number_inside(data: bytes) -> int | None:
    """The release number inside a bundle; None if this is not a bundle."""
    import io
    import zipfile

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entry = archive.getinfo("agent/identity/release_number.py")
            text = archive.read(entry) if entry.file_size <= MOST_BYTES else b""
    except (KeyError, ValueError, OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    found = re.search(rb"^RELEASE = (\d{1,16})\b", text, re.MULTILINE)
    return int(found[1]) if found else None


# ---- keys and signatures as text: URL-safe base64 (RFC 4648 section 5), so that links need no escaping


def key_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def is_key(text: str) -> bool:
    return _raw(text, KEY_BYTES) is not None


def signer_fingerprint(signer: str) -> str:
    """A signer's key in the short form that people compare."""
    return hashlib.sha256(_raw(signer, KEY_BYTES) or b"").hexdigest()[:16]


def _raw(text: str, size: int) -> bytes | None:
    """The decoded bytes; None unless the text is the canonical encoding of `size` bytes."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if len(raw) == size and key_text(raw) == text else None
