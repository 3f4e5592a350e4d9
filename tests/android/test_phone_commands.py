"""`cleave phones`: from an invitation to a phone that works, over an encrypted line; and the same over adb."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from places import ROOT
from processes import LIMIT_S, Multiplication, free_port
from termux import Termux

from agent.identity.release import parse_release
from android.bundle import build
from ps.access.access_file import AccessFile
from ps.transport.server import Server
from testbed.access import releases
from testbed.access.signing import SigningKey, sign_bundle

if TYPE_CHECKING:
    from conftest import Serve, Start


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


@pytest.mark.slow
def test_the_pasted_command_of_an_invitation_brings_a_phone_into_the_run(
    start_light: Start, guarded: Server, access: AccessFile, termux: Termux
) -> None:
    port = str(free_port())
    invite = start_light("cleave", "phones", "invite", "--address", "127.0.0.1", "--port", port)
    command = invite.expect("curl -fsSO ")
    invite.expect("until Ctrl-C")
    again = start_light(
        "cleave", "phones", "invite", "--address", "127.0.0.1:5555", "--port", port
    )  # for an address elsewhere
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
    token = command.split("token=")[1].split("&")[0].encode()
    with_token = [p for p in (termux.home / ".cleave").rglob("*") if p.is_file() and token in p.read_bytes()]
    assert with_token == [], "a used token is left behind"
    stop = termux.sh("cleave-agent stop; cleave-agent start")  # by its key alone: the invitation was for one phone
    assert "this phone works now" in stop.stdout, stop.stdout
    assert termux.sh("cleave-agent uninstall").returncode == 0
    assert termux.ours() == []


def test_an_invitation_without_a_server_says_so(start_light: Start, access: AccessFile) -> None:
    invite = start_light("cleave", "phones", "invite", "--port", str(free_port()))
    assert invite.wait() == 2
    assert invite.output.startswith("cleave: no server listens for invited devices; start one with")


@pytest.mark.slow
def test_phones_on_adb_are_listed_in_a_table(
    start_light: Start, access: AccessFile, termux: Termux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adb = tmp_path / "adb"
    adb.write_text(f"#!{sys.executable} -IS\n{(ROOT / 'tests/helpers/adb_standin.py').read_text()}")
    adb.chmod(0o755)
    phone = {"state": "device", "model": "Pixel 7", "termux": True, "run_as": False, "environment": termux.environment}
    phones = {"2A041FDH200ABC": phone, "R58N123ABCD": {"state": "unauthorized"}}
    (tmp_path / "phones.json").write_text(json.dumps(phones))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    listed = start_light("cleave", "phones", "list", "--format", "json")
    assert listed.wait() == 1  # not all phones work
    first, second = json.loads(listed.output)
    assert (first["model"], first["android"], first["soc"], first["ram"]) == ("Pixel 7", "14", "Tensor G2", "7.97 GB")
    assert (first["battery"], first["state"]) == ("85%, charging", "no agent: cleave phones start")
    assert "accept 'Allow USB debugging?'" in second["state"]
    nowhere = start_light("cleave", "phones", "start")
    assert nowhere.wait() == 2
    assert "--server-port 5555" in nowhere.output


def test_a_run_can_serve_the_files_itself_and_offers_only_signed_releases(
    serve: Serve, access: AccessFile, tmp_path: Path
) -> None:
    from testbed.runs.display import Display
    from testbed.runs.hosts import serving_files
    from testbed.runs.scenario import load_scenario

    server = serve()
    port = free_port()
    scenario = load_scenario("quickstart", {"server.files": str(port)})
    with serving_files(scenario, server, Display()):
        assert server.bundle == ("", "")  # a build of this checkout, only for new phones
        assert get(f"http://127.0.0.1:{port}/agent.zip") == build().data
    key, bundle = SigningKey(b"k" * 32), build(release=7)
    releases.trust(access.path.parent, key.signer)
    releases.write_signed(tmp_path / "agent.zip", bundle, sign_bundle(key, bundle.data, 7))
    releases.publish(access.path.parent, tmp_path / "agent.zip")
    with serving_files(scenario, server, Display()):
        assert server.bundle == (f"http://127.0.0.1:{port}/agent.zip", bundle.sha256)
        assert get(f"http://127.0.0.1:{port}/agent.zip") == bundle.data
        assert parse_release(get(f"http://127.0.0.1:{port}/agent.zip.release")).number == 7


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())
