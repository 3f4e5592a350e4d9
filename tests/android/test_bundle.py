"""A phone installs one file: reproducible, small and complete; the server hands out nothing else."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

from agent.identity.release import number_inside
from agent.protocol.errors import UserError
from android.bundle import build, main
from android.serving import Serving


@pytest.fixture
def files(nothing_left_behind: None) -> Iterator[Serving]:
    with Serving("127.0.0.1") as served:
        yield served


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def test_the_bundle_holds_only_the_agent_and_is_small(tmp_path: Path) -> None:
    bundle = build()
    assert len(bundle.data) < 1_000_000
    (tmp_path / "agent.zip").write_bytes(bundle.data)
    with zipfile.ZipFile(tmp_path / "agent.zip") as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"agent", "bootstrap.sh"}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "agent").rglob("*.py")} <= set(names)


def test_the_same_sources_give_the_same_bytes_in_any_folder(tmp_path: Path) -> None:
    copy = tmp_path / "agent"
    copy.mkdir()
    for path in sorted((ROOT / "agent").rglob("*.py"), reverse=True):
        here = copy / path.relative_to(ROOT / "agent")
        here.parent.mkdir(exist_ok=True)
        here.write_bytes(path.read_bytes())
        os.utime(here, (1, 1))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "wire.pyc").write_bytes(b"not a source")
    assert build(copy) == build()
    assert build(copy, release=7) == build(release=7) != build()
    assert number_inside(build(release=7).data) == 7
    assert number_inside(build().data) == 0
    (copy / "protocol" / "wire.py").write_text("# another\n")
    assert build(copy).sha256 != build().sha256


def test_python_runs_the_agent_from_the_bundle_with_numpy_and_zmq_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.zip"
    assert main(["--out", str(path)]) == 0
    assert capsys.readouterr().out.split() == [build().sha256, str(path)]
    code = "import sys\nfrom agent.compute import worker\nprint(worker.__file__)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(path)}, cwd="/", capture_output=True, text=True
    )
    assert done.stdout.startswith(str(path)), done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"agent", "numpy", "zmq"} <= loaded
    assert not {"torch", "pydantic", "psutil", "scipy", "ps", "emulator", "testbed"} & loaded


def test_the_three_files_are_served_and_nothing_else(files: Serving) -> None:
    assert get(f"{files.url}/agent.zip") == files.bundle.data == build().data
    assert get(f"{files.url}/agent.zip.sha256").decode() == f"{files.bundle.sha256}  agent.zip\n"
    script = get(f"{files.url}/bootstrap.sh").decode()
    assert f"URL='{files.url}'" in script
    assert f"SHA256='{files.bundle.sha256}'" in script
    for path in (
        "/",
        "/agent",
        "/../README.md",
        "/%2e%2e/README.md",
        "/bootstrap.sh/",
        "/agent.zip?x=1",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(files.url + path)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PROPFIND"])
def test_nothing_can_be_written(files: Serving, method: str) -> None:
    line = http.client.HTTPConnection("127.0.0.1", files.port, timeout=10)
    line.request(method, "/agent.zip", body=b"x" * 1000)
    assert line.getresponse().status == 501
    line.close()


def test_invalid_and_endless_requests_are_cut_off(files: Serving) -> None:
    for said in (b"\x00\xff\x00\xff\r\n\r\n", b"GET /" + b"a" * 100_000, b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", files.port), timeout=10) as line:
            line.sendall(said)
            while line.recv(65536):
                pass
    assert get(f"{files.url}/agent.zip.sha256")


def test_a_port_in_use_is_named(files: Serving) -> None:
    with pytest.raises(UserError, match=rf"port {files.port}: Address already in use. Take another port"):
        Serving("127.0.0.1", files.port)
