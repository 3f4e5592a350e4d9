"""Who gets in from elsewhere: a real server, real agents, real sockets. Whoever is refused is told why, is logged once,
and never sees a block."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq
from processes import FAST, LIMIT_S, Multiplication
from zmq.utils.monitor import recv_monitor_message

from agent.identity.invitation import Invitation, parse_link
from agent.identity.keys import Curve, Keys, fingerprint
from agent.protocol.connection import HANDSHAKE_FAILED
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import Heartbeat, Hello, Join, Message, Probe, Refused, Ticket, Welcome, decode, encode
from ps.access import access_list as access
from ps.access.access_file import AccessFile
from ps.access.listening import AddressError
from ps.transport.server import Server
from testbed.access.inviting import new_invitation

if TYPE_CHECKING:
    from conftest import Start, Until

PROFILE = Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 1000)


class Guarded:
    """A server that takes invited devices, and what it has said."""

    def __init__(self, folder: Path, listen: str = "tcp://127.0.0.1:0") -> None:
        self.access = AccessFile(folder / "server")
        self.server = Server(heartbeat_s=1.0, listen=[listen], access=self.access)
        self.said: list[str] = []
        self.server.notice = self.said.append
        self.server.start()

    @property
    def endpoint(self) -> str:
        return self.server.public_addresses[0]

    def invite(self, uses: int = 1, lifetime_s: float = 600.0) -> str:
        return new_invitation(self.access, uses, lifetime_s, []).link

    def token(self, uses: int = 1, lifetime_s: float = 600.0) -> str:
        return parse_link(self.invite(uses, lifetime_s)).token

    def refusals(self) -> list[str]:
        return [line for line in self.said if line.startswith("refused")]


@pytest.fixture
def guarded(nothing_left_behind: None, tmp_path: Path) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path)
    yield guarded
    guarded.server.stop()
    assert guarded.server.error is None


class Guest:
    """Bare encrypted sockets, with which a test says what no agent would."""

    def __init__(self, guarded: Guarded, keys: Keys | None = None, name: bytes = b"", endpoint: str = "") -> None:
        self.keys = keys or Keys.new()
        self._curve = Curve(guarded.server.public_key, self.keys)
        self._entrance, self._endpoint = guarded.server.enrolment_addresses[0], endpoint or guarded.endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self._curve.apply(self.socket)
        if name:
            self.socket.setsockopt(zmq.ROUTING_ID, name)
        self._events: zmq.Socket[bytes] = self.socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED)
        self._connected = False

    def hello(self, token: str = "") -> Message:
        """What the entrance says."""
        with self._context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            self._curve.apply(line)
            line.connect(self._entrance)
            line.send_multipart(encode(Hello("guest", token)))
            assert line.poll(int(1000 * LIMIT_S)), "the entrance does not answer"
            return decode(line.recv_multipart())

    def send(self, message: Message) -> None:
        if not self._connected:
            self.socket.connect(self._endpoint)
            self._connected = True
        self.socket.send_multipart([bytes(frame) for frame in encode(message)])

    def join(self, token: str = "", devices: int = 1) -> None:
        """With a token, by way of the entrance."""
        if token:
            assert isinstance(self.hello(token), Ticket)
        self.send(Join(pack_profiles([PROFILE] * devices), ["guest"] * devices, {}))

    def event(self) -> tuple[int, int]:
        """The next thing that happens to the connection, and its value."""
        assert self._events.poll(int(1000 * LIMIT_S)), "nothing happens to the connection"
        found = recv_monitor_message(self._events)
        return found["event"], found["value"]

    def receive(self) -> Message:
        """The next that is no heartbeat."""
        while True:
            assert self.socket.poll(int(1000 * LIMIT_S)), "the server does not answer"
            message = decode(self.socket.recv_multipart())
            if not isinstance(message, Heartbeat):
                return message

    def close(self) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=0)


Knock = Callable[..., Guest]


@pytest.fixture
def knock(guarded: Guarded) -> Iterator[Knock]:
    with contextlib.ExitStack() as stack:

        def knock(keys: Keys | None = None, name: bytes = b"") -> Guest:
            guest = Guest(guarded, keys, name)
            stack.callback(guest.close)
            return guest

        yield knock


# ---- those who may


@pytest.mark.slow
def test_an_invited_agent_joins_works_and_comes_back_without_the_link(
    start: Start, guarded: Guarded, tmp_path: Path, until: Until
) -> None:
    server = guarded.server
    first = start("agent", "--state", str(tmp_path / "a"), "--name", "phone", *FAST, "--invitation", guarded.invite())
    assert server.wait_for_devices(1, LIMIT_S)
    Multiplication(server, (1, 120, 90, 110)).check()
    first.end()  # kill -9: as Android does
    until(lambda: server.devices == 0, "the server misses it")
    start("agent", "--state", str(tmp_path / "a"), "--name", "phone", *FAST)
    assert server.wait_for_devices(1, LIMIT_S)
    Multiplication(server, (1, 120, 90, 110), seed=1).check()
    (device,) = guarded.access.read().enrolled
    assert (device.name, device.state) == ("phone", "enrolled")
    assert guarded.refusals() == []
    assert (tmp_path / "a" / "keys.json").stat().st_mode & 0o777 == 0o600


def test_a_device_that_comes_from_a_new_address_takes_the_place_of_its_old_self(
    guarded: Guarded, knock: Knock, until: Until
) -> None:
    old = knock()
    old.join(guarded.token())
    assert isinstance(old.receive(), Welcome)
    new = knock(old.keys)
    new.join()
    assert isinstance(new.receive(), Welcome)
    until(lambda: guarded.server.devices == 1, "it is there once")
    assert [line for line in guarded.said if "joined again from elsewhere" in line]


def test_a_device_is_invited_to_an_ipv6_address(start: Start, tmp_path: Path) -> None:
    try:
        guarded = Guarded(tmp_path, "tcp://[::1]:0")
    except AddressError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    try:
        start("agent", "--state", str(tmp_path / "a"), *FAST, "--once", "--invitation", guarded.invite())
        assert guarded.server.wait_for_devices(1, LIMIT_S)
    finally:
        guarded.server.stop()


def test_an_invitation_for_two_takes_two(guarded: Guarded, knock: Knock) -> None:
    token = guarded.token(uses=2)
    assert [type(knock().hello(token)) for _ in range(3)] == [Ticket, Ticket, Refused]


def test_a_key_of_the_run_may_bring_many_devices_and_is_not_written_down(guarded: Guarded, knock: Knock) -> None:
    pod = knock()
    guarded.server.trust(pod.keys.public, "pod", devices=50)
    pod.join(devices=40)
    assert isinstance(pod.receive(), Welcome)
    assert guarded.server.wait_for_devices(40, LIMIT_S)
    pod.join(devices=11)
    assert isinstance(pod.receive(), Refused)
    assert guarded.access.read().enrolled == ()


def test_a_pod_with_a_key_of_the_run_works_over_an_encrypted_connection(start: Start, guarded: Guarded) -> None:
    keys, server = Keys.new(), guarded.server
    server.trust(keys.public, "pod", devices=20)
    fleet = {
        "profiles": [[50e9, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]] * 20,
        "labels": [f"emulated-{i}" for i in range(20)],
        "curve": {"server": server.public_key, "secret": keys.secret},
    }
    start("emulator.pods.pod", "--ps", guarded.endpoint, "--links", "off", stdin=json.dumps(fleet))
    assert server.wait_for_devices(20, LIMIT_S)
    Multiplication(server, (1, 120, 90, 110)).check()
    assert guarded.refusals() == []


# ---- those who may not


def withdrawn(guarded: Guarded) -> str:
    invited = new_invitation(guarded.access, 1, 600.0, [])
    guarded.access.change(lambda book: access.revoke_invitation(book, invited.id, time.time()))
    return parse_link(invited.link).token


def used(guarded: Guarded) -> str:
    token = guarded.token()
    other = Guest(guarded)
    other.join(token)
    assert isinstance(other.receive(), Welcome)
    assert guarded.server.wait_for_devices(1, LIMIT_S)
    other.close()
    return token


REFUSED: dict[str, tuple[Callable[[Guarded], str], str]] = {
    "no invitation": (lambda guarded: "", "only invited devices"),
    "made up": (lambda guarded: "x" * 22, "no such invitation"),
    "used": (used, "used up"),
    "expired": (lambda guarded: guarded.token(lifetime_s=1e-9), "expired"),
    "withdrawn": (withdrawn, "withdrawn"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_whoever_may_not_join_is_told_why_logged_once_and_gets_no_block(
    guarded: Guarded, knock: Knock, why: str, until: Until
) -> None:
    token_of, words = REFUSED[why]
    guest = knock()
    token = token_of(guarded)
    until(lambda: guarded.server.devices == 0, "whoever used it is gone")
    product = Multiplication(guarded.server, (1, 8, 8, 8))  # work is waiting for anybody who could do it
    for _ in range(20):
        answer = guest.hello(token)
        assert isinstance(answer, Refused)
        assert words in answer.reason
        assert answer.final
    until(lambda: bool(guarded.refusals()), "the server says so")
    assert len(guarded.refusals()) == 1
    assert fingerprint(guest.keys.public) in guarded.refusals()[0]
    guest.join()
    assert guest.event() == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    assert guarded.server.totals.sent_bytes == 0
    assert not product.done.is_set()


def test_a_device_that_is_revoked_is_dropped_at_once_and_stays_out(
    guarded: Guarded, knock: Knock, until: Until
) -> None:
    guest = knock()
    guest.join(guarded.token())
    assert isinstance(guest.receive(), Welcome)
    other_process = AccessFile(guarded.access.path.parent)
    other_process.change(lambda book: access.revoke_device(book, "guest", time.time()))
    answer = guest.receive()
    assert isinstance(answer, Refused)
    assert answer.final
    until(lambda: guarded.server.devices == 0, "it is out")
    assert guest.event()[0] == zmq.EVENT_DISCONNECTED
    for token in ("", guarded.token()):
        answer = guest.hello(token)
        assert isinstance(answer, Refused)
        assert "revoked" in answer.reason
    assert guest.event() == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400), "nor does it come in where it was"
    until(lambda: len(guarded.refusals()) == 2, "the server says so: at the entrance, and of the connection")


@pytest.mark.slow
def test_an_agent_whose_key_was_revoked_says_so_and_ends(
    start: Start, guarded: Guarded, tmp_path: Path, until: Until
) -> None:
    first = start("agent", "--state", str(tmp_path / "a"), "--name", "phone", *FAST, "--invitation", guarded.invite())
    assert guarded.server.wait_for_devices(1, LIMIT_S)
    until(lambda: not json.loads((tmp_path / "a" / "server.json").read_text())["token"], "it needs the token no more")
    first.end()
    guarded.access.change(lambda book: access.revoke_device(book, "phone", time.time()))
    again = start("agent", "--state", str(tmp_path / "a"), "--name", "phone", *FAST)
    assert again.wait() == 2
    assert "does not know this device's key, or has revoked it: ask for a new invitation" in again.output


def test_a_stranger_cannot_measure_the_link(guarded: Guarded, knock: Knock) -> None:
    guest = knock()
    guest.send(Probe(1, 8 << 20, b""))
    assert guest.event() == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    guest = knock()
    guest.join(guarded.token())
    assert isinstance(guest.receive(), Welcome)
    guest.send(Probe(2, 1000, b""))
    answer = guest.receive()
    assert isinstance(answer, Probe)
    assert len(answer.data) == 1000


@pytest.mark.slow
def test_an_invited_device_measures_its_link(start: Start, guarded: Guarded, tmp_path: Path) -> None:
    agent = start("agent", "--state", str(tmp_path / "a"), *FAST, "--invitation", guarded.invite())
    assert guarded.server.wait_for_devices(1, LIMIT_S)
    out = tmp_path / "profile.json"
    measure = ("agent", "measure", "--quick", "--state", str(tmp_path / "a"), "--invited", "--out", str(out))
    assert start(*measure).wait() == 2  # its keys are in use
    agent.end()
    program = start(*measure)
    assert program.wait() == 0, program.output
    link = json.loads(out.read_text())["link"]
    assert link["address"] == guarded.endpoint
    assert link["down"]
    assert link["up"]


@pytest.mark.slow
def test_a_device_that_asks_for_probes_without_end_is_stopped(guarded: Guarded, knock: Knock) -> None:
    guest = knock()
    guest.join(guarded.token())
    assert isinstance(guest.receive(), Welcome)
    answers: list[Message] = []
    while not answers or isinstance(answers[-1], Probe):
        guest.send(Probe(len(answers), 8 << 20, b""))
        answers.append(guest.receive())
        assert len(answers) < 100
    assert isinstance(answers[-1], Refused)


def test_an_agent_with_another_servers_key_finds_out(start: Start, guarded: Guarded, tmp_path: Path) -> None:
    other = Invitation((guarded.endpoint.removeprefix("tcp://"),), Keys.new().public, "x" * 22)
    agent = start("agent", "--state", str(tmp_path / "a"), *FAST, "--invitation", other.link)
    agent.expect("is not the server of the invitation")
    assert guarded.server.devices == 0
    assert len([line for line in guarded.refusals() if "another server's key" in line]) == 1


def test_a_plain_agent_does_not_get_in(start: Start, guarded: Guarded, until: Until) -> None:
    start("agent", "--ps", guarded.endpoint, *FAST)
    until(lambda: bool(guarded.refusals()), "the server says so")
    assert "does not encrypt" in guarded.refusals()[0]
    assert guarded.server.totals.sent_bytes == 0
    assert guarded.server.devices == 0


class Recorder:
    """Carries bytes between a device and the server, and keeps what the device has sent."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = bytearray()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        device, _ = self._listener.accept()
        server = socket.create_connection(self._server)
        back = threading.Thread(target=self._copy, args=(server, device, bytearray()))
        back.start()
        self._copy(device, server, self.recorded)
        back.join()
        device.close()
        server.close()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while read := source.recv(65536):
                record += read
                target.sendall(read)
            target.shutdown(socket.SHUT_WR)

    def replay(self) -> bytes:
        """What the server answers to the same bytes, until it hangs up. As the device did: ZeroMQ's greeting and HELLO
        before it is answered, the rest after."""
        answered, first = bytearray(), 64 + 202
        with socket.create_connection(self._server) as again, contextlib.suppress(ConnectionError):
            again.settimeout(LIMIT_S)
            again.sendall(self.recorded[:first])
            while len(answered) < 64 + 170:
                answered += again.recv(65536)
            again.sendall(self.recorded[first:])
            while read := again.recv(65536):
                answered += read
        return bytes(answered)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def test_a_hello_that_somebody_else_recorded_opens_nothing(guarded: Guarded, until: Until) -> None:
    recorder = Recorder(guarded.endpoint)
    device = Guest(guarded, endpoint=recorder.endpoint)
    device.join(guarded.token(uses=100))
    assert isinstance(device.receive(), Welcome)
    assert guarded.server.wait_for_devices(1, LIMIT_S)
    device.close()
    recorder.close()
    until(lambda: guarded.server.devices == 0, "the device itself is gone")
    product = Multiplication(guarded.server, (1, 8, 8, 8))
    before = guarded.access.read()
    for _ in range(5):
        assert len(recorder.replay()) == 64 + 170  # a greeting and the handshake's WELCOME, which holds nothing yet
    until(lambda: bool(guarded.refusals()), "the server says so")
    assert len(guarded.refusals()) == 1
    assert "replays messages of another connection" in guarded.refusals()[0]
    assert guarded.server.devices == 0
    assert guarded.server.totals.sent_bytes == 0
    assert not product.done.is_set()
    assert guarded.access.read() == before


def by_hand(endpoint: str, user: str, message: Message, password: str = "") -> socket.socket:
    """A plain connection that claims to be this user, in ZeroMQ's own words (ZMTP 3.0)."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    mechanism, words = (b"PLAIN", b"\x08INITIATE") if password else (b"NULL", b"\x05READY")
    line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
    heard = b""
    if password:
        hello = b"\x05HELLO\x01x" + bytes([len(password)]) + password.encode()
        line.sendall(bytes([4, len(hello)]) + hello)
        while b"WELCOME" not in heard:
            heard += line.recv(4096)
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""), (b"User-Id", user.encode())):
        words += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    line.sendall(bytes([4, len(words)]) + words)
    while b"READY" not in heard:
        heard += line.recv(4096)
    frames = [bytes(frame) for frame in encode(message)]
    for index, frame in enumerate(frames):
        line.sendall(bytes([index + 1 < len(frames), len(frame)]) + frame)
    return line


def test_nobody_on_a_plain_connection_passes_for_a_device_with_a_key(guarded: Guarded, knock: Knock) -> None:
    device = knock()
    device.join(guarded.token())
    assert isinstance(device.receive(), Welcome)
    assert guarded.server.wait_for_devices(1, LIMIT_S)
    server, heard = guarded.server, b""
    with by_hand(server.address, device.keys.public, Hello("impostor")) as line:
        while b'"password":"' not in heard or not heard.endswith(b'"}'):
            heard += line.recv(4096)
    password = heard.rpartition(b'"password":"')[2][:-2].decode()  # as whoever is on this machine gets one
    join = Join(pack_profiles([PROFILE]), ["impostor"], {})
    with by_hand(server.data_address, device.keys.public, join, password):
        assert server.wait_for_devices(2, LIMIT_S)  # as whoever is on this machine, and not as the device
    assert not [line for line in guarded.said if "from elsewhere" in line]


def test_nobody_chooses_the_name_of_a_connection(guarded: Guarded, knock: Knock) -> None:
    """ZeroMQ would let them: and who takes the name of one that has just broken would answer in its place."""
    device = knock(name=b"the phone")
    device.join(guarded.token())
    assert device.event()[0] == zmq.EVENT_DISCONNECTED
    assert guarded.server.devices == 0
    assert not device.socket.poll(0), "it is not even answered"


def cut_off(line: socket.socket, limit_s: float) -> bool:
    """Is the connection closed within that time, although there is always more to come?"""
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            line.sendall(bytes(1000))
            if select.select([line], [], [], 0.01)[0] and not line.recv(4096):
                return True
    except ConnectionError:
        return True
    return False


def test_who_does_not_pass_the_handshake_in_time_is_cut_off_however_much_it_sends(
    nothing_left_behind: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.access.listening.HANDSHAKE_S", 0.5)
    guarded = Guarded(tmp_path)
    host, _, port = guarded.endpoint.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    try:
        for announced in (1 << 30, 1 << 40):
            with socket.create_connection((host, int(port))) as line:
                line.sendall(greeting + b"\x06" + announced.to_bytes(8, "big"))
                assert cut_off(line, limit_s=15.0)  # ZeroMQ's own limit would be half a minute
    finally:
        guarded.server.stop()
    assert guarded.server.error is None


def test_nobody_listens_off_loopback_in_the_clear() -> None:
    with pytest.raises(AddressError, match="in the clear"):
        Server(host="0.0.0.0")
    with pytest.raises(AddressError, match="who may join"):
        Server(listen=["tcp://0.0.0.0:0"])
