"""An agent that is too old for its server: it fetches the server's own, checks it, and goes on as that one; or says
what its owner has to do, and stays as it is."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from processes import FAST, LIMIT_S

import agent
from agent.state import read_state
from agent.update import is_safe
from agent.wire import VERSION, Refused, decode, encode, refusal_of_another_version

if TYPE_CHECKING:
    from conftest import Program, Start

SOURCES = Path(agent.__file__).parent


def bundle(version: int = VERSION, break_: str = "") -> bytes:
    """The agent as phones have it, speaking this version of the protocol."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(SOURCES.glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if path.name == "wire.py":
                text = text.replace(f"\nVERSION = {VERSION}\n", f"\nVERSION = {version}\n{break_}\n")
            archive.writestr(zipfile.ZipInfo(f"agent/{path.name}"), text)
    return out.getvalue()


class Newer:
    """A server of the next version, as far as an old agent gets to see it, and its files over HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, bytes] = {}
        self.asked = threading.Event()
        newer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = newer.files.get(self.path)
                self.send_response(404 if data is None else 200)
                self.end_headers()
                self.wfile.write(data or b"")
                newer.asked.set()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/agent.zip"
        self._serving = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self._serving.start()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def next_join(self) -> int:
        """Wait for somebody to join: its version. It is refused if it is not the next one."""
        assert self.router.poll(int(1000 * LIMIT_S)), "nobody came"
        identity, head, *_ = self.router.recv_multipart()
        self._last = identity
        return head[4]

    def refuse(self, url: str = "", sha256: str = "") -> None:
        frames = [bytes(frame) for frame in encode(Refused("you are too old; update the agent", True, url, sha256))]
        frames[0] = frames[0][:4] + bytes([VERSION + 1]) + frames[0][5:]
        self.router.send_multipart([self._last, *frames])

    def close(self) -> None:
        self.http.shutdown()
        self._serving.join()
        self.http.server_close()
        self._context.destroy(linger=0)


@pytest.fixture
def newer(tmp_path: Path, nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Newer]:
    (tmp_path / "agent.zip").write_bytes(bundle())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "agent.zip"))
    monkeypatch.setenv("CLEAVE_AGENT_STATE", str(tmp_path / "state"))
    server = Newer(tmp_path)
    yield server
    server.close()


def old_agent(start: Start, newer: Newer) -> Program:
    """From its bundle, as on a phone; it has joined."""
    program = start("agent", "--ps", newer.address, *FAST, cwd=newer.folder)
    assert newer.next_join() == VERSION
    return program


def test_the_servers_own_agent_takes_the_place_of_one_that_is_too_old(start: Start, newer: Newer) -> None:
    new = bundle(VERSION + 1)
    newer.files = {"/agent.zip": new}
    program = old_agent(start, newer)
    newer.refuse(newer.url, hashlib.sha256(new).hexdigest())
    assert newer.next_join() == VERSION + 1  # the same process, begun again
    assert program.running
    assert (newer.folder / "agent.zip").read_bytes() == new
    state = read_state(newer.folder / "state")
    assert (state["bundle_url"], state["bundle_sha256"]) == (newer.url, hashlib.sha256(new).hexdigest())
    assert sorted(path.name for path in newer.folder.iterdir()) == ["agent.zip", "state"]


def test_where_it_was_installed_from_is_asked_if_the_server_says_nothing(start: Start, newer: Newer) -> None:
    new = bundle(VERSION + 1)
    newer.files = {"/agent.zip": new, "/agent.zip.sha256": f"{hashlib.sha256(new).hexdigest()}  agent.zip\n".encode()}
    (newer.folder / "state").mkdir()
    (newer.folder / "state" / "agent.json").write_text(f'{{"bundle_url": "{newer.url}"}}')
    old_agent(start, newer)
    newer.refuse()
    assert newer.next_join() == VERSION + 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wrong checksum", "is not what the server promised (wrong checksum): it was thrown away"),
        ("does not run", "the server's agent does not run here (RuntimeError: not on this phone)"),
        ("not newer", "hands out the agent that is here already"),
        ("no address", "run the command of the invitation once more"),
        ("not the web", "which is not an address of the web"),
        ("no checksum", "anybody on the way could change what comes"),
    ],
)
def test_an_agent_that_cannot_be_taken_changes_nothing_and_says_why(
    start: Start, newer: Newer, case: str, words: str
) -> None:
    broken = "raise RuntimeError('not on this phone')" if case == "does not run" else ""
    new = bundle() if case == "not newer" else bundle(VERSION + 1, broken)
    newer.files = {"/agent.zip": new}
    url = {"no address": "", "not the web": "file:///etc/passwd", "no checksum": "http://192.0.2.1/agent.zip"}
    sha256 = hashlib.sha256(b"else" if case == "wrong checksum" else new).hexdigest()
    program = old_agent(start, newer)
    newer.refuse(url.get(case, newer.url), "" if case == "no checksum" else sha256)
    assert program.wait() == 2
    assert words in program.errors[-1]
    assert program.errors[-1].startswith("agent: ")
    assert "Traceback" not in program.output
    assert (newer.folder / "agent.zip").read_bytes() == bundle()


def test_a_server_that_hands_out_nothing_at_present_is_asked_again_later(start: Start, newer: Newer) -> None:
    program = old_agent(start, newer)
    newer.refuse(newer.url, "0" * 64)
    program.expect("no update yet: cannot fetch")
    assert newer.asked.wait(LIMIT_S)
    assert program.running
    os.kill(program.pid, 15)
    assert program.wait() == 0


def test_a_checkout_is_left_to_its_owner(start: Start, newer: Newer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES.parent))
    program = old_agent(start, newer)
    newer.refuse(newer.url, "0" * 64)
    assert program.wait() == 2
    assert "Update it the way it was installed (git pull, or pip install --upgrade)" in program.errors[-1]
    assert not newer.asked.is_set()


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://example.org/agent.zip", True),
        ("http://127.0.0.1:80/agent.zip", True),
        ("http://[::1]:80/agent.zip", True),
        ("http://192.0.2.7/agent.zip", False),
        ("http://127.0.0.1.example.org/agent.zip", False),
        ("ftp://127.0.0.1/agent.zip", False),
        ("", False),
    ],
)
def test_without_a_checksum_from_the_server_only_what_nobody_can_change_is_believed(url: str, safe: bool) -> None:
    assert is_safe(url) == safe


def test_a_refusal_is_understood_in_any_version_and_nothing_else_is() -> None:
    refused = Refused("too old", True, "http://x/agent.zip", "ab")
    frames = [bytes(frame) for frame in encode(refused)]
    assert decode(frames) == refused
    later = [frames[0][:4] + b"\xff" + frames[0][5:], frames[1]]
    assert refusal_of_another_version(later) == refused
    for wrong in ([later[0]], [later[0][:7], frames[1]], [later[0], b"{"], [later[0], b'{"reason": 1}'], [b"", b""]):
        assert refusal_of_another_version(wrong) is None
