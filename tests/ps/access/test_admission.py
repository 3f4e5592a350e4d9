"""Admission of devices from elsewhere: a real server, real agents, real sockets. A refused device is told why, is
logged once, and never sees a block."""

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
    """A server that admits only invited devices, and what it has logged."""

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


class RawClient:
    """Bare encrypted sockets that can send what no agent would."""

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
        """The entrance's answer."""
        with self._context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            self._curve.apply(line)
            line.connect(self._entrance)
            line.send_multipart(encode(Hello("client", token)))
            assert line.poll(int(1000 * LIMIT_S)), "the entrance does not answer"
            return decode(line.recv_multipart())

    def send(self, message: Message) -> None:
        if not self._connected:
            self.socket.connect(self._endpoint)
            self._connected = True
        self.socket.send_multipart([bytes(frame) for frame in encode(message)])

    def join(self, token: str = "", devices: int = 1) -> None:
        """Through the entrance, if a token is given."""
        if token:
            assert isinstance(self.hello(token), Ticket)
        self.send(Join(pack_profiles([PROFILE] * devices), ["client"] * devices, {}))

    def event(self) -> tuple[int, int]:
        """The next thing that happens to the connection, and its value."""
        assert self._events.poll(int(1000 * LIMIT_S)), "nothing happens to the connection"
        found = recv_monitor_message(self._events)
        return found["event"], found["value"]

    def receive(self) -> Message:
        """The next message that is not a heartbeat."""
        while True:
            assert self.socket.poll(int(1000 * LIMIT_S)), "the server does not answer"
            message = decode(self.socket.recv_multipart())
            if not isinstance(message, Heartbeat):
                return message

    def close(self) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=0)


Connect = Callable[..., RawClient]


@pytest.fixture
def connect(guarded: Guarded) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(keys: Keys | None = None, name: bytes = b"") -> RawClient:
            client = RawClient(guarded, keys, name)
            stack.callback(client.close)
            return client

        yield connect


# ---- devices that may join


@pytest.mark.slow
def test_an_invited_agent_joins_works_and_comes_back_without_the_link(
    start: Start, guarded: Guarded, tmp_path: Path, until: Until
) -> None:
    server = guarded.server
    first = start("agent", "--state", str(tmp_path / "a"), "--name", "phone", *FAST, "--invitation", guarded.invite())
    assert server.wait_for_devices(1, LIMIT_S)
    Multiplication(server, (1, 120, 90, 110)).check()
    first.end()  # kill -9: as Android does
    until(lambda: server.devices == 0, "the server notices")
    start("agent", "--state", str(tmp_path / "a"), "--name", "phone", *FAST)
    assert server.wait_for_devices(1, LIMIT_S)
    Multiplication(server, (1, 120, 90, 110), seed=1).check()
    (device,) = guarded.access.read().enrolled
    assert (device.name, device.state) == ("phone", "enrolled")
    assert guarded.refusals() == []
    assert (tmp_path / "a" / "keys.json").stat().st_mode & 0o777 == 0o600


def test_a_device_that_joins_from_a_new_address_replaces_its_old_connection(
    guarded: Guarded, connect: Connect, until: Until
) -> None:
    old = connect()
    old.join(guarded.token())
    assert isinstance(old.receive(), Welcome)
    new = connect(old.keys)
    new.join()
    assert isinstance(new.receive(), Welcome)
    until(lambda: guarded.server.devices == 1, "the device counts once")
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


def test_an_invitation_for_two_takes_two(guarded: Guarded, connect: Connect) -> None:
    token = guarded.token(uses=2)
    assert [type(connect().hello(token)) for _ in range(3)] == [Ticket, Ticket, Refused]


def test_a_key_of_the_run_may_bring_many_devices_and_is_not_stored(guarded: Guarded, connect: Connect) -> None:
    pod = connect()
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


# ---- devices that may not join


def withdrawn(guarded: Guarded) -> str:
    invited = new_invitation(guarded.access, 1, 600.0, [])
    guarded.access.change(lambda book: access.revoke_invitation(book, invited.id, time.time()))
    return parse_link(invited.link).token


def used(guarded: Guarded) -> str:
    token = guarded.token()
    other = RawClient(guarded)
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
def test_a_refused_device_is_told_why_is_logged_once_and_gets_no_block(
    guarded: Guarded, connect: Connect, why: str, until: Until
) -> None:
    token_of, words = REFUSED[why]
    client = connect()
    token = token_of(guarded)
    until(lambda: guarded.server.devices == 0, "the device that used it is gone")
    product = Multiplication(guarded.server, (1, 8, 8, 8))  # work that any device could do
    for _ in range(20):
        answer = client.hello(token)
        assert isinstance(answer, Refused)
        assert words in answer.reason
        assert answer.final
    until(lambda: bool(guarded.refusals()), "the server logs it")
    assert len(guarded.refusals()) == 1
    assert fingerprint(client.keys.public) in guarded.refusals()[0]
    client.join()
    assert client.event() == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    assert guarded.server.totals.sent_bytes == 0
    assert not product.done.is_set()


def test_a_revoked_device_is_dropped_at_once_and_stays_out(guarded: Guarded, connect: Connect, until: Until) -> None:
    client = connect()
    client.join(guarded.token())
    assert isinstance(client.receive(), Welcome)
    other_process = AccessFile(guarded.access.path.parent)
    other_process.change(lambda book: access.revoke_device(book, "client", time.time()))
    answer = client.receive()
    assert isinstance(answer, Refused)
    assert answer.final
    until(lambda: guarded.server.devices == 0, "it is out")
    assert client.event()[0] == zmq.EVENT_DISCONNECTED
    for token in ("", guarded.token()):
        answer = client.hello(token)
        assert isinstance(answer, Refused)
        assert "revoked" in answer.reason
    assert client.event() == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400), "the data socket does not admit it either"
    until(lambda: len(guarded.refusals()) == 2, "the server logs both: at the entrance, and for the connection")


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


def test_an_unknown_client_cannot_measure_the_link(guarded: Guarded, connect: Connect) -> None:
    client = connect()
    client.send(Probe(1, 8 << 20, b""))
    assert client.event() == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    client = connect()
    client.join(guarded.token())
    assert isinstance(client.receive(), Welcome)
    client.send(Probe(2, 1000, b""))
    answer = client.receive()
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
def test_a_device_that_never_stops_asking_for_probes_is_refused(guarded: Guarded, connect: Connect) -> None:
    client = connect()
    client.join(guarded.token())
    assert isinstance(client.receive(), Welcome)
    answers: list[Message] = []
    while not answers or isinstance(answers[-1], Probe):
        client.send(Probe(len(answers), 8 << 20, b""))
        answers.append(client.receive())
        assert len(answers) < 100
    assert isinstance(answers[-1], Refused)


def test_an_agent_with_another_servers_key_says_so(start: Start, guarded: Guarded, tmp_path: Path) -> None:
    other = Invitation((guarded.endpoint.removeprefix("tcp://"),), Keys.new().public, "x" * 22)
    agent = start("agent", "--state", str(tmp_path / "a"), *FAST, "--invitation", other.link)
    agent.expect("is not the server of the invitation")
    assert guarded.server.devices == 0
    assert len([line for line in guarded.refusals() if "another server's key" in line]) == 1


def test_an_unencrypted_agent_is_refused(start: Start, guarded: Guarded, until: Until) -> None:
    start("agent", "--ps", guarded.endpoint, *FAST)
    until(lambda: bool(guarded.refusals()), "the server logs it")
    assert "does not encrypt" in guarded.refusals()[0]
    assert guarded.server.totals.sent_bytes == 0
    assert guarded.server.devices == 0


class Recorder:
    """Carries bytes between a device and the server, and records what the device sends."""

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
        """Sends the recorded bytes again and returns the server's answers until it hangs up. In the device's order:
        ZeroMQ's greeting and HELLO before the first answer, the rest after it."""
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


def test_a_recorded_hello_admits_no_other_connection(guarded: Guarded, until: Until) -> None:
    recorder = Recorder(guarded.endpoint)
    device = RawClient(guarded, endpoint=recorder.endpoint)
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
    until(lambda: bool(guarded.refusals()), "the server logs it")
    assert len(guarded.refusals()) == 1
    assert "replays messages of another connection" in guarded.refusals()[0]
    assert guarded.server.devices == 0
    assert guarded.server.totals.sent_bytes == 0
    assert not product.done.is_set()
    assert guarded.access.read() == before


def by_hand(endpoint: str, user: str, message: Message, password: str = "") -> socket.socket:
    """A plain connection that claims to be this user, spoken by hand in ZeroMQ's protocol (ZMTP 3.0)."""
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


def test_a_plain_connection_cannot_impersonate_a_device_with_a_key(guarded: Guarded, connect: Connect) -> None:
    device = connect()
    device.join(guarded.token())
    assert isinstance(device.receive(), Welcome)
    assert guarded.server.wait_for_devices(1, LIMIT_S)
    server, heard = guarded.server, b""
    with by_hand(server.address, device.keys.public, Hello("impostor")) as line:
        while b'"password":"' not in heard or not heard.endswith(b'"}'):
            heard += line.recv(4096)
    password = heard.rpartition(b'"password":"')[2][:-2].decode()  # any process of this machine gets one
    join = Join(pack_profiles([PROFILE]), ["impostor"], {})
    with by_hand(server.data_address, device.keys.public, join, password):
        assert server.wait_for_devices(2, LIMIT_S)  # as a local process, not as the device
    assert not [line for line in guarded.said if "from elsewhere" in line]


def test_a_client_cannot_choose_the_name_of_its_connection(guarded: Guarded, connect: Connect) -> None:
    """ZeroMQ would allow it: a client could take the name of a connection that just broke, and answer in its place."""
    device = connect(name=b"the phone")
    device.join(guarded.token())
    assert device.event()[0] == zmq.EVENT_DISCONNECTED
    assert guarded.server.devices == 0
    assert not device.socket.poll(0), "no answer at all"


def cut_off(line: socket.socket, limit_s: float) -> bool:
    """Is the connection closed within that time, although more always follows?"""
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            line.sendall(bytes(1000))
            if select.select([line], [], [], 0.01)[0] and not line.recv(4096):
                return True
    except ConnectionError:
        return True
    return False


def test_a_client_that_does_not_finish_the_handshake_in_time_is_cut_off_however_much_it_sends(
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


def test_the_server_never_listens_unencrypted_beyond_loopback() -> None:
    with pytest.raises(AddressError, match="in the clear"):
        Server(host="0.0.0.0")
    with pytest.raises(AddressError, match="who may join"):
        Server(listen=["tcp://0.0.0.0:0"])
