"""Three files over HTTP for phones that have nothing yet: the bootstrap script, the bundle, its checksum.

Read-only, nothing else is served, no request can name a file. Bounded: so many phones at once, each for so long; one
too many is hung up on and may come again. There is no TLS: whoever sits on the line could change what is sent, so the
command that people paste carries the script's checksum, and the script the bundle's. Nothing here is secret:
invitations are not served. Deployment over a cable, on loopback, also leaves scripts for single phones, and takes
their answers.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from agent.errors import UserError
from android.bundle import NAME, Bundle, bootstrap, build

log = logging.getLogger(__name__)

AT_ONCE = 32  # phones; the others' turn comes when one is done
TOO_LONG_S = 30.0  # for one read or write
MOST_ANSWER_BYTES = 4 << 20


class Letter:
    """A script for a phone that is reached in no other way (see android/channel.py), and what it said."""

    def __init__(self, name: str, script: bytes) -> None:
        self.name, self.script = name, script
        self._said = b""
        self._answered = threading.Event()

    def answer(self, said: bytes) -> None:
        self._said = said
        self._answered.set()

    def wait(self, limit_s: float) -> str | None:
        """What came back; None if nothing did in time."""
        return self._said.decode(errors="replace") if self._answered.wait(limit_s) else None


class Serving:
    """Serves while it is open. `url` is what phones reach it by."""

    def __init__(self, host: str, port: int = 0, url: str | None = None, bundle: Bundle | None = None) -> None:
        """`url`: what phones call it, if that is not where we listen."""
        try:
            self._server = FileServer((host, port), FileHandler)
        except OSError as error:
            raise UserError(
                f"cannot serve the bootstrap files on {host} port {port}: {error.strerror}. "
                "Take another port, or 0 for any free one"
            ) from None
        self.port = int(self._server.server_address[1])
        self.url = url or f"http://{host}:{self.port}"
        self.bundle = bundle or build()
        self.script = bootstrap(self.bundle, self.url)
        self._server.files = {
            "/bootstrap.sh": self.script,
            f"/{NAME}": self.bundle.data,
            f"/{NAME}.sha256": f"{self.bundle.sha256}  {NAME}\n".encode(),
        }
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="bootstrap", daemon=True)
        self._thread.start()

    def command(self, link: str) -> str:
        return paste(self.script, self.url, link)

    def letter(self, script: str) -> Letter:
        """Leave a script for one phone. Whoever knows its name, which nobody can guess, may fetch it and answer it."""
        letter = Letter(secrets.token_urlsafe(12), script.encode())
        self._server.letters[f"/{letter.name}"] = letter
        return letter

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def paste(script: bytes, url: str, link: str) -> str:
    """The one line for Termux. It trusts nothing that comes over the line, and the invitation does not travel."""
    checksum = hashlib.sha256(script).hexdigest()
    return (
        f"curl -fsSO {url}/bootstrap.sh && echo '{checksum}  bootstrap.sh' | sha256sum -c - && sh bootstrap.sh '{link}'"
    )


class FileServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a phone that stalls holds nobody up
    request_queue_size = AT_ONCE

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.files: dict[str, bytes] = {}
        self.letters: dict[str, Letter] = {}
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a phone at %s went away", client_address)  # in the middle of a file; it will come again


class FileHandler(BaseHTTPRequestHandler):
    server: FileServer
    timeout = TOO_LONG_S
    server_version, sys_version = "cleave", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        letter = self.server.letters.get(self.path)
        if letter is None or not length.isascii() or not length.isdigit() or int(length) > MOST_ANSWER_BYTES:
            self.send_error(501)
            return
        letter.answer(self.rfile.read(int(length)))
        self.send_response(204)
        self.end_headers()

    def _answer(self, with_body: bool) -> None:
        letter = self.server.letters.get(self.path)
        body = letter.script if letter else self.server.files.get(self.path)
        if body is None:
            self.send_error(404, "there is only " + ", ".join(self.server.files))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if self.path.endswith(".zip") else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s " + format, self.address_string(), *args)
