"""Kernel links, the pure part: which classes and leaves a pod's devices need, and the equivalent `tc` commands.

Every device has an address, and an htb class in each direction: up on the pod's interface, selected by source
address; down on the server's interface, selected by destination. The class is the low 16 bits of the address, so that
one classic BPF program finds every class. Where the kernel has netem, a leaf under the class adds delay, jitter and
loss.

- The rates of the network profiles are throughput, so the class rate is raised by the share that Ethernet, IP and TCP
  headers take of a full packet.
- A device's bare acknowledgements bypass its uplink class. The profiles' rates were measured one direction at a time,
  and on a 20:1 line the acknowledgements of a full downlink would take half of the uplink.
- Data waiting in the uplink's queue also carries acknowledgements. If newer acknowledgements overtake that data for
  long, the server's TCP takes it for forged (RFC 5961) and drops it. So senders in the pod's namespace may queue about
  two packets there; the rest waits in their socket and leaves with a current acknowledgement. netem hides its packets
  from that count, so its queue is kept short in proportion to the line's asymmetry.
- The queue of a downlink is short, or as long as the line's own buffer if that is known: acknowledgements of uploads
  wait there among the data.
- TCP takes 0.2 s of silence after the first packets for loss. Where those packets may take longer, its timeout is
  raised (`patience_s`).
- TCP on both sides slows down when a queue is full (`CONGESTION_CONTROLS`). BBR, the default on some hosts, does not:
  on lines that are idle between messages BBR lost a fifth of the packets over a bridge, and waited for its timer when
  a packet was lost twice.
- Traffic that is neither from nor to a device's address also bypasses the classes.
- netem alone would let packets overtake each other under jitter; given a rate, it keeps them in order. netem's rate is
  well above the class's, so that netem is never the bottleneck.
- A packet that the network stack has not segmented yet passes in one lump, however slow the class, and is lost as a
  whole. So the number of packets per lump is limited on the interface.

No I/O. `emulator.links.shaping` carries a plan out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Literal

from agent.protocol.errors import UserError
from emulator.model.link import LinkSpec

MTU_BYTES = 1500
FRAME_BYTES = MTU_BYTES + 14  # as htb counts a frame: with the Ethernet header
HEADER_SHARE = (MTU_BYTES - 52) / FRAME_BYTES  # payload of a full frame: without IP, TCP and TCP timestamps
BURST_S = 0.002  # a class may catch up after a timer fires this late
LEAST_BPS, MOST_BPS = 1_000.0, 32e9  # htb counts bytes per second in 32 bits, and forgets a debt of more than a minute
LUMP_S = 0.002  # longest time a lump may take on the slowest link
MOST_SEGMENTS = 44  # of 1,500 bytes in the 64 KiB of one lump
PREFIX_TAKEN = 3  # exit code of `emulator.links.shaping`: these addresses are already in use
FIRST_CLASS, LAST_CLASS = 2, 0xFFFE  # of 16 bits; 1 is the root's own number, all ones is for ingress
TICK_S = 64e-9  # the kernel's unit of time in these messages
MOST_DELAY_S = 270.0  # 32 bits of ticks
IN_ORDER = 8  # netem's rate as a multiple of the class's
QUEUE_S, QUEUE_PACKETS = 0.05, 12  # downlink queue if the buffer is unknown; least queue down, most up
OVERTAKEN_BYTES = 48 * 1024  # data may be overtaken by this many acknowledged bytes: less than TCP's initial window
QUEUED_BYTES = 4096  # most bytes of one connection in its uplink's queue
FIRST_PACKETS = 12  # packets that TCP sends before it knows the speed of the line, plus a margin
LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.2, 30.0  # TCP's retransmission timeout; the first is Linux's default
CONGESTION_CONTROLS = ("cubic", "reno")  # the first that is available and allowed; reno always is
MODEL_INSTEAD = 'or use links.kind = "model", which needs no privileges'

Way = Literal["up", "down"]


class ShapingPlanError(UserError):
    """Links that a kernel cannot provide; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """What netem does to the packets of one class."""

    delay_s: float
    jitter_s: float
    loss: float  # share of packets
    limit_packets: int
    rate_bytes_s: int  # keeps packets in order; 0: not needed, no jitter


@dataclass(frozen=True, slots=True)
class Class:
    minor: int  # 1:minor, the low 16 bits of the address
    rate_bytes_s: int
    burst_bytes: int
    queue_bytes: int  # queue limit; 0: senders hold themselves back, see QUEUED_BYTES
    leaf: Leaf | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One interface: all traffic that leaves it in one direction."""

    way: Way
    network: int  # the high 16 bits of all addresses
    classes: tuple[Class, ...]
    segments: int  # most packets per lump

    @property
    def program(self) -> list[tuple[int, int, int, int]]:
        return classifier(self.way, self.network)


@dataclass(frozen=True, slots=True)
class PodLinks:
    """The request: the devices behind one interface. A namespace is given as the id of a process in it, its name, or
    None for the current namespace."""

    interface: str
    devices: tuple[tuple[str, LinkSpec], ...]  # address and link of each device
    namespace: int | str | None = None
    # addresses that are not the interface's own; None: the device has the interface's address
    prefix: str | None = None
    server_namespace: int | str | None = None
    server_interface: str | None = None  # None: the other end of the veth pair
    gateway: str | None = None  # the pod's own address, next hop to the prefix; None: looked up

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> PodLinks:
        known = {field.name for field in fields(cls)}
        if unknown := set(told) - known:
            raise ShapingPlanError(f"links have no {', '.join(sorted(unknown))}; they have {', '.join(sorted(known))}")
        try:
            names = [field.name for field in fields(LinkSpec)]
            devices = tuple(
                (str(device["address"]), LinkSpec(**{name: float(device[name]) for name in names}))
                for device in told["devices"]
            )
            return cls(**{**told, "devices": devices})
        except (KeyError, TypeError, ValueError) as error:
            raise ShapingPlanError(f"links that do not add up: {error!r}") from None

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"devices": [{"address": address} | asdict(spec) for address, spec in self.devices]}


@dataclass(frozen=True, slots=True)
class ShapingPlan:
    asked: PodLinks
    up: Side
    down: Side
    in_user_space: tuple[str, ...]  # requested effects that this kernel does not provide

    @property
    def patience_s(self) -> float:
        """TCP's retransmission timeout: the time of the first packets on the slowest line, plus that of the queue in
        which their acknowledgements may wait."""
        slowest_s = max(
            FRAME_BYTES * (FIRST_PACKETS / up.rate_bytes_s + QUEUE_PACKETS / down.rate_bytes_s)
            for up, down in zip(self.up.classes, self.down.classes, strict=True)
        )
        return min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, slowest_s))


def addresses(prefix: str, count: int) -> list[str]:
    """The first addresses of a prefix that devices can have."""
    if count > room(prefix):
        raise ShapingPlanError(
            f"{prefix} has room for {room(prefix):,} devices, {count:,} are asked for; "
            f"take more pods (fleet.pods), {MODEL_INSTEAD}"
        )
    first = int(_network(prefix).network_address) + FIRST_CLASS
    return [str(IPv4Address(first + i)) for i in range(count)]


def room(prefix: str) -> int:
    """Number of devices that fit, limited by the number of classes a kernel can tell apart."""
    network = _network(prefix)
    first = int(network.network_address) + FIRST_CLASS
    last = min(int(network.broadcast_address), (int(network.network_address) | 0xFFFF) & ~1)
    return max(0, last - first + 1)


def make_plan(asked: PodLinks, netem: bool) -> ShapingPlan:
    """`netem`: whether the kernel has it."""
    if not asked.devices:
        raise ShapingPlanError(f"no device is given for {asked.interface}")
    within = None if asked.prefix is None else _network(asked.prefix)
    taken: set[int] = set()
    minors = []
    for address, spec in asked.devices:
        number = _number(address)
        if within is not None and IPv4Address(number) not in within:
            raise ShapingPlanError(
                f"{address} is not in {asked.prefix}; give every device an address of its pod's prefix"
            )
        if not FIRST_CLASS <= number & 0xFFFF <= LAST_CLASS:
            raise ShapingPlanError(
                f"{address} cannot be a device's: its last two bytes must lie between 0.2 and 255.254"
            )
        if number in taken:
            raise ShapingPlanError(f"{address} is given to two devices; each needs its own")
        if taken and number >> 16 != next(iter(taken)) >> 16:
            raise ShapingPlanError(
                f"{address} is in another /16 than the first device of {asked.interface}; a kernel tells 65,533 "
                f"classes an interface apart: take more pods (fleet.pods), {MODEL_INSTEAD}"
            )
        _check(address, spec)
        taken.add(number)
        minors.append(number & 0xFFFF)
    specs = [spec for _, spec in asked.devices]
    network = next(iter(taken)) >> 16
    return ShapingPlan(
        asked,
        _side("up", network, minors, specs, netem),
        _side("down", network, minors, specs, netem),
        () if netem else _held(specs),
    )


def _side(way: Way, network: int, minors: Sequence[int], specs: Sequence[LinkSpec], netem: bool) -> Side:
    lossy = netem and any(getattr(spec, f"loss_{way}") for spec in specs)
    slowest = min(class_rate(getattr(spec, f"rate_{way}_bps")) for spec in specs)
    segments = 1 if lossy else min(MOST_SEGMENTS, max(1, int(LUMP_S * slowest / FRAME_BYTES)))
    classes = []
    for minor, spec in zip(minors, specs, strict=True):
        rate, buffer_bytes = class_rate(getattr(spec, f"rate_{way}_bps")), getattr(spec, f"buffer_{way}_bytes")
        if way == "down":
            packets = math.ceil(max((buffer_bytes or QUEUE_S * rate) / FRAME_BYTES, QUEUE_PACKETS * segments))
        else:  # while the queue drains, less than one TCP window arrives downstream
            packets = int(OVERTAKEN_BYTES / FRAME_BYTES * spec.rate_up_bps / spec.rate_down_bps)
            packets = max(2, min(QUEUE_PACKETS, packets))
        queue_bytes = (packets + 1) * FRAME_BYTES - 1  # a queue full of data still takes acknowledgements
        leaf = _leaf(way, spec, rate, queue_bytes) if netem else None
        queue_bytes = queue_bytes if way == "down" and leaf is None else 0
        classes.append(Class(minor, rate, FRAME_BYTES + int(BURST_S * rate), queue_bytes, leaf))
    return Side(way, network, tuple(sorted(classes, key=lambda one: one.minor)), segments)


def class_rate(throughput_bps: float) -> int:
    """Bytes per second, including headers, of a link with this throughput."""
    return round(min(throughput_bps, MOST_BPS) / 8 / HEADER_SHARE)


def _leaf(way: Way, spec: LinkSpec, rate_bytes_s: int, queue_bytes: int) -> Leaf | None:
    delay_s, jitter_s = getattr(spec, f"delay_{way}_s"), getattr(spec, f"jitter_{way}_s")
    loss = getattr(spec, f"loss_{way}")
    if not (delay_s or jitter_s or loss):
        return None
    on_its_way_bytes = rate_bytes_s * (delay_s + jitter_s)  # these bytes also wait in netem, but not in the queue
    limit = math.ceil((on_its_way_bytes + queue_bytes) / FRAME_BYTES)
    in_order = min(IN_ORDER * rate_bytes_s, 2**32 - 1) if jitter_s else 0
    return Leaf(delay_s, jitter_s, loss, limit, in_order)


def _held(specs: Iterable[LinkSpec]) -> tuple[str, ...]:
    """Effects other than rates that the devices ask for."""
    of = {
        "latency": ("delay_down_s", "delay_up_s"),
        "jitter": ("jitter_down_s", "jitter_up_s"),
        "loss": ("loss_down", "loss_up"),
    }
    specs = list(specs)
    return tuple(name for name, keys in of.items() if any(getattr(spec, key) for spec in specs for key in keys))


def _check(address: str, spec: LinkSpec) -> None:
    for way in ("down", "up"):
        rate, delay = getattr(spec, f"rate_{way}_bps"), getattr(spec, f"delay_{way}_s")
        jitter, loss = getattr(spec, f"jitter_{way}_s"), getattr(spec, f"loss_{way}")
        if not rate >= LEAST_BPS:
            raise ShapingPlanError(
                f"{address}: a rate of {rate:g} bit/s {way} is below what the kernel can shape, "
                f"{LEAST_BPS:g} bit/s; raise fleet.line_share, {MODEL_INSTEAD}"
            )
        if not 0 <= jitter <= delay <= MOST_DELAY_S / 2:
            raise ShapingPlanError(
                f"{address}: a delay of {delay:g} s {way} with a jitter of {jitter:g} s; the jitter may not be more "
                f"than the delay, and that not more than {MOST_DELAY_S / 2:g} s"
            )
        if not 0 <= loss < 1:
            raise ShapingPlanError(
                f"{address}: a loss of {loss:g} {way}; it must be a share, at least 0 and less than 1"
            )


def _network(prefix: str) -> IPv4Network:
    try:
        network = IPv4Network(prefix)
    except ValueError as error:
        raise ShapingPlanError(f"{prefix} is no IPv4 prefix: {error}") from None
    if network.prefixlen < 16:
        raise ShapingPlanError(
            f"{prefix} is larger than a /16: a kernel tells 65,533 classes an interface apart; "
            f"take more pods (fleet.pods), {MODEL_INSTEAD}"
        )
    return network


def _number(address: str) -> int:
    try:
        return int(IPv4Address(address))
    except ValueError as error:
        raise ShapingPlanError(f"{address} is no IPv4 address: {error}") from None


def classifier(way: Way, network: int) -> list[tuple[int, int, int, int]]:
    """Classic BPF: class 1:x for a packet from (up) or to (down) the address that ends in x; 0, no class, for bare
    acknowledgements going up and for traffic that belongs to no device. Each row: operation, two jumps, operand."""
    ip = 0xFFF00000  # offsets count from the IP header
    mine = ip + (12 if way == "up" else 16)
    load, load_half, load_byte = 0x20, 0x28, 0x30
    and_, or_, shift_left, shift_right, add, subtract_x, equal, tax, give_a, give = (
        0x54, 0x44, 0x64, 0x74, 0x04, 0x1C, 0x15, 0x07, 0x16, 0x06,
    )  # fmt: skip
    class_of = [(load, 0, 0, mine), (and_, 0, 0, 0xFFFF), (or_, 0, 0, 0x10000), (give_a, 0, 0, 0), (give, 0, 0, 0)]
    if way == "down":
        return [(load, 0, 0, mine), (and_, 0, 0, 0xFFFF0000), (equal, 0, 4, network << 16), *class_of]
    return [
        (load, 0, 0, mine),
        (and_, 0, 0, 0xFFFF0000),
        (equal, 0, 19, network << 16),  # else: not a device of this pod
        (load_byte, 0, 0, ip + 9),
        (equal, 0, 13, 6),  # else: not TCP
        (load_byte, 0, 0, ip),
        (equal, 0, 11, 0x45),  # else: a header with options
        (load_byte, 0, 0, ip + 33),
        (and_, 0, 0, 0x07),
        (equal, 0, 8, 0),  # else: start or end of a connection
        (load_byte, 0, 0, ip + 32),
        (shift_right, 0, 0, 4),
        (shift_left, 0, 0, 2),
        (add, 0, 0, 20),
        (tax, 0, 0, 0),
        (load_half, 0, 0, ip + 2),
        (subtract_x, 0, 0, 0),
        (equal, 4, 0, 0),  # then: headers only
        *class_of,
    ]


def settings(plan: ShapingPlan) -> dict[str, int]:
    """TCP settings in the pod's own namespace, under /proc/sys; none where the pod shares its namespace with other
    pods."""
    if plan.asked.namespace is None:
        return {}
    patience = {"net/ipv4/tcp_rto_min_us": round(1e6 * plan.patience_s)} if plan.patience_s > LEAST_PATIENCE_S else {}
    return {"net/ipv4/tcp_limit_output_bytes": QUEUED_BYTES} | patience


# ---- as commands


def commands(plan: ShapingPlan) -> list[str]:
    """A plan as commands, for people; the numbers are those given to the kernel."""
    asked = plan.asked
    inside, outside = _enter(asked.namespace), _enter(asked.server_namespace)
    other = asked.server_interface or f"$(the other end of {asked.interface})"
    lines = []
    told = f"rto_min {round(1e3 * plan.patience_s)}ms congctl {CONGESTION_CONTROLS[0]}"
    if asked.prefix is None:
        lines += [f"{outside}ip route add {address} dev $(bridge of {other}) {told}" for address, _ in asked.devices]
    else:
        gateway = asked.gateway or f"$(address of {asked.interface})"
        lines.append(f"{inside}ip route add local {asked.prefix} dev lo")
        lines.append(f"{outside}ip route add {asked.prefix} via {gateway} {told}")
    lines += [f"{inside}sysctl -w {key.replace('/', '.')}={value}" for key, value in settings(plan).items()]
    if asked.namespace is not None:
        lines.append(f"{inside}sysctl -w net.ipv4.tcp_congestion_control={CONGESTION_CONTROLS[0]}")
    return lines + _side_commands(inside, asked.interface, plan.up) + _side_commands(outside, other, plan.down)


def _enter(namespace: int | str | None) -> str:
    if namespace is None:
        return ""
    return f"nsenter -t {namespace} -n " if isinstance(namespace, int) else f"ip netns exec {namespace} "


def _side_commands(enter: str, interface: str, side: Side) -> list[str]:
    tc, program = f"{enter}tc", side.program
    code = ",".join([str(len(program)), *(" ".join(map(str, operation)) for operation in program)])
    lines = [
        f"{enter}ip link set dev {interface} gso_max_segs {side.segments}",
        f"{tc} qdisc add dev {interface} root handle 1: htb default 0",
        f"{tc} filter add dev {interface} parent 1: protocol ip bpf bytecode '{code}'",
    ]
    for one in side.classes:
        leaf_of = f"{tc} qdisc add dev {interface} parent 1:{one.minor:x} handle {one.minor:x}:"
        lines.append(
            f"{tc} class add dev {interface} parent 1: classid 1:{one.minor:x} htb rate {8 * one.rate_bytes_s}bit "
            f"burst {one.burst_bytes} quantum {FRAME_BYTES}"
        )
        if one.queue_bytes:
            lines.append(f"{leaf_of} bfifo limit {one.queue_bytes}")
        if one.leaf is not None:
            leaf = one.leaf
            text = f"delay {1e3 * leaf.delay_s:g}ms {1e3 * leaf.jitter_s:g}ms loss {100 * leaf.loss:g}% "
            text += f"limit {leaf.limit_packets}" + (f" rate {8 * leaf.rate_bytes_s}bit" if leaf.rate_bytes_s else "")
            lines.append(f"{leaf_of} netem {text}")
    return lines
