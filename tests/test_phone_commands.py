"""`cleave phones`: from an invitation to a phone that works, over an encrypted line; and the same over adb."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import LIMIT_S, Multiplication, free_port
from termux import Termux

from android.serving import Serving
from ps.access_file import AccessFile
from ps.server import Server

if TYPE_CHECKING:
    from conftest import Serve, Start

ROOT = Path(__file__).resolve().parents[1]
CLEAVE = "from testbed.cli import main; main()"


@pytest.fixture
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AccessFile:
    monkeypatch.setenv("CLEAVE_STATE", str(tmp_path / "server"))
    return AccessFile(tmp_path / "server")


@pytest.fixture
def guarded(nothing_left_behind: None, access: AccessFile) -> Iterator[Server]:
    server = Server(listen=["tcp://127.0.0.1:0"], access=access).start()
    yield server
    server.stop()
    assert server.error is None


@pytest.fixture
def termux(tmp_path: Path) -> Iterator[Termux]:
    made = Termux(tmp_path / "phone", "dash").make()
    yield made
    made.end()


def test_the_pasted_command_of_an_invitation_brings_a_phone_into_the_run(
    start: Start, guarded: Server, access: AccessFile, termux: Termux
) -> None:
    port = str(free_port())
    invite = start("-c", CLEAVE, "phones", "invite", "--address", "127.0.0.1", "--port", port)
    command = invite.expect("curl -fsSO ")
    invite.expect("until Ctrl-C")
    again = start("-c", CLEAVE, "phones", "invite", "--address", "127.0.0.1:5555", "--port", port)  # elsewhere, too
    assert again.wait() == 0
    assert "from a server that runs already" in again.output
    done = termux.sh(f"{command} --name my-phone --unmeasured")
    assert done.returncode == 0, done.stdout
    assert guarded.wait_for_devices(1, LIMIT_S)
    Multiplication(guarded, (1, 40, 30, 20)).check()
    (enrolled,) = access.read().enrolled
    assert enrolled.name == "my-phone"
    assert "working" in termux.sh("cleave-agent status").stdout
    assert "only_while_charging  on" in termux.sh("cleave-agent rules set only_while_charging true").stdout
    kept = json.loads((termux.home / ".cleave/state/agent.json").read_text())
    assert kept["bundle_url"] == f"http://127.0.0.1:{port}/agent.zip"
    stop = termux.sh("cleave-agent stop; cleave-agent start")  # by its key alone: the invitation was for one phone
    assert "this phone works now" in stop.stdout, stop.stdout
    assert termux.sh("cleave-agent uninstall").returncode == 0
    assert termux.ours() == []


def test_an_invitation_with_nobody_to_invite_to_says_so(start: Start, access: AccessFile) -> None:
    invite = start("-c", CLEAVE, "phones", "invite", "--port", str(free_port()))
    assert invite.wait() == 2
    assert invite.output.startswith("cleave: no server listens for invited devices; start one with")


def test_phones_on_adb_are_a_table(
    start: Start, access: AccessFile, termux: Termux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adb = tmp_path / "adb"
    adb.write_text(f"#!{sys.executable} -IS\n{(ROOT / 'tests/adb_standin.py').read_text()}")
    adb.chmod(0o755)
    phone = {"state": "device", "model": "Pixel 7", "termux": True, "run_as": False, "environment": termux.environment}
    phones = {"2A041FDH200ABC": phone, "R58N123ABCD": {"state": "unauthorized"}}
    (tmp_path / "phones.json").write_text(json.dumps(phones))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    listed = start("-c", CLEAVE, "phones", "list", "--format", "json")
    assert listed.wait() == 1  # not all of them work
    first, second = json.loads(listed.output)
    assert (first["model"], first["android"], first["soc"], first["ram"]) == ("Pixel 7", "14", "Tensor G2", "7.97 GB")
    assert (first["battery"], first["state"]) == ("85%, charging", "no agent: cleave phones start")
    assert "accept 'Allow USB debugging?'" in second["state"]
    nowhere = start("-c", CLEAVE, "phones", "start")
    assert nowhere.wait() == 2
    assert "--server-port 5555" in nowhere.output


def test_a_run_can_serve_the_files_itself(serve: Serve) -> None:
    from testbed.display import Display
    from testbed.hosts import _serving_files
    from testbed.scenario import load_scenario

    server = serve()
    port = free_port()
    scenario = load_scenario("quickstart", {"server.files": str(port)})
    with _serving_files(scenario, server, Display()):
        url, checksum = server.bundle
        assert url == f"http://127.0.0.1:{port}/agent.zip"
    with Serving("127.0.0.1") as serving:
        assert serving.bundle.sha256 == checksum
