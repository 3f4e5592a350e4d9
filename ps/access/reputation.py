"""What is known about a device from earlier runs: bans, refusals, slowness, blocks delivered. Pure: no files, no clock.

A standing belongs to an identity: the key of an encrypted connection, or the secret by which a device on a plain
connection is recognised (stored as a hash). A device on a plain connection without a secret has no standing: it
starts afresh with each connection. Everything expires, and the server's owner can forgive. `ps/access/standings.py`
keeps the table and calls these functions.

Times are seconds since 1970.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

HOUR_S, DAY_S = 3600.0, 86_400.0
# A wrong result is a fault of the device or a lie; neither is gone the next day. A week leaves time to look into it.
WRONG_S = 7 * DAY_S
# A device that fails blocks is short of memory or broken at the moment; its next run may go better.
FAILED_S = HOUR_S
MOST_BAN_S = 30 * DAY_S  # each earlier ban doubles the next one, up to this, until the standing is forgotten (MEMORY_S)
MEMORY_S = 30 * DAY_S  # a standing is forgotten this long after its last change
SLOW_S = DAY_S  # how long a device is assumed to be as slow as it was: heat and a bad network pass
SLOWER = 1.25  # smaller factors are ignored; the same value as in ps/scheduling/slowness.py
MOST_SLOW = 1e12  # so that the value can be written as JSON
PROVEN_BLOCKS = 256  # correct blocks after which a device does not start as a newcomer again
MOST = 4096  # standings kept; the oldest without a ban are dropped first


@dataclass(frozen=True, slots=True)
class Standing:
    identity: str
    name: str  # the device's latest name
    seen_s: float
    blocks: int = 0  # delivered and found correct
    refused: int = 0  # blocks that the device failed to compute
    bans: int = 0
    banned_until_s: float = 0.0
    why: str = ""  # reason of the latest ban
    slowness: float = 1.0  # factor by which the device is slower than its profile
    slow_s: float = 0.0  # when that was found
    forgiven_s: float = 0.0  # when the server's owner last lifted a ban

    def banned(self, now_s: float) -> bool:
        return now_s < self.banned_until_s

    def proven(self, now_s: float) -> bool:
        return self.blocks >= PROVEN_BLOCKS and not self.banned(now_s) and now_s < self.seen_s + MEMORY_S

    def factor(self, now_s: float) -> float:
        return self.slowness if now_s < self.slow_s + SLOW_S else 1.0


@dataclass(frozen=True, slots=True)
class Stay:
    """What one stay of a device has shown."""

    blocks: int = 0
    refused: int = 0
    slowness: float = 1.0  # relative to the factor known before


def key_identity(key: str) -> str:
    return f"key:{key}"


def secret_identity(secret: str) -> str:
    """Only a hash: the secret itself stays with its device."""
    return f"secret:{hashlib.sha256(secret.encode()).hexdigest()}" if secret else ""


def banned(standing: Standing, why: str, now_s: float, wrong: bool) -> Standing:
    """Ban the device from now on, for longer if it was banned before."""
    earlier = standing.bans if now_s < standing.seen_s + MEMORY_S else 0
    lasts_s = min(MOST_BAN_S, (WRONG_S if wrong else FAILED_S) * 2.0 ** min(earlier, 10))
    until_s = max(standing.banned_until_s, now_s + lasts_s)
    # blocks delivered before the ban prove nothing any more
    return replace(standing, seen_s=now_s, bans=earlier + 1, banned_until_s=until_s, why=why, blocks=0)


def stayed(standing: Standing, stay: Stay, now_s: float) -> Standing:
    known = standing.factor(now_s)
    slowness, slow_s = standing.slowness, standing.slow_s
    if stay.slowness > SLOWER:
        slowness, slow_s = min(MOST_SLOW, known * stay.slowness), now_s
    elif stay.blocks:
        slowness = known**0.5 if known**0.5 > SLOWER else 1.0  # the device kept up with its corrected profile
    return replace(
        standing,
        seen_s=now_s,
        blocks=standing.blocks + stay.blocks,
        refused=standing.refused + stay.refused,
        slowness=slowness,
        slow_s=slow_s,
    )


def forgiven(standing: Standing, now_s: float) -> Standing:
    """Lift the ban; the next ban counts as the first."""
    return replace(standing, banned_until_s=0.0, bans=0, why="", refused=0, slowness=1.0, forgiven_s=now_s)


def kept(standings: Iterable[Standing], now_s: float, most: int = MOST) -> tuple[Standing, ...]:
    """Standings that have not expired, at most `most`. The oldest without a ban come first and are dropped first."""
    alive = [s for s in standings if s.banned(now_s) or now_s < s.seen_s + MEMORY_S]
    alive.sort(key=lambda s: (s.banned(now_s), s.seen_s))
    return tuple(alive[max(0, len(alive) - most) :])


def merged(standings: Iterable[Standing], news: Mapping[str, Standing], now_s: float) -> tuple[Standing, ...]:
    """The table, with `news` replacing older standings of the same identities."""
    return kept([*(s for s in standings if s.identity not in news), *news.values()], now_s)
