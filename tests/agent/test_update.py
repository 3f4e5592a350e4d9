"""Which releases an agent accepts, and what it does when it cannot take one. Attacks on the running agent are in
test_attack_updates.py."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import FAST
from updating import KEY, NEXT, OTHER_KEY, RUNNING, SOURCES, NewerServer, Phone, make_bundle

from agent.identity import update
from agent.identity.bundle_file import bad_releases, install
from agent.identity.invitation import Invitation, parse_link, recall, remember
from agent.identity.keys import Keys
from agent.identity.release import (
    MOST_BYTES,
    Rejected,
    check_bundle,
    check_number,
    check_signature,
    is_key,
    key_text,
    number_inside,
    parse_release,
)
from agent.identity.update import NotNow, own_url
from agent.identity.update_state import highest_release, pin_signer, pinned_signer, waiting_release
from agent.protocol.errors import UserError
from agent.protocol.wire import VERSION, Refused, decode, encode, refusal_of_another_version
from android.bundle import Bundle
from testbed.access import releases
from testbed.access.signing import SigningKey, make_key, public_path, read_key, read_signer, sign_bundle

if TYPE_CHECKING:
    from conftest import Start

DATA = b"a bundle"
RELEASE = sign_bundle(KEY, DATA, NEXT)


# ---- a release


def test_a_release_is_read_as_written_and_verifies() -> None:
    release = parse_release(RELEASE.dump().encode())
    assert release == RELEASE
    check_signature(release, KEY.signer)
    check_number(release, RUNNING, RUNNING)


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "agent.zap"},
        {"number": NEXT + 1},
        {"sha256": "0" * 64},
        {"signer": OTHER_KEY.signer},
        {"signature": sign_bundle(OTHER_KEY, DATA, NEXT).signature},
        {"signature": key_text(KEY.sign(b"another purpose\n" + RELEASE.text))},
    ],
)
def test_every_field_is_signed(changed: dict[str, str]) -> None:
    with pytest.raises(Rejected):
        check_signature(replace(RELEASE, **changed), KEY.signer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"null",
        b"{",
        b"[" * MOST_BYTES,
        b" " * (MOST_BYTES + 1) + RELEASE.dump().encode(),
        *(
            json.dumps(json.loads(RELEASE.dump()) | change).encode()
            for change in (
                {"number": True},
                {"number": 0},
                {"number": -1},
                {"number": 2**53},
                {"number": "7"},
                {"number": 7.0},
                {"name": "../agent.zip"},
                {"name": "agent.zip\nnumber 999"},
                {"sha256": RELEASE.sha256.upper()},
                {"signer": RELEASE.signer + "="},
                {"signature": RELEASE.signature[:-1]},
            )
        ),
    ],
)
def test_anything_but_a_release_is_rejected(said: bytes) -> None:
    with pytest.raises(Rejected, match="not a signed release"):
        parse_release(said)


@given(st.binary(max_size=200))
def test_noise_is_rejected_and_nothing_else_happens(noise: bytes) -> None:
    with pytest.raises(Rejected):
        parse_release(noise)
    assert number_inside(noise) is None


@pytest.mark.parametrize(
    ("running", "highest", "bad", "taken"),
    [
        (RUNNING, 0, (), True),
        (0, 0, (), True),
        (NEXT, 0, (), False),
        (NEXT + 1, 0, (), False),
        (RUNNING, NEXT, (), False),
        (RUNNING, RUNNING, (NEXT,), False),
        (RUNNING, RUNNING, (NEXT + 1,), False),
        (RUNNING, RUNNING, (RUNNING - 1,), True),
    ],
)
def test_release_numbers_only_rise(running: int, highest: int, bad: tuple[int, ...], taken: bool) -> None:
    if taken:
        check_number(RELEASE, running, highest, frozenset(bad))
        return
    with pytest.raises(Rejected):
        check_number(RELEASE, running, highest, frozenset(bad))


def test_the_bundle_must_be_the_release_that_was_signed(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, NEXT)
    check_bundle(sign_bundle(KEY, bundle, NEXT), bundle)
    with pytest.raises(Rejected, match=f"says that it is release {NEXT}"):
        check_bundle(sign_bundle(KEY, bundle, NEXT + 1), bundle)
    with pytest.raises(Rejected, match="wrong checksum"):
        check_bundle(RELEASE, bundle)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 43))
def test_a_key_is_written_in_one_way_only(raw: bytes, at: int) -> None:
    text = key_text(raw)
    assert is_key(text)
    assert not is_key(text + "=")
    assert not is_key(text[:-1])
    assert not is_key(text[:at] + "\n" + text[at:])


@pytest.mark.parametrize(
    ("url", "fetched"),
    [
        ("http://127.0.0.1:8733/agent.zip", "http://192.0.2.7:8733/agent.zip"),  # never another host than the server's
        ("http://user@10.0.0.1:80/reboot?now=1", "http://192.0.2.7:80/reboot"),
        ("https://192.0.2.7:8733/agent.zip", None),
        ("file:///etc/passwd", None),
        ("http://192.0.2.7/agent.zip", None),
        ("http://192.0.2.7:port/agent.zip", None),
        ("http://[::1/agent.zip", None),
        ("", None),
    ],
)
def test_files_are_fetched_from_the_servers_own_host(url: str, fetched: str | None) -> None:
    if fetched is not None:
        assert own_url(url, "tcp://192.0.2.7:5555") == fetched
        return
    with pytest.raises(Rejected, match="not an address"):
        own_url(url, "tcp://192.0.2.7:5555")


# ---- a device's memory of releases


def test_the_signer_travels_in_the_invitation_and_is_remembered(tmp_path: Path) -> None:
    invitation = Invitation(("192.0.2.7:5555",), Keys.new().public, "token", 1.0, signer=KEY.signer)
    assert parse_link(invitation.link) == invitation
    remember(tmp_path, invitation)
    assert recall(tmp_path) == invitation
    assert parse_link(replace(invitation, signer="").link).signer == ""
    for wrong in (KEY.signer[:-1], f"{KEY.signer}&signer={KEY.signer}"):
        with pytest.raises(UserError, match=r"damaged|twice"):
            parse_link(replace(invitation, signer="").link + f"&signer={wrong}")


def test_the_first_signer_stays(tmp_path: Path) -> None:
    pin_signer(tmp_path, "")
    assert pinned_signer(tmp_path) == ""
    for signer in (KEY.signer, "", KEY.signer):
        pin_signer(tmp_path, signer)
        assert pinned_signer(tmp_path) == KEY.signer
    with pytest.raises(UserError, match="another signer"):
        pin_signer(tmp_path, OTHER_KEY.signer)
    assert pinned_signer(tmp_path) == KEY.signer
    pin_signer(tmp_path, OTHER_KEY.signer, trust=True)
    assert pinned_signer(tmp_path) == OTHER_KEY.signer


@pytest.mark.parametrize("text", ["", "[]", '{"signer": 1, "highest": "9", "waiting": true, "refused": 3}', "{"])
def test_a_damaged_memory_trusts_no_signer(tmp_path: Path, text: str) -> None:
    (tmp_path / "updates.json").write_text(text)
    assert pinned_signer(tmp_path) == ""
    assert highest_release(tmp_path) == 0  # of a checkout
    assert waiting_release(tmp_path) is None


def test_an_installation_cut_off_at_any_moment_leaves_a_whole_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off before each rename of a file in turn."""
    place, moves = tmp_path / "agent.zip", 0
    real = Path.replace

    def cut(self: Path, target: Path) -> Path:
        nonlocal moves
        moves -= 1
        if moves < 0:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", cut)
    for allowed in range(3):
        place.write_bytes(b"old")
        moves = allowed
        with pytest.raises(KeyboardInterrupt):
            install(place, b"new", NEXT, "sum")
        assert place.read_bytes() == b"old"
    moves = 3
    install(place, b"new", NEXT, "sum")
    assert place.read_bytes() == b"new"
    assert (tmp_path / "agent.zip.previous").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.zip", "agent.zip.previous", "agent.zip.trial"]


def test_releases_that_were_rolled_back_are_remembered(tmp_path: Path) -> None:
    assert bad_releases(tmp_path / "agent.zip") == frozenset()
    (tmp_path / "agent.zip.bad").write_text("7\nnonsense\n9\n")
    assert bad_releases(tmp_path / "agent.zip") == {7, 9}


# ---- an outdated agent


@pytest.fixture
def newer(nothing_left_behind: None) -> Iterator[NewerServer]:
    server = NewerServer()
    yield server
    server.close()


def test_a_server_without_a_release_is_asked_again_later(
    start: Start, newer: NewerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phone = Phone(tmp_path, start, monkeypatch)
    program = phone.launch("--invitation", newer.link())
    assert newer.next_join() == VERSION
    newer.refuse(url="http://127.0.0.1:9/agent.zip")  # no server listens there
    program.expect("no update yet: cannot fetch")
    program.signal(signal.SIGTERM)
    assert program.wait() == 0


def test_a_server_that_trickles_or_never_stops_sending_holds_no_agent(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then is neither silence nor an end."""
    monkeypatch.setattr(update, "FETCH_S", 0.3)
    listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/agent.zip"

    def trickle(piece: bytes, pause_s: float) -> None:
        line, _ = listener.accept()
        with line, contextlib.suppress(OSError):
            line.recv(65536)
            line.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while not stop.wait(pause_s):
                line.sendall(piece)

    cases = [((b"x", 0.01), NotNow, "takes more than"), ((bytes(1 << 16), 0.0), Rejected, "is larger than 4096 bytes")]
    for said, error, words in cases:
        server = threading.Thread(target=trickle, args=said)
        server.start()
        try:
            with pytest.raises(error, match=words):
                update._fetch(url, 4096)
        finally:
            stop.set()
            server.join()
            stop.clear()
    listener.close()


def test_a_checkout_is_left_to_its_owner(
    start: Start, newer: NewerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES.parent))
    program = start("agent", "--invitation", newer.link(), "--state", str(tmp_path / "state"), *FAST)
    assert newer.next_join() == VERSION
    newer.refuse()
    assert program.wait() == 2
    assert "Update it the way it was installed (git pull, or pip install --upgrade)" in program.errors[-1]
    assert newer.asked == []


def test_only_a_refusal_is_understood_in_any_version() -> None:
    refused = Refused("too old", True, "http://x/agent.zip", "ab")
    frames = [bytes(frame) for frame in encode(refused)]
    assert decode(frames) == refused
    later = [frames[0][:4] + b"\xff" + frames[0][5:], frames[1]]
    assert refusal_of_another_version(later) == refused
    for wrong in ([later[0]], [later[0][:7], frames[1]], [later[0], b"{"], [later[0], b'{"reason": 1}'], [b"", b""]):
        assert refusal_of_another_version(wrong) is None


# ---- signing


def test_a_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "release"
    key = make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == key
    assert read_signer(str(public_path(path))) == read_signer(key.signer) == key.signer
    assert key.seed.hex() not in repr(key)
    with pytest.raises(UserError, match="not overwritten"):
        make_key(path)
    path.chmod(0o644)
    with pytest.raises(UserError, match="others may read"):
        read_key(path)
    with pytest.raises(UserError, match=r"ends in \.pub"):
        read_signer(str(path))


def test_a_server_hands_out_only_signed_releases_with_rising_numbers(tmp_path: Path) -> None:
    state, place = tmp_path / "state", tmp_path / "agent.zip"
    assert releases.handed_out(state).release is None
    seven, eight = make_bundle(tmp_path, 7), make_bundle(tmp_path, 8)

    def signed(data: bytes, number: int, key: SigningKey = KEY) -> Path:
        releases.write_signed(place, Bundle(data), sign_bundle(key, data, number))
        return place

    with pytest.raises(UserError, match="no signer is trusted"):
        releases.publish(state, signed(seven, 7))
    releases.trust(state, KEY.signer)
    with pytest.raises(Rejected, match="this device trusts"):
        releases.publish(state, signed(eight, 8, OTHER_KEY))
    releases.publish(state, signed(eight, 8))
    with pytest.raises(UserError, match="only a higher number"):
        releases.publish(state, signed(seven, 7))
    assert releases.handed_out(state).bundle.data == eight
    (state / "release" / "agent.zip").write_bytes(seven)  # changed on the server's disk afterwards
    with pytest.raises(UserError, match="is not handed out"):
        releases.handed_out(state)


@pytest.mark.slow
def test_the_commands_lead_from_a_key_to_an_invitation(
    start_light: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEAVE_STATE", str(tmp_path / "state"))
    key, out = str(tmp_path / "key"), tmp_path / "out"

    def cleave(*words: str) -> str:
        program = start_light("cleave", *words)
        assert program.wait() == 0, program.output
        return program.output

    refused = start_light("cleave", "release", "keygen", "--out", str(tmp_path / "state" / "key"))
    assert refused.wait() == 2
    assert "the key belongs elsewhere" in refused.output
    cleave("release", "keygen", "--out", key)
    cleave("release", "sign", "--key", key, "--out", str(out), "--number", "5")
    again = (out / "agent.zip.release").read_bytes()
    cleave("release", "sign", "--key", key, str(out / "agent.zip"))
    assert (out / "agent.zip.release").read_bytes() == again  # reproducible, the signature too
    assert "is as it was signed" in cleave("release", "verify", str(out / "agent.zip"), "--signer", f"{key}.pub")
    cleave("release", "trust", f"{key}.pub")
    cleave("release", "publish", str(out / "agent.zip"))
    invited = json.loads(cleave("invite", "--address", "192.0.2.7:5555", "--format", "json"))
    assert parse_link(invited["link"]).signer == read_signer(f"{key}.pub")
    (out / "agent.zip").write_bytes(b"changed")
    wrong = start_light("cleave", "release", "verify", str(out / "agent.zip"))
    assert wrong.wait() == 2
    assert "wrong checksum" in wrong.output


def test_openssl_agrees(tmp_path: Path) -> None:
    """Independent of our implementation."""
    der = bytes.fromhex("302a300506032b6570032100") + KEY.public  # RFC 8410
    for name, data in (("key.der", der), ("text", RELEASE.text), ("signature", KEY.sign(RELEASE.text))):
        (tmp_path / name).write_bytes(data)
    words = "openssl pkeyutl -verify -pubin -keyform DER -inkey key.der -rawin -in text -sigfile signature"
    try:
        done = subprocess.run(words.split(), cwd=tmp_path, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    assert "Signature Verified Successfully" in done.stdout, done.stderr
