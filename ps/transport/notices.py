"""What people are told about devices that do not answer."""

from __future__ import annotations

from collections.abc import Sequence

from ps.scheduling.events import NameStragglers

NAMED = 5  # devices per notice


def stragglers_named(found: NameStragglers, labels: Sequence[str]) -> str:
    """Text for people; names only some of the devices if there are many."""
    waited_s, expected_s = found.waited_s[0], found.expected_s[0]
    names = ", ".join(labels[device] for device in found.devices[:NAMED])
    more = len(found.devices) - NAMED
    others = f" and {more:,} others have" if more > 0 else " has" if len(found.devices) == 1 else " have"
    return f"{names}{others} not answered a block for {waited_s:.1f} s ({expected_s:.1f} s expected): " + (
        "no other device is there to compute it" if found.alone else "others compute it too"
    )
