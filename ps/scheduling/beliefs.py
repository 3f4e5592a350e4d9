"""What devices are believed to be able to do: what they claim, or what they have shown if they are new
(ps/scheduling/newcomers.py), divided by how much slower they have proved to be (ps/scheduling/slowness.py).

Every correction is a revision, so that a plan made before it can be told from one made after it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import PROFILE
from ps.planning.cost import Integers
from ps.scheduling import settings
from ps.scheduling.newcomers import RATES, Newcomers, rates_of, typical_rates
from ps.scheduling.slowness import Slowness


class Beliefs:
    def __init__(self) -> None:
        self.profiles: NDArray[np.void] = np.empty(0, PROFILE)  # claims, corrected by what the devices delivered
        self.claims: NDArray[np.void] = np.empty(0, PROFILE)  # what devices said when they joined
        self.slowness, self.newcomers = Slowness(), Newcomers()
        self.new: set[int] = set()  # devices that joined as newcomers and have not answered yet
        self.revised: dict[int, int] = {}  # devices whose profile was corrected -> revision
        self._revision = 0
        self._corrected_s = 0.0

    def joined(self, profiles: NDArray[np.void], again: list[int]) -> None:
        """The first of these devices have the ids `again`, the others the next ones."""
        new = profiles[len(again) :]
        self.profiles, self.claims = np.concatenate([self.profiles, new]), np.concatenate([self.claims, new])
        self.profiles[again] = self.claims[again] = profiles[: len(again)]

    def left(self, devices: Iterable[int]) -> None:
        for device in devices:
            self.revised.pop(device, None)
            self.new.discard(device)
            self.slowness.forget(device)
            self.newcomers.forget(device)

    def is_growing(self, device: int) -> bool:
        """It is believed less than it claims, and more with what it delivers."""
        return device in self.newcomers.beliefs

    def proved_slow(self, device: int, ratio: float) -> None:
        """Another device was faster; `ratio` times the expected time had passed."""
        (self.newcomers.failed if self.is_growing(device) else self.slowness.overtaken)(device, ratio)

    def distrust(self, devices: Sequence[int], able: Integers, now_s: float) -> None:
        """New devices among these begin small, whatever they claim. How slow the others are is known."""
        known = [device for device in able.tolist() if not self.is_growing(device)]
        typical = typical_rates(self.profiles, known) if known else None
        for device in devices:
            if device in self.new and not self.is_growing(device):
                self.newcomers.begin(device, typical or typical_rates(self.claims, devices))
        self.correct(now_s)

    def trust_claims(self, devices: Iterable[int]) -> None:
        """There is no device to compare these with: believe each new one as much as a typical one of them claims."""
        new = [device for device in devices if device in self.new and not self.is_growing(device)]
        if new:
            typical = typical_rates(self.claims, new)
            for device in new:
                self.newcomers.begin(device, typical, times=1.0)

    def sized_for_probes(self, devices: Iterable[int]) -> NDArray[np.void]:
        """Profiles to size probes with: for a typical device, or for one that keeps its claim."""
        sized = self.profiles.copy()
        for device in devices:
            claim, belief = rates_of(self.claims, device), self.newcomers.beliefs.get(device)
            rates = claim if belief is None else replace(belief, times=max(1.0, belief.times)).rates(claim)
            for rate, value in zip(RATES, rates, strict=True):
                sized[rate][device] = value
        return sized

    def correct(self, now_s: float) -> None:
        """Let profiles follow what is known by now. A new array if anything changes: plans may hold the old one."""
        changes = set(self.newcomers.take_changes(self.claims))
        if now_s >= self._corrected_s + settings.NOW.hitch_s:  # corrections change plans: not too often
            self.slowness.forgive(now_s)
            if slower := self.slowness.take_changes():
                changes.update(slower)
                self._corrected_s = now_s
        if not changes:
            return
        self.profiles = self.profiles.copy()
        for device in sorted(changes):
            claim, factor = rates_of(self.claims, device), self.slowness.factor.get(device, 1.0)
            belief = self.newcomers.beliefs.get(device)
            for rate, value in zip(RATES, belief.rates(claim) if belief else claim, strict=True):
                self.profiles[rate][device] = max(1.0, value / factor)
        self.revise(sorted(changes))

    def revise(self, devices: Iterable[int]) -> None:
        """Plans made before now are based on other profiles of these devices."""
        self._revision += 1
        self.revised |= dict.fromkeys(devices, self._revision)

    @property
    def revision(self) -> int:
        """The latest of any device that is there."""
        return max(self.revised.values(), default=0)
