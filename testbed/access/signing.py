"""The signing half of Ed25519 (RFC 8032 section 5.1.6) and the release keys on disk, for `cleave release`.

Pure Python, next to the verification that phones need anyway, so signing adds no dependency. It is *not* constant time:
sign on your own machine, where others cannot measure how long it takes. The key belongs there, never on the server,
which hands out what was signed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from agent.identity.ed25519 import BASE, KEY_BYTES, L, encode_point, multiply
from agent.identity.files import private_folder, write_private
from agent.identity.release import BUNDLE, Release, is_key, key_text, signer_fingerprint
from agent.protocol.errors import UserError

FORMAT = "cleave release key"


@dataclass(frozen=True, slots=True)
class SigningKey:
    seed: bytes  # RFC 8032 calls it the private key

    def __repr__(self) -> str:
        return f"SigningKey({signer_fingerprint(self.signer)})"  # keeps the seed out of logs

    @property
    def public(self) -> bytes:
        return encode_point(multiply(self._halves()[0], BASE))

    @property
    def signer(self) -> str:
        return key_text(self.public)

    def sign(self, text: bytes) -> bytes:
        scalar, prefix = self._halves()
        public = encode_point(multiply(scalar, BASE))
        nonce = _sha512(prefix, text) % L
        point = encode_point(multiply(nonce, BASE))
        return point + ((nonce + _sha512(point, public, text) * scalar) % L).to_bytes(32, "little")

    def _halves(self) -> tuple[int, bytes]:
        digest = hashlib.sha512(self.seed).digest()
        return int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | (1 << 254), digest[32:]


def _sha512(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def sign_bundle(key: SigningKey, bundle: bytes, number: int) -> Release:
    unsigned = Release(BUNDLE, number, hashlib.sha256(bundle).hexdigest(), key.signer, "")
    return replace(unsigned, signature=key_text(key.sign(unsigned.text)))


# ---- on disk: the key, readable by its owner only, and the public half next to it, for distribution


def make_key(path: Path) -> SigningKey:
    if path.exists():
        raise UserError(f"{path} is there already; a key is not overwritten: phones trust the one that they have")
    key = SigningKey(secrets.token_bytes(KEY_BYTES))
    private_folder(path.parent)
    secret = {"format": FORMAT, "secret": key.seed.hex(), "public": key.signer}
    write_private(path, json.dumps(secret, indent=1) + "\n")
    try:
        public_path(path).write_text(f"{key.signer}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {public_path(path)}: {error.strerror}") from None
    return key


def public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def read_key(path: Path) -> SigningKey:
    try:
        mode, saved = path.stat().st_mode, json.loads(path.read_text(encoding="utf-8"))
        key = SigningKey(bytes.fromhex(saved["secret"]))
        whole = saved["format"] == FORMAT and len(key.seed) == KEY_BYTES and key.signer == saved["public"]
    except OSError as error:
        raise UserError(
            f"cannot read the release key {path}: {error.strerror}; make one: cleave release keygen"
        ) from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is not a release key; make one: cleave release keygen --out FILE")
    if mode & 0o077:
        raise UserError(f"others may read {path}: chmod 600 it, or make a new key if they have")
    return key


def read_signer(given: str) -> str:
    """A public key, from a file or given as text."""
    if is_key(given):
        return given
    try:
        text = Path(given).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        raise UserError(f"{given} is neither a signer's public key nor a file that holds one (FILE.pub)") from None
    if not is_key(text):
        raise UserError(f"{given} does not hold a signer's public key; give the file that ends in .pub")
    return text
