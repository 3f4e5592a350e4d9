"""A server of the next protocol version, as far as an old agent sees it, with the files that it hands out; and a phone:
the real launcher, which runs the real agent from a real bundle."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import zmq
from processes import FAST, LIMIT_S

import agent
from agent.identity.invitation import Invitation
from agent.identity.keys import Keys
from agent.identity.release import Release
from agent.protocol.wire import VERSION, Refused, encode
from android.bundle import SCRIPT, build
from testbed.access.signing import SigningKey, sign_bundle

if TYPE_CHECKING:
    from conftest import Program, Start

KEY, OTHER_KEY = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
RUNNING, NEXT = 100, 101  # releases
SOURCES = Path(agent.__file__).parent


def make_bundle(
    folder: Path, release: int, version: int = VERSION, module: str = "protocol/wire", code: str = ""
) -> bytes:
    """The agent as phones have it, with this protocol version; `code` is appended to a module."""
    copy = folder / "sources"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    wire = (copy / "protocol" / "wire.py").read_text()
    assert f"\nVERSION = {VERSION}" in wire
    (copy / "protocol" / "wire.py").write_text(wire.replace(f"\nVERSION = {VERSION}", f"\nVERSION = {version}"))
    text = (copy / f"{module}.py").read_text()
    (copy / f"{module}.py").write_text(
        text.replace('\nif __name__ == "__main__":', f'\n{code}\nif __name__ == "__main__":')
        if module == "__main__"
        else f"{text}\n{code}\n"
    )
    data = build(copy, release).data
    shutil.rmtree(copy)
    return data


@functools.cache
def _installed() -> bytes:
    """The same for every phone."""
    with tempfile.TemporaryDirectory() as folder:
        return make_bundle(Path(folder), RUNNING)


class NewerServer:
    """Both lines: an encrypted one, to which an invitation leads, and a plain one."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        newer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                newer.asked.append(self.path)
                data = newer.files.get(self.path)
                self.send_response(404 if data is None else 200)
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/agent.zip"
        self._serving = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self._serving.start()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keys = Keys.new()
        self._encrypted = self._context.socket(zmq.ROUTER)
        self._encrypted.setsockopt(zmq.CURVE_SERVER, 1)
        self._encrypted.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        self._plain = self._context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._encrypted, self._plain)]
        self.address, self.plain_address = f"127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"
        self._poller = zmq.Poller()
        for socket in (self._encrypted, self._plain):
            self._poller.register(socket, zmq.POLLIN)
        self._last: tuple[zmq.Socket[bytes], bytes] | None = None

    def link(self, signer: str = KEY.signer) -> str:
        port = int(self.address.rpartition(":")[2])  # one port for all clients
        return Invitation((self.address,), self.keys.public, "token", enrol_port=port, signer=signer).link

    def offer(self, data: bytes, release: Release | None) -> None:
        """Hand this out from now on."""
        self.files = {"/agent.zip": data}
        if release is not None:
            self.files["/agent.zip.release"] = release.dump().encode()

    def offer_signed(self, data: bytes, number: int = NEXT, key: SigningKey = KEY) -> Release:
        release = sign_bundle(key, data, number)
        self.offer(data, release)
        return release

    def next_join(self, limit_s: float = LIMIT_S) -> int:
        """Wait until an agent joins; returns its protocol version."""
        for _ in range(1000):
            found = self._poller.poll(int(1000 * limit_s))
            assert found, "no agent joined"
            socket: zmq.Socket[bytes] = found[0][0]
            identity, head, *_ = socket.recv_multipart()
            if len(head) > 5 and head[5] in (1, 11):  # JOIN or HELLO; others are heartbeats or leave
                self._last = socket, identity
                return head[4]
        raise AssertionError("no valid message came")

    def refuse(self, url: str | None = None, sha256: str = "") -> None:
        """Refuse the agent as too old, with an offer."""
        said = Refused("you are too old; update the agent", True, self.url if url is None else url, sha256)
        frames = [bytes(frame) for frame in encode(said)]
        frames[0] = frames[0][:4] + bytes([VERSION + 1]) + frames[0][5:]
        assert self._last is not None
        self._last[0].send_multipart([self._last[1], *frames])

    def close(self) -> None:
        self.http.shutdown()
        self._serving.join()
        self.http.server_close()
        self._context.destroy(linger=0)


class Phone:
    """~/.cleave of a phone with release RUNNING installed."""

    def __init__(self, root: Path, start: Start, monkeypatch: Any) -> None:
        self.home, self.root, self._start = root / ".cleave", root, start
        self.home.mkdir()
        self.rules = self.home / "owner.toml"
        command = root / "bin" / "cleave-agent"
        command.parent.mkdir()
        command.write_bytes(SCRIPT.read_bytes())
        (command.parent / "python").symlink_to(sys.executable)
        self._command = str(command)
        for name, value in {
            "HOME": str(root),
            "PREFIX": str(root),
            "CLEAVE_HOME": str(self.home),
            "CLEAVE_AGENT_STATE": str(self.home / "state"),
            "CLEAVE_RULES": str(self.rules),
            "CLEAVE_START_S": "30",
            "CLEAVE_SETTLE_S": "1",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        }.items():
            monkeypatch.setenv(name, value)
        self.installed = _installed()
        self.place.write_bytes(self.installed)

    @property
    def place(self) -> Path:
        return self.home / "agent.zip"

    def rule(self, updates: str) -> None:
        self.rules.write_text(f'updates = "{updates}"\n')

    def launch(self, *options: str) -> Program:
        """As `cleave-agent start` does in the background; `options` are the agent's."""
        (self.home / "options").write_text("".join(f"{word}\n" for word in (*options, *FAST)))
        return self.launch_again()

    def launch_again(self) -> Program:
        return self._start.command("/bin/sh", self._command, "launch")

    def ask(self, *words: str) -> str:
        """Output of a cleave-agent command, for example status."""
        return self._said(self._start.command("/bin/sh", self._command, *words))

    def agent(self, *words: str) -> str:
        """python -m agent WORDS, from the bundle."""
        path = f"PYTHONPATH={self.place}"
        return self._said(
            self._start.command("/usr/bin/env", "-C", str(self.home), path, "python", "-m", "agent", *words)
        )

    def end(self) -> None:
        """After a failed test: end an agent whose launcher was killed."""
        try:
            process = psutil.Process(int((self.home / "agent.pid").read_text()))
            if "agent" in process.cmdline() and process.environ().get("CLEAVE_HOME") == str(self.home):
                process.kill()
        except (OSError, ValueError, psutil.Error):
            return

    @staticmethod
    def _said(program: Program) -> str:
        program.wait()
        return program.output
