"""The device's identity: a long-lived CURVE key pair, and the key of the only server that it talks to.

The pair is created once and kept in the agent's state folder, readable by its owner only. It identifies the device even
when its name, address or network changes. Keys are Z85 text, as ZeroMQ takes them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from agent.identity.files import private_folder, state_folder, write_private
from agent.protocol.errors import UserError

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Keys({self.public!r})"  # keeps the secret half out of logs

    @classmethod
    def new(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def of(cls, secret: str) -> Keys:
        """The pair of this secret key; ValueError if it is not a key."""
        check_key(secret)
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


@dataclass(frozen=True, slots=True)
class Curve:
    """Credentials of an encrypted connection: the expected server's public key, and our own pair."""

    server: str
    keys: Keys

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Call before the socket connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.encode())


@dataclass(frozen=True, slots=True)
class Password:
    """Credentials of an unencrypted connection on one machine: from a ticket, or a pod's pass."""

    text: str

    def __repr__(self) -> str:
        return "Password()"

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Call before the socket connects."""
        socket.setsockopt(zmq.PLAIN_USERNAME, b"device")
        socket.setsockopt(zmq.PLAIN_PASSWORD, self.text.encode())


Credentials = Curve | Password


def check_key(key: str) -> None:
    try:
        fits = len(z85.decode(key.encode("ascii"))) == KEY_BYTES
    except (ValueError, KeyError, OverflowError):
        fits = False
    if not fits or len(key) != 40:
        raise ValueError("a key is 40 characters of Z85")


def fingerprint(key: str) -> str:
    """A public key in the short form that people compare."""
    return hashlib.sha256(z85.decode(key.encode())).hexdigest()[:16]


def agent_folder() -> Path:
    return state_folder("CLEAVE_AGENT_STATE", "cleave-agent")


def own_keys(folder: Path) -> Keys:
    """This device's keys; created if there are none yet."""
    path = private_folder(folder) / "keys.json"
    try:
        keys = Keys.of(json.loads(path.read_text(encoding="utf-8"))["secret"])
        path.chmod(0o600)
        return keys
    except FileNotFoundError:
        keys = Keys.new()
        write_private(path, json.dumps({"public": keys.public, "secret": keys.secret}) + "\n")
        return keys
    except OSError as error:
        raise UserError(f"cannot read this device's keys in {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} does not hold a key pair; remove it to get a new one, and ask for a new invitation"
        ) from None
