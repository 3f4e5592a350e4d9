"""Which devices take work: the able ones, suspects that get nothing new for a while, and devices that have yet to prove
that they answer, with one small block at a time. Every living device is exactly one of the three. Pure.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from ps.planning.cost import Integers
from ps.scheduling import settings
from ps.scheduling.beliefs import Beliefs
from ps.scheduling.state import State


class Standing:
    def __init__(self, state: State, beliefs: Beliefs) -> None:
        self._state, self._beliefs = state, beliefs
        self.able: Integers = np.empty(0, np.int64)  # ids that take work; a new array whenever they change
        self.suspects: dict[int, float] = {}  # overdue devices -> until when they get nothing new
        self.overtaken: set[int] = set()  # suspects that another device has overtaken
        self.unproven: dict[int, None] = {}  # devices that get one small block at a time, until they answer one
        self.strikes: dict[int, int] = {}  # how often a device was suspected since it last answered

    def joined(self, devices: list[int], newcomers: bool) -> None:
        if newcomers:
            self.unproven |= dict.fromkeys(devices)
        else:
            self.able = np.sort(np.concatenate([self.able, np.array(devices, np.int64)]))

    def left(self, devices: list[int]) -> None:
        self.able = self.able[~np.isin(self.able, devices)]
        for device in devices:
            for table in (self.suspects, self.unproven, self.strikes):
                table.pop(device, None)
            self.overtaken.discard(device)

    def answered(self, device: int) -> None:
        if device in self.suspects or device in self.unproven:
            self.trust([device])
        self.strikes.pop(device, None)

    def trust(self, devices: list[int]) -> None:
        """Let these suspects or unproven devices take work like any other."""
        for device in devices:
            self.suspects.pop(device, None)
            self.unproven.pop(device, None)
            self.overtaken.discard(device)
        self.able = np.sort(np.concatenate([self.able, np.array(devices, np.int64)]))

    def trust_more(self) -> bool:
        """The able devices cannot do the work: better late than never. Trust the new devices, then those that have
        answered before, then all. False if there is none left."""
        self._beliefs.trust_claims(self.unproven)
        records = self._state.devices
        for devices in (
            [device for device in self.unproven if device not in self.strikes],
            [device for device in self.suspects if records[device].worked],
            [*self.unproven, *self.suspects],
        ):
            if devices:
                self.trust(devices)
                return True
        return False

    def suspect(self, devices: list[int]) -> None:
        for device in devices:
            strikes = self.strikes[device] = self.strikes.get(device, 0) + 1
            pause_s = min(settings.NOW.longest_pause_s, settings.NOW.suspected_s * 2.0 ** min(strikes - 1, 60))
            self.suspects[device] = self._state.now_s + pause_s
            self.unproven.pop(device, None)
        self.able = self.able[~np.isin(self.able, devices)]

    def end_pauses(self) -> list[int]:
        """Let suspects take work again after their pause, and return them. Those that have never answered, or not since
        an earlier suspicion, first have to prove that they do, with a small block."""
        over = [device for device, until_s in self.suspects.items() if until_s <= self._state.now_s]
        for device in over:
            if self._state.devices[device].worked and self.strikes.get(device, 0) < 2:
                self.trust([device])
            else:
                del self.suspects[device]
                self.overtaken.discard(device)
                self.unproven[device] = None
        return over

    def owes_an_answer(self, device: int) -> bool:
        """It did not answer before, and has not since: a block that it gets must not delay anything, however slow the
        device is believed to be."""
        return device in self.strikes and (device in self.unproven or device in self.suspects)

    def all_owe_an_answer(self, missed: Set[int]) -> bool:
        """Every device was suspected and has not answered since, or is in `missed`: they may be tried in turn for
        ever."""
        if len(self.strikes) + len(missed) < self.living:
            return False
        devices = (*self.able.tolist(), *self.suspects, *self.unproven)
        return all(device in missed or self.strikes.get(device, 0) for device in devices)

    @property
    def living(self) -> int:
        return len(self.able) + len(self.suspects) + len(self.unproven)
