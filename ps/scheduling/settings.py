"""Every number that steers scheduling, with its unit, its reason and the measurement behind it.

Modules read them as `settings.NOW.quantile`; `using` replaces some of them for a while (ps/planning/settings.py, which
has the numbers of planning that scheduling shares). What defends against an attack names the test that carries the
attack out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    # ---- the server and its host
    reaction_s: float = 0.01  # the server's clock tick, and how long answers are held back to be handled together
    # A busy host or link may take this long before something is wrong: pods need up to 0.3 s for their first block;
    # with 0.5 s of jitter each way, a floor of 0.5 s made the first step 60% longer through false alarms, 1 s did not.
    hitch_s: float = 1.0
    per_turn: int = 32  # overdue blocks that are copied, queued blocks that move, and vain tries of that, per turn
    # ---- what is normal, and what is overdue; 0006
    # Answers; with fewer, the cost model alone sets deadlines. What is normal is computed again after four times as
    # many, from the latest 16 times as many.
    enough: int = 128
    quantile: float = 0.99  # of the answers: a block is overdue beyond what they take, times `margin`
    most: float = 0.75  # of the answers are normal, whatever the others take: up to a quarter may be slow
    # Overdue: above this multiple of what `most` answers take; by trial with 10% and 20% slow devices
    tail: float = 3.0
    margin: float = 1.25  # differences of modelled times below this factor are ignored
    far: float = 4.0  # times as long as expected is wrong, whatever is normal: cold blocks of real devices take up to 3
    # ---- late devices; tests/attacks/test_attack_stragglers.py
    minority: float = 0.25  # of the fleet: above this share, suspect the server or the network, not the devices
    memory: float = 0.125  # weight of the newest block in a device's typical lateness: about its last 16 blocks
    outlier: float = 1.5  # a device is typically late above this multiple of what `most` blocks of the fleet take
    answers: int = 4  # of a device, before they correct its profile
    # A block that took `far` times as long counts if it is this late, which is more than any hitch of the server. Else
    # a known device that claims everything keeps all of every product; tests/attacks/test_attack_claims.py.
    far_s: float = 0.25
    forgiven_s: float = 15.0  # a slow device that gets no work is taken to be half as slow after this time; 0006
    # ---- devices that do not answer; tests/attacks/test_attack_hangs.py
    suspected_s: float = 5.0  # an overdue device gets nothing new; if it is dead, its connection tells within that
    longest_pause_s: float = 3600.0  # the pause doubles each time the device is overdue again without an answer
    # Of the fleet: above this share, devices that never answered are suspected the second time
    most_silent: float = 0.5
    refusals: int = 3  # a device that fails more blocks than this gets no more work
    # ---- claims of new devices; tests/attacks/test_attack_claims.py
    growth: float = 4.0  # per product in time; beyond a typical device its root: 100 times as fast after nine
    in_time: float = 1.1  # on average over its blocks of a product; with 2.0 a boaster made steps 45% longer


NOW = Settings()
