"""What a device's container may use of its host: processor time and memory. Pure.

A device is as fast as its model says. Its share of a core is its rate divided by that of one host core, measured there
with the same kernel. The limit applies to the thread that computes (`emulator.containers.throttle`). Other work of a
container (messages, their encryption, copies) is not the device's work and gets MESSAGES_SHARE. Where that thread
cannot be limited on its own, the limit applies to the whole container, and messages get only OWN_SHARE.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOM = 0.05  # margin where the pod waits until answers are due: products of a thousand rows are this much slower
MESSAGES_SHARE = 1.0  # of a core: ZeroMQ receives, decrypts and sends on one thread
OWN_SHARE = 0.1  # of a core for messages, where one quota covers both
OWN_BYTES = 96 << 20  # Python, NumPy and ZeroMQ: 45 MB, plus messages in flight beside the operands
LEAST_US = 1000  # some kernels silently ignore a smaller quota
SHORTEST_US, LONGEST_US = 10_000, 100_000  # periods: a short one stops a pod for less time; kernels enforce these well


@dataclass(frozen=True, slots=True)
class Quota:
    """Processor time per period."""

    quota_us: int
    period_us: int

    @property
    def share(self) -> float:
        return self.quota_us / self.period_us


@dataclass(frozen=True, slots=True)
class Allotment:
    arithmetic: Quota  # for the thread that computes
    container: Quota  # for everything in the container
    undivided: Quota  # for the container, where the arithmetic has no limit of its own
    memory_bytes: int
    capped: bool  # the device is faster than a core of this host


def allotment(flops: float, memory_bytes: int, core_flops: float, modelled: bool) -> Allotment:
    """The allotment of a device of this rate and RAM budget on a host with such cores. `modelled`: the pod waits until
    answers are due."""
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
    """The shortest period whose quota kernels still apply."""
    period_us = min(LONGEST_US, max(SHORTEST_US, round(LEAST_US / share)))
    return Quota(max(LEAST_US, round(share * period_us)), period_us)
