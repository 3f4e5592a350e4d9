"""Who may join from outside this machine: invitations, enrolled keys, revocation. Pure: no files, sockets or clock.

A device is identified by its CURVE public key. The token of an invitation enrols a key, once or a stated number of
times, until it expires. From then on the key alone is enough, until it is revoked. When a device is revoked, its
invitation is closed and enrols no further devices: otherwise a revoked phone could return with a fresh key and the same
token. Only the hash of a token is stored, and hashes are compared in constant time. Tokens have 128 random bits, so the
hash cannot be inverted by guessing.

`AccessList` is the whole state. Functions take one and return the next. `ps/access/access_file.py` keeps it on disk,
and `ps/access/joining.py` asks it who may join. Times are seconds since 1970.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent.identity.keys import fingerprint
from agent.protocol.errors import UserError
from ps.access.reputation import Standing, forgiven

TOKEN_BYTES = 16
MAX_USES = 100_000
FORGOTTEN_AFTER_S = 30 * 86_400.0  # an invitation that can no longer be used stays listed this long


@dataclass(frozen=True, slots=True)
class Invitation:
    id: str
    token_hash: str
    uses: int  # devices that it may enrol
    used: int
    created_s: float
    expires_s: float
    revoked_s: float | None = None
    closed_s: float | None = None  # when a device that it enrolled was revoked; None again once the owner reopens it

    def state(self, now_s: float) -> str:
        if self.revoked_s is not None:
            return "revoked"
        if self.used >= self.uses:
            return "used"
        if now_s >= self.expires_s:
            return "expired"
        return "open" if self.closed_s is None else "closed"


@dataclass(frozen=True, slots=True)
class Enrolled:
    key: str  # public, Z85
    name: str  # the device's latest name
    invitation: str
    first_seen_s: float
    last_seen_s: float
    revoked_s: float | None = None
    devices: int = 1  # most devices per connection with this key; a pod brings many

    @property
    def state(self) -> str:
        return "enrolled" if self.revoked_s is None else "revoked"


@dataclass(frozen=True, slots=True)
class AccessList:
    secret: str = ""  # the server's secret key; empty: not created yet
    listening: tuple[str, ...] = ()  # HOST:PORT where a running server accepts encrypted connections
    enrolling: int = 0  # port on the same host where tokens enrol keys
    invitations: tuple[Invitation, ...] = ()
    enrolled: tuple[Enrolled, ...] = ()
    standings: tuple[Standing, ...] = ()  # of all devices, including unencrypted ones; see ps/access/reputation.py

    def find(self, key: str) -> Enrolled | None:
        return next((device for device in self.enrolled if device.key == key), None)


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    until_s: float | None = None  # seconds from now until a new attempt may succeed


# Messages to refused devices. They say what to do next, and tell an unknown client nothing new.
NO_INVITATION = Refusal("this server takes only invited devices; ask its owner for an invitation")
WRONG_TOKEN = Refusal("this server knows no such invitation; ask its owner for a new one")
OF_NO_USE = {
    "revoked": Refusal("this invitation was withdrawn; ask the server's owner for a new one"),
    "closed": Refusal("this invitation is closed; ask the server's owner for a new one"),
    "used": Refusal("this invitation has been used up; ask the server's owner for a new one"),
    "expired": Refusal("this invitation has expired; ask the server's owner for a new one"),
}
REVOKED = Refusal("the server's owner has revoked this device")


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def invite(access_list: AccessList, id_: str, token: str, uses: int, lifetime_s: float, now_s: float) -> AccessList:
    if not 1 <= uses <= MAX_USES:
        raise UserError(f"an invitation for {uses} devices; it must be between 1 and {MAX_USES:,}")
    if not 0 < lifetime_s <= 10 * 365 * 86_400:
        raise UserError("an invitation must expire, within ten years")
    fresh = Invitation(id_, hash_token(token), uses, 0, now_s, now_s + lifetime_s)
    kept = [i for i in access_list.invitations if i.state(now_s) == "open" or now_s < _ended_s(i) + FORGOTTEN_AFTER_S]
    return replace(access_list, invitations=(*kept, fresh))


def _ended_s(invitation: Invitation) -> float:
    return min(invitation.expires_s, invitation.revoked_s or invitation.expires_s)


def admit(
    access_list: AccessList, key: str, token: str, name: str, now_s: float
) -> tuple[AccessList, Enrolled | Refusal]:
    """The next list, and the answer to a device with this key that asks to join."""
    known = access_list.find(key)
    if known is not None:
        if known.revoked_s is not None:
            return access_list, REVOKED
        seen = replace(known, name=name, last_seen_s=now_s)
        return replace(access_list, enrolled=tuple(seen if d is known else d for d in access_list.enrolled)), seen
    if not token:
        return access_list, NO_INVITATION
    invitation = _matching(access_list, token)
    if invitation is None:
        return access_list, WRONG_TOKEN
    state = invitation.state(now_s)
    if state != "open":
        return access_list, OF_NO_USE[state]
    once_less = replace(invitation, used=invitation.used + 1)
    device = Enrolled(key, name, invitation.id, now_s, now_s)
    invitations = tuple(once_less if i is invitation else i for i in access_list.invitations)
    return replace(access_list, invitations=invitations, enrolled=(*access_list.enrolled, device)), device


def _matching(access_list: AccessList, token: str) -> Invitation | None:
    """The invitation with this token. All are compared, each in constant time, so timing reveals nothing."""
    asked, found = hash_token(token), None
    for invitation in access_list.invitations:
        if hmac.compare_digest(invitation.token_hash, asked):
            found = invitation
    return found


def seen(access_list: AccessList, here: Mapping[str, tuple[float, str]]) -> AccessList:
    """Note when devices with these keys were last connected, and their names; an empty name keeps the old one."""

    def then(device: Enrolled) -> Enrolled:
        if device.key not in here:
            return device
        last_seen_s, name = here[device.key]
        return replace(device, last_seen_s=last_seen_s, name=name or device.name)

    return replace(access_list, enrolled=tuple(map(then, access_list.enrolled)))


def revoke_device(
    access_list: AccessList, which: str, now_s: float, keep_invitation: bool = False
) -> tuple[AccessList, Enrolled]:
    """`which`: a fingerprint, or else a name; it must identify one device. The device's invitation is closed too,
    unless `keep_invitation` is set."""
    device = _the_one(access_list.enrolled, which)
    gone = replace(device, revoked_s=now_s if device.revoked_s is None else device.revoked_s)
    access_list = replace(access_list, enrolled=tuple(gone if d is device else d for d in access_list.enrolled))
    came_with = None if keep_invitation else find_invitation(access_list, device.invitation)
    if came_with is not None and came_with.closed_s is None:
        access_list = _with_invitation(access_list, came_with, replace(came_with, closed_s=now_s))
    return access_list, gone


def find_invitation(access_list: AccessList, id_: str) -> Invitation | None:
    return next((i for i in access_list.invitations if i.id == id_), None)


def _with_invitation(access_list: AccessList, before: Invitation, after: Invitation) -> AccessList:
    return replace(access_list, invitations=tuple(after if i is before else i for i in access_list.invitations))


def reopen_invitation(access_list: AccessList, id_: str, now_s: float) -> tuple[AccessList, Invitation]:
    """Let devices join again with an invitation that was closed because one of its devices was revoked."""
    invitation = _invitation(access_list, id_)
    opened = replace(invitation, closed_s=None)
    if opened.state(now_s) != "open":
        raise UserError(
            f"invitation {id_} is {opened.state(now_s)} and cannot be reopened; make a new one: cleave invite"
        )
    return _with_invitation(access_list, invitation, opened), opened


def revoke_invitation(access_list: AccessList, id_: str, now_s: float) -> tuple[AccessList, Invitation]:
    invitation = _invitation(access_list, id_)
    gone = replace(invitation, revoked_s=now_s if invitation.revoked_s is None else invitation.revoked_s)
    return _with_invitation(access_list, invitation, gone), gone


def _invitation(access_list: AccessList, id_: str) -> Invitation:
    invitation = find_invitation(access_list, id_)
    if invitation is None:
        raise UserError(f"there is no invitation {id_!r}; `cleave invitations` lists them")
    return invitation


def forgive(access_list: AccessList, which: str, now_s: float) -> tuple[AccessList, Standing]:
    """`which`: a fingerprint, or else a name. Lifts the ban. If several devices have that name, exactly one of them
    must be banned."""
    found = [s for s in access_list.standings if which == standing_fingerprint(s)]
    found = found or [s for s in access_list.standings if which == s.name]
    found = [s for s in found if s.banned(now_s)] or found
    if not found:
        raise UserError(f"nothing is held against {which!r}; `cleave devices` shows the standing of devices")
    if len(found) > 1:
        prints = ", ".join(standing_fingerprint(s) for s in found)
        raise UserError(f"{len(found)} devices are called {which!r}; say which by its fingerprint: {prints}")
    good = forgiven(found[0], now_s)
    return replace(access_list, standings=tuple(good if s is found[0] else s for s in access_list.standings)), good


def standing_fingerprint(standing: Standing) -> str:
    kind, _, of = standing.identity.partition(":")
    return fingerprint(of) if kind == "key" else of[:16]


def _the_one(devices: tuple[Enrolled, ...], which: str) -> Enrolled:
    """Fingerprints are matched first: a device chooses its name, which may equal another device's fingerprint."""
    found = [device for device in devices if which == fingerprint(device.key)]
    found = found or [device for device in devices if which == device.name]
    found = [device for device in found if device.state == "enrolled"] or found
    if not found:
        raise UserError(f"there is no device {which!r}; `cleave devices` lists them")
    if len(found) > 1:
        prints = ", ".join(fingerprint(device.key) for device in found)
        raise UserError(f"{len(found)} devices are called {which!r}; say which by its fingerprint: {prints}")
    return found[0]


@dataclass(slots=True)
class Budget:
    """A token bucket: `most` at once, refilled at `per_second`. Limits what an unknown client can cost."""

    most: float
    per_second: float
    left: float
    asked_s: float

    @classmethod
    def full(cls, most: float, per_second: float, now_s: float) -> Budget:
        return cls(most, per_second, most, now_s)

    def take(self, amount: float, now_s: float) -> bool:
        self.left = min(self.most, self.left + self.per_second * max(0.0, now_s - self.asked_s))
        self.asked_s = now_s
        if amount > self.left:
            return False
        self.left -= amount
        return True
