"""Attacks on what a server remembers of devices: a liar that returns, a revoked phone with a fresh key, a process
stopped while it holds the access file, a power cut while it is written, tokens left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from processes import FAST, LIMIT_S, Multiplication, Stranger, agents, grid

from agent.identity.files import Busy, locked, write_private
from agent.identity.invitation import parse_link
from agent.identity.keys import Curve, Keys, fingerprint
from agent.protocol.errors import UserError
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    ANSWER,
    DONE,
    Heartbeat,
    Hello,
    Join,
    Message,
    Refused,
    Result,
    Welcome,
    Work,
    decode,
    encode,
)
from ps.access.access_file import AccessFile
from ps.access.access_list import (
    AccessList,
    Enrolled,
    Refusal,
    admit,
    forgive,
    invite,
    reopen_invitation,
    revoke_device,
)
from ps.access.admission import ConnectionAdmission, Refusals, Tickets
from ps.access.joining import JoinAdmission
from ps.access.reputation import (
    DAY_S,
    FAILED_S,
    MEMORY_S,
    MOST_BAN_S,
    PROVEN_BLOCKS,
    WRONG_S,
    Standing,
    Stay,
    banned,
    forgiven,
    kept,
    key_identity,
    merged,
    stayed,
)
from ps.access.standings import Standings
from ps.planning.plans import Plan
from ps.transport.server import Server
from testbed.access.inviting import new_invitation
from testbed.commands.cli import app

if TYPE_CHECKING:
    from conftest import Start, Until

NOW_S = 1_800_000_000.0


class Liar(Stranger):
    """A device on a plain line, with a secret. It answers everything, wrongly if told to."""

    def __init__(self, server: Server, secret: str, name: str = "liar") -> None:
        super().__init__(server)
        self.secret, self.name = secret, name
        self.pieces: dict[int, Any] = {}

    def ask(self) -> Any:
        """Ask to join; the answer."""
        profile = Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 1000)
        self.send(Join(pack_profiles([profile]), [self.name], {"device": self.secret} if self.secret else {}))
        return self.said(Welcome, Refused)

    def said(self, *kinds: type[Message]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if isinstance(message := self.receive(), kinds):
                return message
        raise AssertionError(f"none of {kinds} came")

    def answer_until(self, over: Callable[[Message], bool], wrong: bool) -> Message:
        """Answer all work until a message satisfies `over`."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            message = self.receive()
            if isinstance(message, Work):
                answer(self, self.pieces, message, wrong)
            if over(message):
                return message
        raise AssertionError("no such message came")


def answer(device: Stranger, pieces: dict[int, Any], work: Work, wrong: bool) -> None:
    for (piece, layout, batch, outer, inner), data in zip(work.pieces.tolist(), work.data, strict=True):
        flat = np.frombuffer(data, np.float32)
        shaped = flat.reshape(batch, inner, outer).transpose(0, 2, 1) if layout else flat.reshape(batch, outer, inner)
        pieces[piece] = shaped
    for row in work.blocks.tolist():
        _, job, block, left, right, lb, lo, rb, ro, batch, rows, columns = row[:12]
        one, two = pieces[left][lb : lb + batch, lo : lo + rows], pieces[right][rb : rb + batch, ro : ro + columns]
        product = one @ two.transpose(0, 2, 1) + np.float32(wrong)
        answers = np.array([(0, job, block, DONE, product.size, 0.001, 0)], ANSWER)
        device.send(Result(answers, product.reshape(-1).astype(np.float32)))


@pytest.fixture
def access(tmp_path: Path) -> AccessFile:
    return AccessFile(tmp_path / "server")


@pytest.fixture
def server(access: AccessFile, nothing_left_behind: None) -> Iterator[Server]:
    server = Server(remember=access.impatient())
    server.notice = lambda text: None
    yield server.start()
    server.stop()


@pytest.fixture
def liars() -> Iterator[list[Liar]]:
    found: list[Liar] = []
    yield found
    for liar in found:
        liar.close()


def caught(server: Server, liar: Liar, start: Start) -> Refused:
    """It lies once, beside an honest agent; the server's message to it."""
    there = len(server.labels)
    assert isinstance(liar.ask(), Welcome)
    agents(start, server, 1) if server.devices < 2 else None
    product = Multiplication(server, (1, 32, 16, 32), grid(32, 32, 16, [there]))
    told = liar.answer_until(lambda message: isinstance(message, Refused), wrong=True)
    product.check()
    assert isinstance(told, Refused)
    return told


# ---- reputation


def test_a_liar_is_told_and_banned_on_this_connection_on_another_and_in_the_next_run(
    server: Server, access: AccessFile, start: Start, liars: list[Liar]
) -> None:
    liars.append(Liar(server, "0123abcd-liar"))
    told = caught(server, liars[0], start)
    assert "suspended" in told.reason
    assert "what it returned was wrong" in told.reason
    assert told.until_s == pytest.approx(WRONG_S, abs=60)
    assert not told.final
    again = liars[0].ask()
    assert isinstance(again, Refused), "the same connection"
    assert "suspended" in again.reason
    liars.append(Liar(server, "0123abcd-liar", name="another name"))
    assert isinstance(liars[1].ask(), Refused), "another connection and another name, the same secret"
    (standing,) = [s for s in access.read().standings if s.bans]
    assert "0123abcd" not in (access.path.read_text()), "the secret stays with its device"
    next_run = Server(remember=access.impatient()).start()
    try:
        liars.append(Liar(next_run, "0123abcd-liar"))
        assert isinstance(liars[2].ask(), Refused), "the next run"
        access.change(lambda book: forgive(book, standing.name, time.time()))
        liars.append(Liar(next_run, "0123abcd-liar"))  # a refused connection ends
        assert isinstance(liars[3].ask(), Welcome), "its ban was lifted during the run"
    finally:
        next_run.stop()


def test_a_liar_that_leaves_before_its_lie_is_found_is_still_banned(
    server: Server, start: Start, liars: list[Liar], until: Until
) -> None:
    """Two devices share a product; the liar answers and hangs up while the other still computes."""
    liar, slow = Liar(server, "feed-liar"), Liar(server, "cafe-slow", name="slow")
    liars += [liar, slow]
    assert isinstance(liar.ask(), Welcome)
    assert isinstance(slow.ask(), Welcome)
    boxes = np.array([(0, 1, 0, 32, 0, 16), (0, 1, 0, 32, 16, 16)])
    plan = Plan(boxes=boxes, device=np.array([0, 1]), fresh=np.ones((2, 2), bool), makespan_s=0.0)
    product = Multiplication(server, (1, 32, 16, 32), plan)
    work = slow.receive_work()
    answer(liar, {}, liar.receive_work(), wrong=True)
    until(lambda: server.totals.blocks == 1, "the server has its answer")
    liar.close()
    until(lambda: server.devices == 1, "the server misses it")
    answer(slow, slow.pieces, work, wrong=False)
    slow.answer_until(lambda message: product.done.is_set(), wrong=False)  # the liar's block is computed again
    product.check()
    liars[0] = Liar(server, "feed-liar")
    told = liars[0].ask()
    assert isinstance(told, Refused)
    assert "what it returned was wrong" in told.reason


def test_a_device_without_a_secret_is_unknown_the_next_time(server: Server, start: Start, liars: list[Liar]) -> None:
    """It is refused on its connection; on a new one it starts as a newcomer. Without an identity, no ban lasts, and no
    good record either."""
    liars.append(Liar(server, ""))
    caught(server, liars[0], start)
    assert isinstance(liars[0].ask(), Refused)
    liars.append(Liar(server, ""))
    assert isinstance(liars[1].ask(), Welcome)


LYING = """
import sys
import agent.compute.kernels
right = agent.compute.kernels.NumpyKernel.product
agent.compute.kernels.NumpyKernel.product = lambda self, left, right_: right(self, left, right_) + 1
from agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_suspended_agent_says_so_in_its_log_and_in_its_status_and_does_not_hammer(
    server: Server, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    (honest,) = agents(start, server, 1)
    monkeypatch.setenv("CLEAVE_AGENT_STATE", str(tmp_path / "liar"))
    liar = start("-c", LYING, "--ps", server.address, "--name", "broken-phone", *FAST)
    assert server.wait_for_devices(2, LIMIT_S)
    Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1])).check()
    said = liar.expect("suspended by the server")
    assert "what it returned was wrong" in said
    assert re.search(r"joining again in 10(\.0)? min", said), said
    until(lambda: (tmp_path / "liar" / "status.json").exists(), "its status is written")
    until(lambda: "suspended by" in (tmp_path / "liar" / "status.json").read_text(), "its status says so")
    status = start("agent", "status", "--json", "--state", str(tmp_path / "liar"))
    assert status.wait() == 0
    known = json.loads(status.output)["agent"]
    assert known["state"] == "suspended by the server"
    assert "what it returned was wrong" in known["why"]
    assert honest.running


def test_an_emulated_liar_that_rejoins_gets_no_more_work_in_its_run(server: Server, liars: list[Liar]) -> None:
    """A pod whose only device lied lets it leave and join again, as in churn."""
    pod = Stranger(server, of_the_run=True)
    profile = pack_profiles([Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 1000)])
    honest = Liar(server, "feed-honest", name="honest")
    liars.append(honest)
    try:
        for times in (1, 2):
            pod.send(Join(profile, ["phone/wifi/0"], {"kind": "pod"}))
            while not isinstance(pod.receive(), Welcome):
                pass
            if times == 1:
                Multiplication(server, (1, 16, 16, 16), grid(16, 16, 16, [0]))
                answer(pod, {}, pod.receive_work(), wrong=True)
                while 0 not in server.suspended:
                    pod.send(Heartbeat())
        assert isinstance(honest.ask(), Welcome)
        answer(honest, {}, honest.receive_work(), wrong=False)
        assert server.suspended[1].startswith("what it returned was wrong")
        assert server.devices == 1
    finally:
        pod.close()


# ---- the pure part


def test_a_ban_lasts_longer_each_time_and_ends() -> None:
    new = Standing("secret:x", "phone", NOW_S)
    once = banned(new, "it failed 4 blocks", NOW_S, wrong=False)
    assert once.banned_until_s == NOW_S + FAILED_S
    assert once.banned(NOW_S + FAILED_S - 1)
    assert not once.banned(NOW_S + FAILED_S)
    twice = banned(once, "wrong", NOW_S + DAY_S, wrong=True)
    assert twice.banned_until_s == NOW_S + DAY_S + 2 * WRONG_S
    often = twice
    for _ in range(20):
        often = banned(often, "wrong", NOW_S, wrong=True)
    assert often.banned_until_s <= NOW_S + DAY_S + MOST_BAN_S
    assert not forgiven(often, NOW_S).banned(NOW_S)
    late = banned(twice, "wrong", twice.seen_s + MEMORY_S, wrong=True)
    assert late.bans == 1, "old bans do not count"


def test_a_device_is_proven_by_right_blocks_until_it_lies() -> None:
    standing = stayed(Standing("secret:x", "phone", NOW_S), Stay(blocks=PROVEN_BLOCKS - 1), NOW_S)
    assert not standing.proven(NOW_S)
    standing = stayed(standing, Stay(blocks=1), NOW_S)
    assert standing.proven(NOW_S)
    assert not standing.proven(NOW_S + MEMORY_S)
    assert not banned(standing, "wrong", NOW_S, wrong=True).proven(NOW_S + MOST_BAN_S)


def test_slowness_is_remembered_for_a_day_and_fades_when_a_device_keeps_up() -> None:
    slow = stayed(Standing("secret:x", "phone", NOW_S), Stay(blocks=1, slowness=16.0), NOW_S)
    assert slow.factor(NOW_S) == 16.0
    assert stayed(slow, Stay(blocks=1), NOW_S).factor(NOW_S) == 4.0
    assert stayed(slow, Stay(blocks=1, slowness=2.0), NOW_S).factor(NOW_S) == 32.0
    assert slow.factor(NOW_S + DAY_S) == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.floats(0, 2 * MEMORY_S), st.booleans()), max_size=80), st.integers(1, 20)
)
def test_the_table_is_bounded_and_bans_are_dropped_last(rows: list[tuple[int, float, bool]], most: int) -> None:
    table: tuple[Standing, ...] = ()
    for number, ago_s, bad in rows:
        standing = Standing(f"key:{number}", "x", NOW_S - ago_s)
        if bad:
            standing = banned(standing, "wrong", NOW_S, wrong=True)
        table = merged(table, {standing.identity: standing}, NOW_S)
    few = kept(table, NOW_S, most)
    assert len(few) <= most
    assert len({s.identity for s in few}) == len(few)
    banned_all, banned_few = (sum(s.banned(NOW_S) for s in rows) for rows in (table, few))
    assert banned_few == min(most, banned_all)
    assert all(s.banned(NOW_S) or s.seen_s + MEMORY_S > NOW_S for s in few)


def test_a_lifted_ban_is_not_restored_by_a_run_that_remembers_it(tmp_path: Path) -> None:
    clock, file = [NOW_S], AccessFile(tmp_path)
    standings = Standings(file.impatient(), now_s=lambda: clock[0])
    refusal = standings.suspended("secret:x", "phone", "wrong", wrong=True)
    assert isinstance(refusal, Refusal)
    clock[0] += 60
    file.change(lambda book: forgive(book, "phone", clock[0]))
    standings.left("secret:other", "another", Stay(blocks=3))
    standings.retry()
    assert standings.may_join("secret:x") is None
    assert len(file.read().standings) == 2


# ---- tokens


def test_a_revoked_phone_cannot_return_with_a_fresh_key_and_the_same_token() -> None:
    book = invite(AccessList(), "abc", "token", uses=5, lifetime_s=DAY_S, now_s=NOW_S)
    book, _ = admit(book, "k" * 40, "token", "phone", NOW_S)
    closed, _ = revoke_device(book, "phone", NOW_S)
    after, answer = admit(closed, "n" * 40, "token", "phone", NOW_S)
    assert isinstance(answer, Refusal)
    assert "closed" in answer.reason
    assert after == closed
    opened, _ = reopen_invitation(closed, "abc", NOW_S)
    assert not isinstance(admit(opened, "n" * 40, "token", "phone", NOW_S)[1], Refusal)
    open_still, _ = revoke_device(book, "phone", NOW_S, keep_invitation=True)
    assert not isinstance(admit(open_still, "n" * 40, "token", "phone", NOW_S)[1], Refusal)
    with pytest.raises(UserError, match="cannot be reopened"):
        reopen_invitation(closed, "abc", NOW_S + DAY_S)


@pytest.mark.parametrize(
    ("options", "words", "state"),
    [
        ((), "cleave invitations reopen", "closed"),
        (("--with-invitation",), "withdrawn", "revoked"),
        (("--keep-invitation",), "stays open", "open"),
    ],
)
def test_revoking_a_device_says_what_becomes_of_its_invitation(
    access: AccessFile, start_light: Start, options: tuple[str, ...], words: str, state: str
) -> None:
    link = parse_link(new_invitation(access, 2, DAY_S, ["192.0.2.7:5555"]).link)
    access.change(lambda book: admit(book, "k" * 40, link.token, "phone", time.time()))
    folder = str(access.path.parent)
    revoke = start_light("cleave", "devices", "revoke", "phone", "--state", folder, *options)
    assert revoke.wait() == 0
    assert words in revoke.output
    assert access.read().invitations[0].state(time.time()) == state


@pytest.mark.slow
def test_the_token_is_removed_from_command_line_and_file_once_the_server_knows_the_device(
    access: AccessFile, start: Start, tmp_path: Path, until: Until
) -> None:
    server = Server(listen=["tcp://127.0.0.1:0"], access=access)
    server.notice = lambda text: None
    server.start()
    try:
        for number, how in enumerate(("--invitation", "--invitation-file")):
            link = new_invitation(access, 1, DAY_S, []).link
            token, file = parse_link(link).token, tmp_path / "invitation"
            file.write_text(link + "\n")
            state = tmp_path / f"agent-{number}"
            words = (how, link if how == "--invitation" else str(file))
            agent = start("agent", *words, "--state", str(state), "--name", f"phone-{number}", *FAST)
            agent.expect("joined")
            until(lambda: token not in (state / "server.json").read_text(), "the token is removed from the state")  # noqa: B023
            assert token not in " ".join(psutil.Process(agent.pid).cmdline())
            assert token not in agent.output
        until(lambda: not file.exists(), "the token file is removed")
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 0
        again = start("agent", *words, "--state", str(state), "--name", "phone-1", *FAST)
        again.expect("joined")
    finally:
        server.stop()


# ---- the file


HOLDER = """
import sys, time
from pathlib import Path
from agent.identity.files import locked
with locked(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_stopped_process_that_holds_the_lock_stops_neither_training_nor_devices(
    access: AccessFile, start: Start, until: Until, record_property: Any
) -> None:
    server = Server(listen=["tcp://127.0.0.1:0"], access=access)
    said: list[str] = []
    server.notice = said.append
    server.start()
    lock = access.path.with_name("access.lock")
    try:
        agents(start, server, 1)
        link = new_invitation(access, 1, DAY_S, []).link
        invited = start("agent", "--invitation", link, "--state", str(access.path.parent / "agent"), *FAST)
        assert server.wait_for_devices(2, LIMIT_S)
        holder = start("-c", HOLDER, str(lock))
        holder.expect("has it")
        holder.signal(signal.SIGSTOP)
        begun = time.monotonic()
        Multiplication(server, (1, 60, 70, 80)).check()
        invited.signal(signal.SIGKILL)  # a device is lost: the server wants to record when it was last seen
        until(lambda: server.devices == 1, "the server misses it")
        Multiplication(server, (1, 60, 70, 80)).check()
        record_property("seconds", time.monotonic() - begun)
        assert server.totals.longest_turn_s < 1.0
        invite_ = start("cleave", "invite", "--state", str(access.path.parent), "--address", "192.0.2.7:5555")
        assert invite_.wait() == 2
        assert f"is locked by process {holder.pid}" in invite_.output
        assert "is stopped" in invite_.output
        holder.end()
    finally:
        server.stop()


def test_a_change_to_a_locked_file_is_made_later(access: AccessFile, start: Start) -> None:
    impatient = access.impatient()
    holder = start("-c", HOLDER, str(access.path.with_name("access.lock")))
    holder.expect("has it")
    begun = time.monotonic()
    standings = Standings(impatient)
    standings.suspended("secret:x", "phone", "wrong", wrong=True)
    with pytest.raises(Busy):
        impatient.change(lambda book: (book, None))
    assert time.monotonic() - begun < 1.0
    assert standings.may_join("secret:x") is not None
    assert not access.read().standings
    holder.end()
    standings.retry()
    assert [s.identity for s in access.read().standings] == ["secret:x"]


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from ps.access.access_file import AccessFile
access = AccessFile(Path(sys.argv[1]))
print("writing", flush=True)
number = 0
while True:
    number += 1
    access.change(lambda book: (replace(book, listening=(f"192.0.2.7:{number}",) * 2000), None))
"""


def test_a_writer_killed_at_any_moment_leaves_a_readable_file(access: AccessFile, start: Start, until: Until) -> None:
    invited = new_invitation(access, 1, DAY_S, ["192.0.2.7:5555"])
    for _ in range(5):
        writer = start("-c", WRITER, str(access.path.parent))
        writer.expect("writing")
        before = access.path.stat().st_ino
        until(lambda: access.path.stat().st_ino != before, "the file is written")  # noqa: B023
        writer.signal(signal.SIGKILL)
        writer.wait()
        fresh = AccessFile(access.path.parent)
        assert [i.id for i in fresh.read().invitations] == [invited.id]
        fresh.change(lambda book: (book, None))
    access.change(lambda book: (invite(book, "last", "t", 1, DAY_S, time.time()), None))
    names = sorted(path.name for path in access.path.parent.iterdir())
    assert names == ["access.json", "access.lock"], "no unfinished files stay"


def test_a_free_lock_is_taken_at_once_and_the_holder_of_a_taken_one_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(lock) as mine:
        assert mine
        with locked(lock, wait=False) as also:
            assert not also
        with pytest.raises(Busy, match=f"process {os.getpid()}"), locked(lock, wait_s=0.0):
            pass


def test_a_file_of_the_previous_version_is_read_and_written_in_the_current_one(access: AccessFile) -> None:
    new_invitation(access, 1, DAY_S, ["192.0.2.7:5555"])
    saved = json.loads(access.path.read_text())
    del saved["standings"]
    for invitation in saved["invitations"]:
        del invitation["closed_s"]
    access.path.write_text(json.dumps(saved | {"version": 1}))
    again = AccessFile(access.path.parent)
    assert len(again.read().invitations) == 1
    again.change(lambda book: (invite(book, "x", "t", 1, DAY_S, time.time()), None))
    assert json.loads(access.path.read_text())["version"] == 2


def test_a_thousand_departures_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write takes the whole file: one per departure would stop the server's thread for a minute."""
    standings = Standings(AccessFile(tmp_path).impatient())
    written: list[Path] = []

    def write(path: Path, text: Iterable[str], *, durable: bool = True) -> None:
        written.append(path)
        write_private(path, text, durable=durable)

    monkeypatch.setattr("ps.access.access_file.write_private", write)
    for number in range(1000):
        standings.left(f"secret:{number}", "phone", Stay(blocks=1))
    standings.retry()
    assert len(written) == 1
    assert len(AccessFile(tmp_path).read().standings) == 1000


def test_a_missing_folder_ends_no_server(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    said: list[str] = []
    standings = Standings(AccessFile(folder).impatient(), said.append)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("no folder")
    assert standings.may_join("secret:x") is None
    standings.left("secret:x", "phone", Stay(blocks=1))
    standings.retry()
    assert len(said) == 1


# ---- names that devices choose, and values in the file

KEYS = [Keys.new().public for _ in range(2)]


def test_a_device_named_like_anothers_fingerprint_hides_neither() -> None:
    """A device chooses its name; an owner who gives a fingerprint means that key."""
    names = (fingerprint(KEYS[1]), fingerprint(KEYS[0]))
    two = AccessList(enrolled=tuple(Enrolled(key, name, "", 0.0, 0.0) for key, name in zip(KEYS, names, strict=True)))
    for key in KEYS:
        assert revoke_device(two, fingerprint(key), 1.0)[1].key == key
    both = revoke_device(revoke_device(two, fingerprint(KEYS[0]), 1.0)[0], fingerprint(KEYS[1]), 1.0)[0]
    assert all(device.revoked_s == 1.0 for device in both.enrolled)
    banned = tuple(
        Standing(key_identity(key), name, 0.0, banned_until_s=9.0) for key, name in zip(KEYS, names, strict=True)
    )
    for key in KEYS:
        assert forgive(AccessList(standings=banned), fingerprint(key), 1.0)[1].identity == key_identity(key)


WRONG = ["null", '"x"', "1e999", "NaN", "-Infinity", "[]", "{}", "true", "-1", "1" + 400 * "0", "1e300", 5000 * "["]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[:9])
def test_a_value_of_the_wrong_type_in_the_access_file_is_reported_or_harmless(tmp_path: Path, wrong: str) -> None:
    """In every place of the file. What is read can be used."""
    file = AccessFile(tmp_path)
    now_s, key = time.time(), Keys.new().public
    book = replace(admit(invite(file.read(), "i", "good", 3, 1e6, now_s), key, "good", "x", now_s)[0], enrolling=5556)
    book = replace(book, listening=("127.0.0.1:5555",), standings=(Standing(key_identity(key), "x", now_s, 3, 1),))
    file.change(lambda _: (book, None))
    text, used = file.path.read_text(), 0
    for place in list(re.finditer(r': ("[^"]*"|-?[0-9.]+|null)', text)):
        file.path.write_text(text[: place.start() + 2] + wrong + text[place.end() :])
        os.utime(file.path, ns=(place.start(), place.start()))
        read = AccessFile(tmp_path, keys=False)
        said = ""
        try:
            read.read()
        except UserError as error:
            said = f"{error}"
        if said:
            assert re.search("damaged|another version", said)
            continue
        used += 1
        standings, refusals = Standings(read), Refusals(lambda text: None)
        admission = ConnectionAdmission(read, Tickets(), refusals)
        join_admission = JoinAdmission(read, admission, refusals)
        assert standings.may_join(key_identity(key)) is None or wrong == "1e300"
        standings.proven(key_identity(key))
        standings.left(key_identity(key), "x", Stay(blocks=1))
        admission.is_welcome(key)
        admission.hello(Keys.new().public, Hello("y", "good"))
        join_admission.revoked([key])
        standings.retry()
        join_admission.write()
    assert used < 20, "most are reported as damage"


def test_a_value_of_the_wrong_type_does_not_end_a_running_server(nothing_left_behind: None, tmp_path: Path) -> None:
    keys, file, now_s = Keys.new(), AccessFile(tmp_path), time.time()
    book = admit(invite(file.read(), "i", "good", 3, 1e6, now_s), keys.public, "good", "x", now_s)[0]
    file.change(lambda _: (replace(book, standings=(Standing(key_identity(keys.public), "x", now_s),)), None))
    server = Server(listen=["tcp://127.0.0.1:0"], access=file).start()
    server.notice = lambda text: None
    try:
        file.path.write_text(file.path.read_text().replace('"banned_until_s": 0.0', '"banned_until_s": null'))
        with zmq.Context() as context, context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            Curve(server.public_key, keys).apply(line)
            line.connect(server.public_addresses[0])
            join = Join(pack_profiles([Profile(1e9, 0.0, 1e9, 1e9, 0.0, 2**30, 4)]), ["x"], {})
            line.send_multipart([bytes(frame) for frame in encode(join)])
            assert line.poll(10_000)
            assert isinstance(decode(line.recv_multipart()), Welcome), "the list read before still counts"
    finally:
        server.stop()
    assert server.error is None


def test_a_fingerprint_is_shown_in_full_in_a_terminal_of_any_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the only handle for revoking a device that the device has not chosen itself."""
    now_s = time.time()
    enrolled = tuple(Enrolled(key, "x" * 60, "abcdef", now_s, now_s) for key in KEYS)
    AccessFile(tmp_path).change(lambda book: (replace(book, enrolled=enrolled), None))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    app(["devices", "--state", str(tmp_path)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert all(fingerprint(key) in shown for key in KEYS), shown
