"""Code reaches a phone only signed. Attacks on the self-update of the real agent, run from a real bundle by the real
launcher, over a real encrypted line; each by a server that holds the key with which the phone was invited."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from updating import KEY, NEXT, OTHER_KEY, RUNNING, NewerServer, Phone, make_bundle

from agent.identity.release import signer_fingerprint
from agent.protocol.wire import VERSION
from testbed.access.signing import sign_bundle

if TYPE_CHECKING:
    from conftest import Program, Start, Until


@pytest.fixture
def newer(nothing_left_behind: None) -> Iterator[NewerServer]:
    server = NewerServer()
    yield server
    server.close()


@pytest.fixture
def phone(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Phone]:
    made = Phone(tmp_path, start, monkeypatch)
    made.rule("auto")  # without a question to the owner, a server has the most to gain
    yield made
    made.end()


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An honest release for the server's protocol version."""
    return make_bundle(tmp_path_factory.mktemp("new"), NEXT, VERSION + 1)


def joined(phone: Phone, newer: NewerServer, *options: str) -> Program:
    program = phone.launch("--invitation", newer.link(), *options)
    assert newer.next_join() == VERSION
    return program


def assert_refused(phone: Phone, program: Program, reason: str) -> None:
    """The agent says why, changes nothing, and keeps the reason for its owner."""
    assert program.wait() == 2, program.output
    assert any("update refused: " in line and reason in line for line in program.said), program.output
    assert "Traceback" not in program.output
    assert phone.place.read_bytes() == phone.installed
    assert sorted(path.name for path in phone.home.glob("agent.zip*")) == ["agent.zip"]
    said = phone.ask("status")
    assert "an update was refused" in said
    assert reason in said


# ---- wrong signatures


def unsigned(newer: NewerServer, new: bytes, folder: Path) -> None:
    newer.offer(new, None)


def by_another_key(newer: NewerServer, new: bytes, folder: Path) -> None:
    newer.offer_signed(new, key=OTHER_KEY)


def in_the_signers_name(newer: NewerServer, new: bytes, folder: Path) -> None:
    newer.offer(new, replace(sign_bundle(OTHER_KEY, new, NEXT), signer=KEY.signer))


def tampered(newer: NewerServer, new: bytes, folder: Path) -> None:
    newer.offer(new.replace(b"import", b"impart", 1), sign_bundle(KEY, new, NEXT))


def older(newer: NewerServer, new: bytes, folder: Path) -> None:
    newer.offer_signed(make_bundle(folder, RUNNING - 1, VERSION + 1), RUNNING - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (unsigned, "it is not signed"),
        (by_another_key, f"signed by {signer_fingerprint(OTHER_KEY.signer)}, this device trusts"),
        (in_the_signers_name, "the signature is wrong"),
        (tampered, "not the one that was signed (wrong checksum)"),
        (older, f"release {RUNNING - 1} is not newer"),
    ],
)
def test_a_wrongly_signed_release_is_refused_and_logged(
    phone: Phone,
    newer: NewerServer,
    new: bytes,
    tmp_path: Path,
    attack: Callable[[NewerServer, bytes, Path], None],
    reason: str,
) -> None:
    """One of each kind: tests/agent/test_update.py has the others, without a phone."""
    attack(newer, new, tmp_path)
    program = joined(phone, newer)
    newer.refuse()
    assert_refused(phone, program, reason)


def test_another_bundle_than_the_server_promised_is_refused(phone: Phone, newer: NewerServer, new: bytes) -> None:
    newer.offer_signed(new)
    program = joined(phone, newer)
    newer.refuse(sha256="0" * 64)
    assert_refused(phone, program, "not the one that the server promised")


def test_a_release_below_one_that_was_installed_before_is_refused(
    phone: Phone, newer: NewerServer, tmp_path: Path
) -> None:
    """The owner went back to release 100 by hand; an attacker has 101, which was withdrawn because of its faults."""
    state = phone.home / "state"
    state.mkdir()
    (state / "updates.json").write_text(json.dumps({"highest": NEXT + 1}))
    newer.offer_signed(make_bundle(tmp_path, NEXT, VERSION + 1))
    program = joined(phone, newer)
    newer.refuse()
    assert_refused(phone, program, f"release {NEXT} is not newer")


# ---- connections and addresses that prove nothing


@pytest.mark.slow
def test_nothing_is_fetched_over_a_plain_line_not_even_on_loopback(
    phone: Phone, newer: NewerServer, new: bytes
) -> None:
    release = newer.offer_signed(new)
    first = joined(phone, newer)  # the signer is pinned
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    program = phone.launch("--ps", newer.plain_address)
    assert newer.next_join() == VERSION
    newer.refuse(sha256=release.sha256)
    assert_refused(phone, program, "it was offered over an unencrypted connection")
    assert newer.asked == []


@pytest.mark.slow
def test_a_remembered_loopback_address_is_not_asked(phone: Phone, newer: NewerServer, new: bytes) -> None:
    """Any app on a phone may listen where `adb reverse` once led to the server's files."""
    newer.offer_signed(new)
    state = phone.home / "state"
    state.mkdir()
    (state / "agent.json").write_text(json.dumps({"bundle_url": newer.url}))
    program = joined(phone, newer)
    newer.refuse(url="")
    assert_refused(phone, program, "the server offers none")
    assert newer.asked == []


@pytest.mark.slow
def test_without_a_signer_in_the_invitation_there_are_no_updates(phone: Phone, newer: NewerServer, new: bytes) -> None:
    newer.offer_signed(new)
    program = phone.launch("--invitation", newer.link(signer=""))
    assert newer.next_join() == VERSION
    newer.refuse()
    assert_refused(phone, program, "the invitation named no signer")
    assert newer.asked == []


@pytest.mark.slow
def test_a_second_invitation_does_not_change_the_signer_unless_the_owner_says_so(
    phone: Phone, newer: NewerServer, start: Start
) -> None:
    first = joined(phone, newer)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    second = phone.launch("--invitation", newer.link(OTHER_KEY.signer))
    assert second.wait() == 2
    assert f"names another signer of updates ({signer_fingerprint(OTHER_KEY.signer)})" in second.output
    updates = phone.home / "state" / "updates.json"
    assert json.loads(updates.read_text())["signer"] == KEY.signer
    meant = phone.launch("--invitation", newer.link(OTHER_KEY.signer), "--trust-signer")
    assert newer.next_join() == VERSION
    assert json.loads(updates.read_text())["signer"] == OTHER_KEY.signer
    meant.signal(signal.SIGTERM)
    assert meant.wait() == 0


# ---- the owner's rule


@pytest.mark.slow
def test_with_auto_a_signed_release_replaces_the_old_one(phone: Phone, newer: NewerServer, new: bytes) -> None:
    release = newer.offer_signed(new)
    program = joined(phone, newer)
    newer.refuse(sha256=release.sha256)
    assert newer.next_join() == VERSION + 1
    program.expect(f"release {NEXT} has started and stays")
    assert phone.place.read_bytes() == new
    assert phone.place.with_name("agent.zip.previous").read_bytes() == phone.installed
    assert not phone.place.with_name("agent.zip.trial").exists()
    assert json.loads((phone.home / "state" / "updates.json").read_text())["highest"] == NEXT
    program.signal(signal.SIGTERM)
    assert program.wait() == 0


@pytest.mark.slow
def test_with_ask_a_release_waits_until_the_owner_has_seen_its_number_and_signer(
    phone: Phone, newer: NewerServer, new: bytes
) -> None:
    phone.rules.unlink()  # ask is the default
    newer.offer_signed(new)
    program = joined(phone, newer)
    newer.refuse()
    assert program.wait() == 2
    assert phone.place.read_bytes() == phone.installed
    assert f"release {NEXT}, signed by {signer_fingerprint(KEY.signer)}, waits for your yes" in phone.ask("status")
    newer.files = {}  # the waiting release is on the phone
    said = phone.agent("update")
    assert f"release {NEXT} for release {RUNNING}, signed by {signer_fingerprint(KEY.signer)}" in said
    assert phone.place.read_bytes() == new
    assert "waits" not in phone.ask("status")
    program = phone.launch_again()
    assert newer.next_join() == VERSION + 1
    program.expect(f"release {NEXT} has started and stays")
    program.signal(signal.SIGTERM)
    assert program.wait() == 0


@pytest.mark.slow
def test_the_phones_own_command_installs_the_waiting_release_and_starts_it(
    phone: Phone, newer: NewerServer, new: bytes, until: Until
) -> None:
    phone.rule("ask")
    newer.offer_signed(new)
    program = joined(phone, newer)
    newer.refuse()
    assert program.wait() == 2
    away = "01:00-01:01" if time.localtime().tm_hour >= 12 else "23:00-23:01"
    phone.rules.write_text(f'hours = "{away}"\n')  # so that it counts as started without a welcome
    said = phone.ask("update")
    assert f"release {NEXT} for release {RUNNING}" in said
    assert "not working: it works at" in said
    until(lambda: not phone.place.with_name("agent.zip.trial").exists(), "the trial is over")
    assert phone.place.read_bytes() == new
    assert "suspended" in phone.ask("status")
    assert "the agent has left" in phone.ask("stop")
    assert "the agent is not running" in phone.ask("status")


@pytest.mark.slow
def test_a_waiting_release_is_checked_again_when_the_owner_agrees(phone: Phone, newer: NewerServer, new: bytes) -> None:
    phone.rule("ask")
    newer.offer_signed(new)
    program = joined(phone, newer)
    newer.refuse()
    assert program.wait() == 2
    waiting = phone.home / "state" / "update.zip"
    waiting.write_bytes(new.replace(b"import", b"impart", 1))
    assert "not the one that was signed (wrong checksum)" in phone.agent("update")
    waiting.write_bytes(new)
    phone.rule("never")
    assert 'the owner\'s rule is updates = "never"' in phone.agent("update")
    assert phone.place.read_bytes() == phone.installed


@pytest.mark.slow
def test_with_never_nothing_is_fetched(phone: Phone, newer: NewerServer, new: bytes) -> None:
    phone.rule("never")
    newer.offer_signed(new)
    program = joined(phone, newer)
    newer.refuse()
    assert_refused(phone, program, 'the owner\'s rule is updates = "never"')
    assert newer.asked == []


# ---- a release that does not start


BROKEN: dict[str, dict[str, Any]] = {
    "does not parse": {"module": "__main__", "code": "def ("},
    "raises on import": {"module": "protocol/wire", "code": "raise RuntimeError('not on this phone')"},
    "exits at once, content": {"module": "__main__", "code": "sys.exit(0)"},
    "crashes when it joins": {
        "module": "protocol/entrance",
        "code": "EntranceConnection.__init__ = lambda *a, **k: 1 / 0",
    },
    "hangs": {"module": "__main__", "code": "import threading\nthreading.Event().wait()"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_release_that_does_not_start_is_rolled_back_and_not_tried_again(
    phone: Phone, newer: NewerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "hangs":
        monkeypatch.setenv("CLEAVE_START_S", "2")
    newer.offer_signed(make_bundle(tmp_path, NEXT, VERSION + 1, **BROKEN[how]))
    program = joined(phone, newer)
    newer.refuse()
    assert newer.next_join() == VERSION, program.output  # the previous release, restored
    assert f"cleave: release {NEXT} does not start (try 2 of 2)" in program.said
    assert phone.place.read_bytes() == phone.installed
    assert phone.place.with_name("agent.zip.bad").read_text() == f"{NEXT}\n"
    newer.refuse()
    assert program.wait() == 2
    assert f"release {NEXT} did not start here and was rolled back: it is not tried again" in phone.ask("status")


@pytest.mark.slow
def test_a_stop_during_a_trial_is_obeyed_and_the_trial_continues_at_the_next_start(
    phone: Phone, newer: NewerServer, tmp_path: Path, until: Until
) -> None:
    newer.offer_signed(make_bundle(tmp_path, NEXT, VERSION + 1, **BROKEN["hangs"]))
    program = joined(phone, newer)
    newer.refuse()
    until(lambda: phone.place.read_bytes() != phone.installed, "the new bundle is in place")
    agent_pid = (phone.home / "agent.pid").read_text()
    until(lambda: (phone.home / "agent.pid").read_text() != agent_pid, "the new agent is started")
    program.signal(signal.SIGTERM)
    assert program.wait() != 0
    assert phone.place.with_name("agent.zip.trial").exists()
    assert not phone.place.with_name("agent.zip.bad").exists()
