"""What a device's container may use of the machine that hosts it: processor time and memory. Pure.

A device is as fast as its model says. The share of a core that amounts to it is its rate over that of a core of the
host, measured there with the same kernel. What a container does beside the arithmetic (messages, copies) is not the
device's: where the pod waits until an answer is due by the model, it gets OWN_SHARE more, and the quota is what it can
never exceed; where nothing is modelled, the quota is the share, and the arithmetic takes the time that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

OWN_SHARE = 0.1  # of a core: messages and copies of a pod of one, measured, see docs/containers.md
OWN_BYTES = 96 << 20  # of Python, NumPy and ZeroMQ: 45 MB, and what messages on their way take beside the operands
LEAST_US = 1000  # a smaller quota is silently not applied by some kernels
SHORTEST_US, LONGEST_US = 10_000, 100_000  # periods: short ones stop a pod for a shorter time; what kernels keep well


@dataclass(frozen=True, slots=True)
class Allotment:
    quota_us: int  # of processor time in each period
    period_us: int
    memory_bytes: int
    capped: bool  # the device is faster than a core of this host

    @property
    def share(self) -> float:
        return self.quota_us / self.period_us


def allotment(flops: float, memory_bytes: int, core_flops: float, modelled: bool) -> Allotment:
    """Of a device of this rate and RAM budget, on a host with such cores. `modelled`: the pod waits out its times."""
    share = flops / core_flops
    wanted = min(1.0, share) + (OWN_SHARE if modelled else 0.0)
    quota_us, period_us = quota(wanted)
    return Allotment(quota_us, period_us, int(memory_bytes) + OWN_BYTES, capped=share > 1.0)


def quota(share: float) -> tuple[int, int]:
    """Microseconds of each period: the shortest period that leaves a quota that kernels apply."""
    period_us = min(LONGEST_US, max(SHORTEST_US, round(LEAST_US / share)))
    return max(LEAST_US, round(share * period_us)), period_us
