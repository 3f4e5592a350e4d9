"""Keeps the standing of devices (ps/access/reputation.py) while a server runs, and writes it into the access file.

A ban is written at once, everything else when a device leaves or the run ends. Emulated devices belong to the run: they
have no lasting standing, but a suspended one stays suspended for the run, under its label, however often its pod lets
it rejoin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent.protocol.errors import UserError
from agent.protocol.units import format_duration
from ps.access.access_file import AccessFile
from ps.access.access_list import Refusal
from ps.access.reputation import MOST, Standing, Stay, banned, key_identity, merged, secret_identity, stayed

CONNECTION = "connection:"  # an identity of this kind ends with its connection, and is not written


class Standings:
    def __init__(
        self,
        access: AccessFile | None,
        say: Callable[[str], None] = lambda text: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Without an access file, everything is forgotten when the run ends."""
        self._access, self._say, self._now_s = access, say, now_s
        self._news: dict[str, Standing] = {}  # changed in this run
        self._unwritten: dict[str, Standing] = {}  # the part of `_news` to write with the next heartbeat
        self._table: tuple[Standing, ...] = ()  # from the file, as last read
        self._barred: dict[str, str] = {}  # labels of emulated devices -> reason
        self._said = False
        self._on_disk("")

    @staticmethod
    def identity(key: str, about: Mapping[str, str], connection: bytes) -> str:
        """Identity of a real device: its key, its secret, or else only its connection."""
        if key:
            return key_identity(key)
        return secret_identity(about.get("device", "")) or f"{CONNECTION}{connection.hex()}"

    def may_join(self, identity: str) -> Refusal | None:
        """Why the device may not join, and until when; None if it may."""
        found, now_s = self._find(identity), self._now_s()
        if found is None or not found.banned(now_s):
            return None
        left_s = found.banned_until_s - now_s
        return Refusal(f"this device is suspended for another {format_duration(left_s)}: {found.why}", left_s)

    def proven(self, identity: str) -> bool:
        """Whether the device has delivered enough correct blocks not to start as a newcomer."""
        found = self._find(identity)
        return found is not None and found.proven(self._now_s())

    def corrected(self, identity: str, profiles: NDArray[np.void]) -> NDArray[np.void]:
        """The device's claimed profile, slowed down by the factor seen recently."""
        found = self._find(identity)
        factor = 1.0 if found is None else found.factor(self._now_s())
        if factor == 1.0:
            return profiles
        profiles = profiles.copy()
        for rate in ("flops", "down_bps", "up_bps"):
            profiles[rate] = np.maximum(1.0, profiles[rate] / factor)
        return profiles

    def suspended(self, identity: str, name: str, why: str, wrong: bool) -> Refusal:
        """Ban a device, and return the refusal to send it."""
        self._put(banned(self._of(identity, name), why, self._now_s(), wrong), durable=True)
        refusal = self.may_join(identity)
        assert refusal is not None, "it was banned a moment ago"
        return refusal

    def left(self, identity: str, name: str, stay: Stay) -> None:
        """Record a stay that has ended."""
        if stay != Stay():
            self._put(stayed(self._of(identity, name), stay, self._now_s()), durable=False)

    def bar(self, label: str, why: str) -> None:
        """Exclude an emulated device from this run."""
        self._barred[label] = why

    def barred(self, labels: Sequence[str]) -> list[int]:
        """Positions of the labels that are excluded from this run."""
        return [n for n, label in enumerate(labels) if label in self._barred] if self._barred else []

    def why_barred(self, label: str) -> str:
        return self._barred[label]

    def retry(self) -> None:
        """Write new changes, and those that could not be written before; called with each heartbeat."""
        self._write(durable=False)
        if self._access is not None:
            try:
                self._access.retry()
            except UserError as error:
                self._complain(error)

    def _find(self, identity: str) -> Standing | None:
        mine, kept = self._news.get(identity), self._on_disk(identity)
        if mine is None or (kept is not None and kept.forgiven_s > mine.seen_s):
            self._news.pop(identity, None)  # the owner has lifted the ban during the run
            return kept
        return mine

    def _on_disk(self, identity: str) -> Standing | None:
        if self._access is None:
            return None
        try:
            self._table = self._access.read().standings
        except UserError as error:
            self._complain(error)  # an unreadable file lifts no ban
        return next((standing for standing in self._table if standing.identity == identity), None)

    def _of(self, identity: str, name: str) -> Standing:
        found = self._find(identity)
        return Standing(identity, name, self._now_s()) if found is None else replace(found, name=name)

    def _put(self, standing: Standing, durable: bool) -> None:
        self._news[standing.identity] = standing
        if len(self._news) > MOST:
            del self._news[min(self._news, key=lambda identity: self._news[identity].seen_s)]
        if self._access is None or standing.identity.startswith(CONNECTION):
            return
        self._unwritten[standing.identity] = standing
        if durable:
            self._write(durable=True)

    def _write(self, durable: bool) -> None:
        """Write all changes at once: each write rewrites the whole file."""
        if self._access is None or not self._unwritten:
            return
        now_s, standings = self._now_s(), self._unwritten
        self._unwritten = {}
        try:
            self._access.soon(
                lambda access_list: replace(access_list, standings=merged(access_list.standings, standings, now_s)),
                durable=durable,
            )
        except UserError as error:
            self._complain(error)

    def _complain(self, error: UserError) -> None:
        if not self._said:
            self._said = True
            self._say(f"what is known of devices is not kept: {error}")
