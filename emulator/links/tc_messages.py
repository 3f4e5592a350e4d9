"""A plan's classes and leaves as messages to the kernel, and the figures in its replies.

Units are the kernel's: whole bytes per second, ticks of 64 ns, losses in 2^-32.
"""

from __future__ import annotations

import socket
import struct

from emulator.links import netlink
from emulator.links.netlink import Netlink
from emulator.links.shaping_plan import FRAME_BYTES, TICK_S, Class, Leaf, Side

ROOT, HANDLE = 0xFFFFFFFF, 0x10000  # htb is 1:
HTB_CLASS = struct.Struct("=BBHhHIBBHhHIIIIII")
_ETHERNET = 1  # link layer: the kernel computes times itself and needs no tables
_IPV4 = socket.htons(0x0800)


def root(link: Netlink, index: int) -> bytes:
    init = ("TCA_OPTIONS", {"attrs": [("TCA_HTB_INIT", struct.pack("=IIIII", 3, 10, 0, 0, 0))]})
    new = netlink.CREATE | netlink.EXCLUSIVE
    return link.traffic(netlink.NEW_QDISC, new, index, HANDLE, ROOT, ("TCA_KIND", "htb"), init)


def remove_root(link: Netlink, index: int) -> bytes:
    return link.traffic(netlink.DELETE_QDISC, 0, index, HANDLE, ROOT)


def classify(link: Netlink, index: int, side: Side) -> bytes:
    operations = b"".join(struct.pack("=HBBI", *operation) for operation in side.program)
    options = {"attrs": [("TCA_BPF_OPS_LEN", len(side.program)), ("TCA_BPF_OPS", operations)]}
    return link.traffic(
        netlink.NEW_FILTER,
        netlink.CREATE | netlink.EXCLUSIVE,
        index,
        0,
        HANDLE,
        ("TCA_KIND", "bpf"),
        ("TCA_OPTIONS", options),
        info=1 << 16 | _IPV4,
    )


def device_class(link: Netlink, index: int, one: Class, flags: int) -> list[bytes]:
    parms = ("TCA_OPTIONS", {"attrs": [("TCA_HTB_PARMS", HTB_CLASS.pack(*class_figures(one)))]})
    classid = HANDLE | one.minor
    messages = [link.traffic(netlink.NEW_CLASS, flags, index, classid, HANDLE, ("TCA_KIND", "htb"), parms)]
    if one.queue_bytes:
        queue = (("TCA_KIND", "bfifo"), ("TCA_OPTIONS", {"limit": one.queue_bytes}))
        messages.append(link.traffic(netlink.NEW_QDISC, flags, index, one.minor << 16, classid, *queue))
    if one.leaf is not None:
        messages.append(netem(link, index, classid, one.minor << 16, one.leaf, flags))
    return messages


def class_figures(one: Class) -> tuple[int, ...]:
    ticks = int(one.burst_bytes / one.rate_bytes_s / TICK_S)
    rate = (0, _ETHERNET, 0, 0, 0, one.rate_bytes_s)
    return (*rate, *rate, ticks, ticks, FRAME_BYTES, 0, 0)


def netem(link: Netlink, index: int, parent: int, handle: int, leaf: Leaf, flags: int) -> bytes:
    rate = {"rate": leaf.rate_bytes_s, "packet_overhead": 0, "cell_size": 0, "cell_overhead": 0}
    more = [("TCA_NETEM_RATE", rate)] if leaf.rate_bytes_s else []
    options = leaf_figures(leaf) | {"gap": 0, "duplicate": 0, "attrs": more}
    return link.traffic(
        netlink.NEW_QDISC, flags, index, handle, parent, ("TCA_KIND", "netem"), ("TCA_OPTIONS", options)
    )


def leaf_figures(leaf: Leaf) -> dict[str, int]:
    return {
        "delay": round(leaf.delay_s / TICK_S),
        "jitter": round(leaf.jitter_s / TICK_S),
        "loss": round(leaf.loss * (2**32 - 1)),
        "limit": leaf.limit_packets,
    }


def segments(link: Netlink, index: int, count: int) -> bytes:
    return link.link(index, ("IFLA_GSO_MAX_SEGS", count))
