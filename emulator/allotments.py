"""What a device's container may use of the machine that hosts it: processor time and memory. Pure.

A device is as fast as its model says. The share of a core that amounts to it is its rate over that of a core of the
host, measured there with the same kernel. It is a limit of the thread that computes (`emulator.throttle`). What a
container does beside the arithmetic (messages, their encryption, copies) is not the device's: it has MESSAGES_SHARE of
its own. Where that thread cannot be limited, the container is: OWN_SHARE is then all that messages have.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOM = 0.05  # more, where the pod waits until answers are due: products of a thousand rows are slower by so much
MESSAGES_SHARE = 1.0  # of a core: ZeroMQ receives, decrypts and sends on one thread
OWN_SHARE = 0.1  # the same within a quota of both
OWN_BYTES = 96 << 20  # of Python, NumPy and ZeroMQ: 45 MB, and what messages on their way take beside the operands
LEAST_US = 1000  # a smaller quota is silently not applied by some kernels
SHORTEST_US, LONGEST_US = 10_000, 100_000  # periods: short ones stop a pod for a shorter time; what kernels keep well


@dataclass(frozen=True, slots=True)
class Quota:
    """Processor time in each period."""

    quota_us: int
    period_us: int

    @property
    def share(self) -> float:
        return self.quota_us / self.period_us


@dataclass(frozen=True, slots=True)
class Allotment:
    arithmetic: Quota  # of the thread that computes
    container: Quota  # of everything in the container
    undivided: Quota  # of the same, where the arithmetic has no limit of its own
    memory_bytes: int
    capped: bool  # the device is faster than a core of this host


def allotment(flops: float, memory_bytes: int, core_flops: float, modelled: bool) -> Allotment:
    """Of a device of this rate and RAM budget, on a host with such cores. `modelled`: the pod waits out its times."""
    exact = min(1.0, flops / core_flops)
    share = min(1.0, exact * (1.0 + ROOM)) if modelled else exact
    return Allotment(
        quota(share),
        quota(share + MESSAGES_SHARE),
        quota(exact + (OWN_SHARE if modelled else 0.0)),
        int(memory_bytes) + OWN_BYTES,
        capped=flops > core_flops,
    )


def quota(share: float) -> Quota:
    """The shortest period that leaves a quota that kernels apply."""
    period_us = min(LONGEST_US, max(SHORTEST_US, round(LEAST_US / share)))
    return Quota(max(LEAST_US, round(share * period_us)), period_us)
