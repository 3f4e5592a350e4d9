"""Serves a few files over HTTP to phones that have nothing installed yet: the bootstrap script, the bundle, its
checksum and, if it is signed, its release.

Read-only: nothing else is served, and no request can name a file on disk. Resources are bounded
(android/http_files.py). There is no TLS, so an attacker on the network could change what is sent: the command that
people paste carries the script's checksum, the script carries the bundle's, and an update is checked against the pinned
signer. Nothing here is secret: invitations are not served. Deployment over a cable, on loopback, also serves scripts
for single phones and takes their answers.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from http import HTTPStatus
from types import TracebackType

from agent.identity.release import SUFFIX, Release
from agent.protocol.errors import UserError
from android.bundle import NAME, Bundle, bootstrap, build
from android.http_files import Answer, Answering, HttpFiles, Request

MOST_ANSWER_BYTES = 4 << 20
OCTETS, TEXT = "application/octet-stream", "text/plain"


class PhoneScript:
    """A script for one phone that cannot be reached otherwise (see android/channel.py), and its output."""

    def __init__(self, name: str, script: bytes) -> None:
        self.name, self.script = name, script
        self._said = b""
        self._answered = threading.Event()

    def answer(self, said: bytes) -> None:
        self._said = said
        self._answered.set()

    def wait(self, limit_s: float) -> str | None:
        """The script's output; None if there is none in time."""
        return self._said.decode(errors="replace") if self._answered.wait(limit_s) else None


class Serving:
    """Serves while it is open. Phones reach it at `url`."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        url: str | None = None,
        bundle: Bundle | None = None,
        release: Release | None = None,
    ) -> None:
        """`url`: the URL that phones use, if it differs from the listening address. `release`: signed, of this
        bundle."""
        self._files = Files()
        try:
            self._server = HttpFiles((host, port), self._files)
        except OSError as error:
            raise UserError(
                f"cannot serve the bootstrap files on {host} port {port}: {os.strerror(error.errno or 0)}. "
                "Take another port, or 0 for any free one"
            ) from None
        self.port = self._server.port
        self.url = url or f"http://{host}:{self.port}"
        self.bundle = bundle or build()
        self.script = bootstrap(self.bundle, self.url)
        self._files.files = {
            "/bootstrap.sh": self.script,
            f"/{NAME}": self.bundle.data,
            f"/{NAME}.sha256": f"{self.bundle.sha256}  {NAME}\n".encode(),
        }
        if release is not None:
            self._files.files[f"/{NAME}{SUFFIX}"] = release.dump().encode()

    def command(self, link: str) -> str:
        return paste(self.script, self.url, link)

    def phone_script(self, script: str) -> PhoneScript:
        """Serve a script to one phone. Its random name, which cannot be guessed, grants the right to fetch and answer
        it."""
        phone_script = PhoneScript(secrets.token_urlsafe(12), script.encode())
        self._files.phone_scripts[f"/{phone_script.name}"] = phone_script
        return phone_script

    def stop(self) -> None:
        self._server.stop()

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def paste(script: bytes, url: str, link: str) -> str:
    """The command line to paste into Termux. It verifies what it fetches, and the invitation is not sent over HTTP."""
    checksum = hashlib.sha256(script).hexdigest()
    return (
        f"curl -fsSO {url}/bootstrap.sh && echo '{checksum}  bootstrap.sh' | sha256sum -c - && sh bootstrap.sh '{link}'"
    )


class Files(Answering):
    """Serves the files read-only, and scripts, each for one phone, which answers with a POST."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.phone_scripts: dict[str, PhoneScript] = {}

    def most_body_bytes(self, request: Request) -> int:
        return MOST_ANSWER_BYTES if request.method == "POST" and request.path in self.phone_scripts else 0

    def answer(self, request: Request, body: bytes) -> Answer:
        phone_script = self.phone_scripts.get(request.path)
        match request.method:
            case "GET" | "HEAD":
                found = phone_script.script if phone_script else self.files.get(request.path)
                if found is None:
                    return Answer(HTTPStatus.NOT_FOUND, f"there is only {', '.join(self.files)}\n".encode())
                return Answer(HTTPStatus.OK, found, OCTETS if request.path.endswith(".zip") else TEXT)
            case "POST" if phone_script is not None and request.body_bytes <= MOST_ANSWER_BYTES:
                phone_script.answer(body)
                return Answer(HTTPStatus.NO_CONTENT)
        return Answer(HTTPStatus.NOT_IMPLEMENTED)
