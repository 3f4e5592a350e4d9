"""Emulated devices: download queue -> compute -> upload queue, the three overlapping.

A device's state is three times: when its downlink, its processor and its uplink become free. A block takes each in
turn; `emulator.model.link` describes what the links add. Pure, and vectorised over the devices of a pod: thousands of
devices are a few arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import MAX_RATE
from emulator.model.link import Lines, Links, plain_links
from emulator.model.performance import Models, Processors, Shapes, figures_seconds

Seconds = NDArray[np.float64]
ROUNDING_S = 1e-7  # tolerance for times that were rounded to nanoseconds


class Devices:
    def __init__(self, profiles: NDArray[np.void], links: Links | None = None, models: Models | None = None) -> None:
        """Without `links`, every link is plain: a rate and a latency. `models`: those of the measured devices."""
        if links is not None and len(links) != len(profiles):
            raise ValueError(f"{len(links)} links for {len(profiles)} devices")
        self.profiles = profiles.copy()  # current rates, see `slow`
        self._told = profiles
        self._lines = Lines(links or plain_links(len(profiles)))
        self._processors = None if models is None else Processors(models)
        self._processor_free_s = np.zeros(len(profiles))
        self._receives = models is not None and any(kind.down_s for kind in models.kinds)
        # device -> per block: when due, when it arrived, how long its messages kept the processor busy
        self._received: dict[int, list[tuple[float, float, float]]] = {}

    @classmethod
    def behind_kernel_links(
        cls, profiles: NDArray[np.void], links: Links | None, models: Models | None, latency: bool
    ) -> Devices:
        """Blocks arrive and answers leave over real links, so rates are the kernel's. With `latency`, for a kernel
        without netem, latency, jitter and loss are still modelled."""
        profiles = profiles.copy()
        profiles["down_bps"] = profiles["up_bps"] = MAX_RATE
        table = plain_links(len(profiles)).table
        if not latency:
            profiles["latency_s"] = 0.0
        elif links is not None:
            for name in ("key", "jitter_down_s", "jitter_up_s", "loss_down", "loss_up"):
                table[name] = links.table[name]
        return cls(profiles, Links(table), models)

    def slow(self, devices: list[int], factor: float) -> None:
        """Make these devices `factor` times slower than their profiles: computing and both link directions."""
        for name in ("flops", "down_bps", "up_bps"):
            self.profiles[name][devices] = self._told[name][devices] / factor
        self.profiles["overhead_s"][devices] = self._told["overhead_s"][devices] * factor
        if self._processors is not None:
            self._processors.slow(devices, factor)

    def forget(self, devices: list[int]) -> None:
        """Drop all queued work: the devices start afresh."""
        self._lines.forget(devices)
        self._processor_free_s[devices] = 0.0
        for device in devices:
            self._received.pop(device, None)

    def schedule(
        self,
        sent_s: float,
        device: NDArray[np.int64],
        down_bytes: NDArray[np.int64],
        shapes: Shapes,
        up_bytes: NDArray[np.int64],
    ) -> tuple[Seconds, Seconds]:
        """Schedule blocks that the server sent at `sent_s`, in order. Returns when each answer is back at the server,
        unless it is held up (see `held_up`), and its computing time. A device may have several blocks; they queue.
        `shapes`: batch, rows, inner and columns of each. The result does not depend on how blocks are divided into
        calls."""
        due_s, compute_s = np.empty(len(device)), np.empty(len(device))
        for wave in waves(device):
            d = device[wave]
            profile, sent = self.profiles[d], np.full(len(d), sent_s)
            arrived_s = self._lines.down.send(d, sent, down_bytes[wave], profile["down_bps"], profile["latency_s"])
            if self._lines.up.bloats:
                queued = zip(d.tolist(), arrived_s.tolist(), (down_bytes[wave] > 0).tolist(), strict=True)
                arrived_s += [self._lines.up.queued_s(*of) if some else 0.0 for *of, some in queued]
            begins_s = np.maximum(arrived_s, self._processor_free_s[d])
            moved_bytes = np.stack([down_bytes[wave], up_bytes[wave]], axis=1)
            compute_s[wave] = self._compute_s(d, profile, shapes[wave], moved_bytes, begins_s)
            computed = begins_s + compute_s[wave]
            self._processor_free_s[d] = computed
            due_s[wave] = self._lines.up.send(d, computed, up_bytes[wave], profile["up_bps"], profile["latency_s"])
            if self._receives and self._processors is not None:
                busy_s = self._processors.receiving_s(d, down_bytes[wave])
                for number, *of_block in np.stack([d, due_s[wave], arrived_s, busy_s], axis=1).tolist():
                    if of_block[2]:
                        self._received.setdefault(int(number), []).append((of_block[0], of_block[1], of_block[2]))
        return due_s, compute_s

    @property
    def may_hold_up(self) -> bool:
        """Whether `held_up` can ever delay an answer."""
        return self._lines.down.bloats or self._receives

    def held_up(self, device: int, due_s: float) -> float:
        """When an answer due at `due_s` really arrives. Downloads of later blocks may delay it, and so may the
        processor, which receives those blocks before it continues (a later block's own time includes receiving it, so
        that does not delay the last answer). Call once per answer, when the answer is due and everything sent before
        that time has been scheduled; per device, in order of due time."""
        later_s = self._lines.down.queued_s(device, due_s)
        if received := self._received.get(device):
            received[:] = [of_block for of_block in received if of_block[0] > due_s + ROUNDING_S]
            later_s += sum(busy_s for _, came_s, busy_s in received if came_s <= due_s)
        return due_s + later_s

    def _compute_s(
        self,
        d: NDArray[np.int64],
        profile: NDArray[np.void],
        shapes: Shapes,
        moved_bytes: NDArray[np.int64],
        begins_s: Seconds,
    ) -> Seconds:
        seconds = figures_seconds(profile, shapes)
        if self._processors is None:
            return seconds
        return self._processors.seconds(d, shapes, moved_bytes, begins_s - self._processor_free_s[d], seconds)


def waves(device: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Positions in order, split so that each device occurs at most once per part: first blocks, second blocks..."""
    order = np.argsort(device, kind="stable")
    ordered = device[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    if len(begins) == len(device):
        return [np.arange(len(device))]
    rank = np.arange(len(device)) - np.repeat(begins, np.diff(np.r_[begins, len(device)]))
    return [order[rank == r] for r in range(int(rank.max()) + 1)]
