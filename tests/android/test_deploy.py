"""Phones on a cable: what is done with each, and what is reported for one that cannot be used.

adb and the phones are stand-ins (tests/helpers/adb_standin.py); the server, the bootstrap script and the agent are
real. The real adb is called with no phone attached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import debian
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from processes import Multiplication, grid
from termux import Termux

from agent.protocol.errors import UserError
from android.adb import STATES, Adb, Attached, parse_devices, parse_facts
from android.bundle import build
from android.channel import Channel
from android.deploy import Deployment, Phone, Ports
from android.serving import Serving

if TYPE_CHECKING:
    from conftest import Serve, Until

PIXEL: dict[str, Any] = {"state": "device", "model": "Pixel 7", "termux": True, "run_as": True}
MORE = "usb:1-4 product:panther model:Pixel_7 device:panther transport_id:3"


class Desk:
    """A desk with phones on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.termuxes: list[Termux] = []
        self.phones: dict[str, dict[str, Any]] = {}
        self.adb = folder / "adb"
        self.adb.write_text(f"#!{sys.executable} -IS\n{(ROOT / 'tests/helpers/adb_standin.py').read_text()}")
        self.adb.chmod(0o755)
        self._write()

    def _write(self) -> None:
        (self.folder / "phones.json").write_text(json.dumps(self.phones))

    def plug(self, serial: str, **phone: Any) -> None:
        made = PIXEL | phone
        if made["state"] == "device" and made["termux"]:
            termux = Termux(
                self.folder / f"root-{len(self.phones)}", "dash"
            ).make()  # a path in PATH must not contain a colon
            self.termuxes.append(termux)
            made |= {"environment": termux.environment}
        self.phones[serial] = made
        self._write()

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "adb-calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def deployment(self, serving: Serving, server_port: int, dry_run: Any = None) -> Deployment:
        """The phone's loopback is this machine's: adb reverse is called, but has nothing to do."""
        return Deployment(Adb(str(self.adb), dry_run), serving, server_port, Ports(server_port, serving.port))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for termux in desk.termuxes:
        termux.end()


@pytest.fixture
def files(nothing_left_behind: None) -> Iterator[Serving]:
    with Serving("127.0.0.1") as serving:
        yield serving


def touched(phone: Phone, channel: Channel) -> Phone:
    raise AssertionError(f"{phone.serial} cannot be worked with")


# ---- phones that work


@pytest.mark.slow
def test_two_phones_of_two_kinds_are_deployed_at_once_and_work_together(
    desk: Desk, files: Serving, serve: Serve, until: Until
) -> None:
    """One Termux is debuggable; into the other, commands are typed."""
    server = serve()
    port = int(server.address.rpartition(":")[2])
    desk.plug("2A041FDH200ABC", more=MORE)
    desk.plug("192.0.2.17:37021", model="SM-A536B", run_as=False, soc="")
    deployment = desk.deployment(files, port)
    link = server.address
    done = deployment.each(
        lambda phone, channel: deployment.start(phone, channel, link, ["--kernel", "numpy", "--unmeasured"])
    )
    assert [(p.ok, p.kernel, p.state) for p in done] == [(True, "numpy", "working: run")] * 2, done
    assert all(p.gflops and p.gflops > 0 for p in done)
    assert done[0].facts is not None
    assert (done[0].facts.model, done[0].facts.soc, done[0].facts.battery) == ("Pixel 7", "Tensor G2", "85%, charging")
    assert done[1].facts is not None
    assert done[1].facts.soc == "gs201"  # the SoC has no name of its own
    assert server.wait_for_devices(2, 10.0)
    assert sorted(server.labels) == ["pixel-7-0abc", "sm-a536b-7021"]
    Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1])).check()

    reversed_ = [call[1] for call in desk.calls if call[2:] == ["reverse", f"tcp:{port}", f"tcp:{port}"]]
    assert sorted(reversed_) == sorted(desk.phones)
    shown = deployment.each(deployment.show)
    assert [(p.ok, p.kernel) for p in shown] == [(True, "numpy")] * 2
    logs = deployment.each(lambda phone, channel: deployment.logs(phone, channel, desk.folder / "logs"))
    assert all(p.ok for p in logs)
    assert "joined" in (desk.folder / "logs/pixel-7-0abc.log").read_text()
    updated = deployment.each(deployment.update)  # the same bundle: nothing to restart
    assert all("runs already" in p.log for p in updated), updated
    copy = desk.folder / "later"
    shutil.copytree(ROOT / "agent", copy)
    (copy / "__init__.py").write_text('"""A later agent."""\n')
    with Serving("127.0.0.1", bundle=build(copy)) as later:
        newer = desk.deployment(later, port)
        assert [(p.ok, p.state) for p in newer.each(newer.update)] == [(True, "working: run")] * 2
        for termux in desk.termuxes:
            assert (termux.home / ".cleave/agent.zip").read_bytes() == later.bundle.data
    assert sorted(server.labels) == sorted(["pixel-7-0abc", "sm-a536b-7021"] * 2)  # each returned
    stopped = deployment.each(deployment.stop)
    assert [p.state for p in stopped] == ["the agent has left"] * 2
    until(lambda: server.devices == 0, "the server knows that the phones have left")
    assert [p.state for p in deployment.each(deployment.show)] == ["stopped"] * 2


def test_ten_phones_at_once_each_get_their_own_answer(desk: Desk, files: Serving) -> None:
    for i in range(10):
        desk.plug(f"SERIAL{i:04d}", run_as=i % 2 == 0)
        (desk.termuxes[-1].prefix / "bin/cleave-agent").write_text(f"#!/bin/sh\necho this is {i}\n")
        (desk.termuxes[-1].prefix / "bin/cleave-agent").chmod(0o755)
    deployment = desk.deployment(files, 9)
    done = deployment.each(deployment.stop)
    assert [(p.serial, p.state) for p in done] == [(f"SERIAL{i:04d}", f"this is {i}") for i in range(10)]


# ---- phones that do not


def test_unreachable_phones_are_named_and_do_not_delay_the_others(desk: Desk, files: Serving) -> None:
    desk.plug("GOOD", more=MORE)
    desk.plug("SHY", state="unauthorized", more="usb:1-2 transport_id:4")
    desk.plug("GONE", state="offline")
    desk.plug("MINE", state="no permissions (user in plugdev group; are your udev rules wrong?); see [http://x]")
    desk.plug("ODD", state="host")
    deployment = desk.deployment(files, 9)
    rows = {p.serial: p for p in deployment.each(lambda phone, channel: phone)}
    assert [p.ok for p in rows.values()] == [True, False, False, False, False]
    assert "accept 'Allow USB debugging?'" in rows["SHY"].state
    assert "plug it in again" in rows["GONE"].state
    assert "android-sdk-platform-tools-common" in rows["MINE"].state
    assert "'host'" in rows["ODD"].state


def test_for_a_phone_without_termux_the_table_says_where_to_get_it(desk: Desk, files: Serving) -> None:
    desk.plug("PLAIN", termux=False, run_as=False)
    (row,) = desk.deployment(files, 9).each(touched)
    assert not row.ok
    assert row.state.startswith("no Termux: install it from F-Droid")


@pytest.mark.parametrize(
    "words",
    [
        "adb: error: closed",  # Android 4
        "error: more than one device/emulator",  # wireless adb before Android 9
        "adb: error: cannot bind listener: Operation not permitted",
    ],
)
@pytest.mark.parametrize("run_as", [True, False])
def test_a_refused_reverse_is_explained(desk: Desk, files: Serving, words: str, run_as: bool) -> None:
    desk.plug("OLD", reverse=words, run_as=run_as)
    deployment = desk.deployment(files, 9)
    (row,) = deployment.each(lambda phone, channel: deployment.start(phone, channel, "tcp://127.0.0.1:9"))
    assert not row.ok
    assert row.state.startswith(f"adb reverse was refused ({words})")
    assert "cleave phones invite" in row.state
    assert desk.termuxes[0].ours() == []


@pytest.mark.slow
def test_a_locked_phone_is_never_typed_into(desk: Desk, files: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("android.channel.FOCUS_PAUSE_S", 0.01)
    desk.plug("LOCKED", run_as=False, focus="NotificationShade")
    deployment = desk.deployment(files, 9)
    (row,) = deployment.each(deployment.show)
    assert row.state == "Termux is not on the phone's screen: unlock the phone, leave it on, and try again"
    assert not any("input" in call[-1] for call in desk.calls)


def test_a_phone_that_refuses_typed_input_is_shown_with_the_setting_to_change(desk: Desk, files: Serving) -> None:
    refusal = (
        "java.lang.SecurityException: Injecting input events requires the caller to have the INJECT_EVENTS permission"
    )
    desk.plug("MI", run_as=False, typing=refusal)
    deployment = desk.deployment(files, 9)
    (row,) = deployment.each(deployment.show)
    assert "USB debugging (Security settings)" in row.state


def test_the_table_shows_the_error_of_the_bootstrap_script(desk: Desk, files: Serving) -> None:
    desk.plug("FAR")
    (desk.termuxes[0].standin / "no-network").touch()
    deployment = desk.deployment(files, 9)
    (row,) = deployment.each(lambda phone, channel: deployment.start(phone, channel, "tcp://127.0.0.1:9"))
    assert not row.ok
    assert row.state.startswith("no network, or it broke off: installing Python")


def test_a_phone_without_an_agent_is_shown_as_such(desk: Desk, files: Serving) -> None:
    desk.plug("NEW")
    deployment = desk.deployment(files, 9)
    (row,) = deployment.each(deployment.show)
    assert (row.ok, row.state) == (False, "no agent: cleave phones start")


# ---- without phones, without adb, without doing anything


def test_a_dry_run_prints_every_command_and_changes_nothing(desk: Desk, files: Serving) -> None:
    desk.plug("2A041FDH200ABC")
    told: list[str] = []
    deployment = desk.deployment(files, 5555, told.append)
    deployment.each(lambda phone, channel: deployment.start(phone, channel, "cleave://x"))
    deployment.each(deployment.stop)
    words = [line.split("\n")[0] for line in told]
    assert words[0].endswith("adb devices -l")
    for expected in (
        "push /tmp",
        "reverse tcp:5555 tcp:5555",
        "shell -T 'run-as com.termux",
        "reverse --remove tcp:5555",
    ):
        assert any(expected in line for line in words), expected
    assert any("bootstrap.sh" in line and "cleave://x" in line for line in told)  # the standard input
    assert all(call[:2] == ["devices", "-l"] or (call[2] == "shell" and "getprop" in call[3]) for call in desk.calls)
    assert desk.termuxes[0].ours() == []


@pytest.mark.slow
def test_the_real_adb_without_a_phone_gives_a_clear_message_and_a_dry_run_an_example(tmp_path: Path) -> None:
    debian.program("adb", "adb")
    environment = os.environ | {"CLEAVE_STATE": str(tmp_path), "ANDROID_ADB_SERVER_PORT": "25037"}
    cleave = [sys.executable, "-c", "from testbed.commands.cli import main; main()", "phones"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*cleave, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    try:
        none = run("list")
        assert none.returncode == 2
        assert none.stderr.startswith("cleave: no phone is attached. On the phone: developer options, USB debugging on")
        dry = run("start", "--dry-run", "--server-port", "5555")
        assert dry.returncode == 0, dry.stderr
        assert "adb -s SERIAL reverse tcp:25555 tcp:5555" in dry.stdout
    finally:
        subprocess.run(["adb", "kill-server"], env=environment, capture_output=True)


def test_without_adb_the_error_says_how_to_get_it() -> None:
    with pytest.raises(UserError, match=r"adb-that-is-not-there is not installed. Debian, Ubuntu: apt install adb"):
        Adb("adb-that-is-not-there").devices()


# ---- reading


def test_a_list_of_the_real_adb_is_understood() -> None:
    text = f"""* daemon not running; starting now at tcp:5037
* daemon started successfully
List of devices attached
2A041FDH200ABC         device {MORE}
R58N123ABCD            unauthorized usb:1-2 transport_id:4
192.0.2.17:37021       offline transport_id:2
082f59270073e1e3       no permissions (verify udev rules); see [http://developer.android.com/tools/device.html] usb:1-1

"""
    assert parse_devices(text) == [
        Attached("2A041FDH200ABC", "device"),
        Attached("R58N123ABCD", "unauthorized"),
        Attached("192.0.2.17:37021", "offline"),
        Attached("082f59270073e1e3", "no permissions"),
    ]


SERIAL = st.text("ABCDEFG0123456789.:_-", min_size=4, max_size=30)


@given(st.dictionaries(SERIAL, st.sampled_from(["device", *STATES]), max_size=4))
def test_every_listed_phone_is_found_with_its_state(phones: dict[str, str]) -> None:
    lines = [f"{serial:<22} {state} transport_id:1" for serial, state in phones.items()]
    found = parse_devices("\n".join(["List of devices attached", *lines]))
    assert {a.serial: a.state for a in found} == phones
    assert all(bool(a.trouble) == (a.state != "device") for a in found)


@given(st.text())
def test_facts_are_read_from_any_output_of_a_phone(text: str) -> None:
    parse_facts(text)
    parse_facts(text.replace("\n", "\nmodel="))
