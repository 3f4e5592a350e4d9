"""Devices that are held for deferred products, so that critical products leave them alone until these end."""

from __future__ import annotations

import numpy as np

from ps.planning.cost import Integers

NONE: Integers = np.empty(0, np.int64)


class DeferredTeams:
    def __init__(self) -> None:
        self.busy = NONE  # all devices that are held, each once
        self._of: dict[int, Integers] = {}  # deferred jobs -> their devices

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def jobs(self) -> list[int]:
        """Deferred jobs for which devices are held."""
        return list(self._of)

    def hold(self, job: int, devices: Integers) -> None:
        """Keep these devices for this deferred job until it ends."""
        self._of[job] = devices
        self.busy = np.union1d(self.busy, devices)

    def end(self, job: int) -> None:
        if self._of.pop(job, None) is not None:
            self._count()

    def left(self, devices: list[int]) -> None:
        """Their ids may be reused."""
        if np.isin(self.busy, devices).any():
            self._of = {job: team[~np.isin(team, devices)] for job, team in self._of.items()}
            self._count()

    def _count(self) -> None:
        self.busy = np.unique(np.concatenate(list(self._of.values()) or [NONE]))
