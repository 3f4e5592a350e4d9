"""Invitations and keys without a server: who may join, and that the book on disk stays whole."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.identity.invitation import Invitation as Link
from agent.identity.invitation import parse_link, recall, remember, welcomed
from agent.identity.keys import Keys, fingerprint, own_keys
from agent.identity.server_choice import find_line
from agent.protocol.errors import UserError
from ps.access.access_file import AccessFile
from ps.access.access_list import (
    NO_INVITATION,
    OF_NO_USE,
    REVOKED,
    WRONG_TOKEN,
    AccessList,
    Budget,
    Enrolled,
    Refusal,
    admit,
    invite,
    revoke_device,
    revoke_invitation,
)
from testbed.access.inviting import Invited, new_invitation

if TYPE_CHECKING:
    from conftest import Start

KEYS = [Keys.new().public for _ in range(5)]


# ---- the book

# what may happen: an invitation is made, a device asks to join, an invitation or a device is revoked, time passes
STORIES = st.lists(
    st.one_of(
        st.tuples(st.just("invite"), st.integers(1, 3), st.integers(1, 20)),
        st.tuples(st.just("join"), st.integers(0, 4), st.integers(0, 5)),
        st.tuples(st.just("withdraw"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("revoke"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 10), st.just(0)),
    ),
    max_size=30,
)


@given(STORIES)
@example([("invite", 2, 1), ("join", 1, 0), ("revoke", 1, 0), ("join", 0, 0)])
def test_only_devices_invited_in_time_are_enrolled_and_revoked_ones_never_return(
    story: list[tuple[str, int, int]],
) -> None:
    book, now_s = AccessList(), 1000.0
    left: dict[int, int] = {}  # by invitation: how many devices it may still enrol, according to the story
    ends: dict[int, float] = {}
    inside: set[int] = set()
    revoked: set[int] = set()
    came_with: dict[int, int] = {}
    for what, first, second in story:
        match what:
            case "invite":
                number = len(left)
                book = invite(book, f"i{number}", f"token {number}", first, float(second), now_s)
                left[number], ends[number] = first, now_s + second
            case "join":
                book, answer = admit(book, KEYS[first], f"token {second}", f"phone-{first}", now_s)
                may = first in inside or (
                    first not in revoked and left.get(second, 0) > 0 and now_s < ends.get(second, 0.0)
                )
                assert isinstance(answer, Enrolled) is may
                if may and first not in inside:
                    left[second] -= 1
                    came_with[first] = second
                    inside.add(first)
            case "withdraw" if first in left:
                book, _ = revoke_invitation(book, f"i{first}", now_s)
                left[first] = 0
            case "revoke" if first in inside:
                book, _ = revoke_device(book, fingerprint(KEYS[first]), now_s)
                inside.discard(first)
                revoked.add(first)
                left[came_with[first]] = 0  # its invitation is closed
            case "wait":
                now_s += first
    assert {d.key for d in book.enrolled if d.revoked_s is None} == {KEYS[i] for i in inside}


def test_every_refusal_says_why() -> None:
    book = invite(AccessList(), "a", "good", 1, 60.0, 0.0)
    assert admit(book, KEYS[0], "", "x", 1.0)[1] == NO_INVITATION
    assert admit(book, KEYS[0], "bad", "x", 1.0)[1] == WRONG_TOKEN
    assert admit(book, KEYS[0], "good", "x", 60.0)[1] == OF_NO_USE["expired"]
    joined, _ = admit(book, KEYS[0], "good", "x", 1.0)
    assert admit(joined, KEYS[1], "good", "x", 2.0)[1] == OF_NO_USE["used"]
    assert isinstance(admit(joined, KEYS[0], "", "x", 1e9)[1], Enrolled)  # its key is enough, with no time limit
    assert admit(revoke_device(joined, "x", 3.0)[0], KEYS[0], "good", "x", 4.0)[1] == REVOKED
    assert admit(revoke_invitation(book, "a", 3.0)[0], KEYS[0], "good", "x", 4.0)[1] == OF_NO_USE["revoked"]
    assert all(isinstance(r, Refusal) and r.reason for r in (NO_INVITATION, WRONG_TOKEN, REVOKED, *OF_NO_USE.values()))


def test_a_device_is_revoked_only_by_an_unambiguous_name() -> None:
    two = AccessList(enrolled=tuple(Enrolled(key, "phone", "", 0.0, 0.0) for key in KEYS[:2]))
    with pytest.raises(UserError, match=fingerprint(KEYS[1])):
        revoke_device(two, "phone", 1.0)
    one, gone = revoke_device(two, fingerprint(KEYS[0]), 1.0)
    assert gone.key == KEYS[0]
    assert revoke_device(one, "phone", 2.0)[1].key == KEYS[1]  # the only device of that name that is still enrolled
    with pytest.raises(UserError, match="no device"):
        revoke_device(two, "tablet", 1.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=40))
def test_a_budget_gives_no_more_than_it_has(asked: list[tuple[float, float]]) -> None:
    budget, now_s, given_ = Budget.full(10.0, 2.0, 0.0), 0.0, 0.0
    for amount, wait_s in asked:
        now_s += wait_s
        if budget.take(amount, now_s):
            given_ += amount
        assert given_ <= 10.0 + 2.0 * now_s + 1e-6


# ---- the file


def test_the_file_holds_no_token_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    access = AccessFile(tmp_path / "state")
    link = parse_link(new_invitation(access, 1, 60.0, ["192.0.2.7:5555"]).link)
    text = access.path.read_text()
    assert link.token not in text
    assert link.server_key == access.keys.public
    assert access.path.stat().st_mode & 0o777 == 0o600
    assert access.path.parent.stat().st_mode & 0o777 == 0o700
    assert AccessFile(tmp_path / "state").read() == access.read()


INVITE_MANY = """
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from ps.access.access_list import invite
from ps.access.access_file import AccessFile

access, worker = AccessFile(Path(sys.argv[1])), sys.argv[2]
for number in range(20):
    id_ = f"{worker}-{number}"
    access.change(lambda book: (invite(book, id_, id_, 1, 60.0, 0.0), None))
"""


def test_processes_that_write_at_the_same_time_lose_nothing(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    workers = [start("-c", INVITE_MANY, str(folder), str(worker)) for worker in range(4)]
    assert [worker.wait() for worker in workers] == [0] * 4
    assert len(AccessFile(folder).read().invitations) == 80
    assert sorted(p.name for p in folder.iterdir()) == ["access.json", "access.lock"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 9}', '{"version": 1, "secret": "x"}'])
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    AccessFile(tmp_path).path.write_text(damage)
    with pytest.raises(UserError, match=r"access\.json"):
        AccessFile(tmp_path)


# ---- the link

HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)
LINKS = st.builds(
    Link,
    st.lists(st.builds(lambda h, p: f"{h}:{p}", HOSTS, st.integers(1, 65535)), min_size=1, max_size=4).map(tuple),
    st.sampled_from(KEYS),
    st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=40),
    st.one_of(st.none(), st.integers(0, 10**11).map(float)),
)


@given(LINKS)
def test_a_link_says_what_the_invitation_said(link: Link) -> None:
    assert parse_link(link.link) == link
    assert parse_link(f"  {link.link}&later=1\n") == link


@given(LINKS, st.data())
def test_a_damaged_link_is_refused_with_a_reason_or_means_something(link: Link, data: st.DataObject) -> None:
    """The reason never contains the token; a real one has 22 characters."""
    text = link.link
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(st.text(max_size=5)) + text[end:]
    try:
        assert parse_link(damaged).endpoints
    except UserError as error:
        assert len(str(error)) < 200  # noqa: PT017
        assert link.token not in str(error) or len(link.token) < 16  # noqa: PT017


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("tcp://192.0.2.7:5555", "begins with cleave://"),
        ("cleave://192.0.2.7:5555/?key=abc", "no token"),
        ("cleave://192.0.2.7:5555/?token=abc", "no key"),
        ("cleave://192.0.2.7/?key=abc&token=abc", "not a host and a port"),
        ("cleave://192.0.2.7:99999/?key=abc&token=abc", "not a host and a port"),
        ("cleave://192.0.2.7:5555/?key=abc&token=abc", "key is damaged"),
    ],
)
def test_a_wrong_link_says_what_is_wrong(link: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_link(link)


def test_the_command_survives_a_shell_and_the_code_is_printed() -> None:
    link = Link(("192.0.2.7:5555",), KEYS[0], "token", 1.0).link
    invited = Invited("id", link, 1, 1.0)
    assert f"'{link}'" in invited.command
    assert len(invited.qr_code().splitlines()) > 15


# ---- what an agent keeps


def test_an_agent_remembers_the_server_but_not_the_token(tmp_path: Path) -> None:
    link = Link(("192.0.2.7:5555", "[2001:db8::7]:5555"), KEYS[0], "secret-token", 5.0)
    assert recall(tmp_path) is None
    remember(tmp_path, link)
    assert recall(tmp_path) == link
    welcomed(tmp_path, link)
    assert recall(tmp_path) == replace(link, token="", expires_s=None)
    assert "secret-token" not in (tmp_path / "server.json").read_text()
    assert (tmp_path / "server.json").stat().st_mode & 0o777 == 0o600


def test_keys_are_made_once_and_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    keys = own_keys(tmp_path / "state")
    path = tmp_path / "state" / "keys.json"
    assert own_keys(tmp_path / "state") == keys
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.secret not in repr(keys)
    for damage in ("", "{}", json.dumps({"secret": "short"}), json.dumps({"secret": 5})):
        path.write_text(damage)
        with pytest.raises(UserError, match="remove it"):
            own_keys(tmp_path / "state")


def test_two_agents_do_not_share_an_identity(tmp_path: Path) -> None:
    link = Link(("192.0.2.7:5555",), KEYS[0], "token").link
    with (
        find_line(None, link, str(tmp_path)),
        pytest.raises(UserError, match="another agent"),
        find_line(None, None, str(tmp_path)),
    ):
        pass


def test_an_agent_that_knows_no_server_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--invitation LINK"), find_line(None, None, str(tmp_path)):
        pass
