"""Kernel links: carries out the plans of `emulator.links.shaping_plan`, changes them while in use, and removes them.

    python -m emulator.links.shaping probe|apply|change|clear|dry-run

`apply`, `change`, `clear` and `dry-run` read {"pods": [...]} from standard input, one `PodLinks` each; all but
`dry-run` answer with a line of JSON. An error is one line on standard error and exit code 2, or 3 if addresses are in
use. The testbed runs this in a container that has the host's network and processes: a pod is found by the id of a
process in it.

A failed change undoes what it has done. All settings are read back and compared: rates are whole bytes per second,
times are multiples of 64 ns, losses of 2^-32; the kernel rounds nothing beyond that.
"""

from __future__ import annotations

import argparse
import errno
import fnmatch
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from agent.protocol.errors import UserError
from emulator.links import netlink
from emulator.links import tc_messages as traffic
from emulator.links.netlink import Interface, Netlink, NetlinkError
from emulator.links.shaping_plan import (
    CONGESTION_CONTROLS,
    MODEL_INSTEAD,
    PREFIX_TAKEN,
    Leaf,
    PodLinks,
    ShapingPlan,
    Side,
    commands,
    make_plan,
    settings,
)

UNLIMITED_SEGMENTS = 65_535
DEFAULTS: dict[str, int | str] = {
    "net/ipv4/tcp_limit_output_bytes": 4 << 20,
    "net/ipv4/tcp_rto_min_us": 200_000,
}  # Linux defaults
_LOCAL_TABLE, _MAIN_TABLE = 255, 254
_UNICAST, _LOCAL = 1, 2
_HOST_SCOPE, _LINK_SCOPE, _UNIVERSE = 254, 253, 0
_RTO_MIN = 13  # the number of RTAX_RTO_MIN in linux/rtnetlink.h
_CONGESTION = "net/ipv4/tcp_congestion_control"


class ShapingError(UserError):
    """The kernel cannot provide these links; the message says what is missing, and what to use instead."""


class PrefixTaken(ShapingError):
    """The addresses are already in use: choose others."""


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """What this kernel can do for links, tried in a namespace of its own."""

    allowed: bool  # may this process change interfaces?
    htb: bool
    bpf: bool
    netem: bool

    @property
    def missing(self) -> str | None:
        """What makes shaping impossible; None if nothing does."""
        if not self.allowed:
            return "changing interfaces needs root, or the capabilities NET_ADMIN and SYS_ADMIN"
        for name, there in (("queueing discipline htb (sch_htb)", self.htb), ("classifier bpf (cls_bpf)", self.bpf)):
            if not there:
                return f"this kernel has no {name}"
        return None


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done, and what is left to user space."""

    devices: int
    classes: int  # read back
    leaves: int  # netem leaves, read back
    netem: bool
    in_user_space: tuple[str, ...]  # requested but not done by the kernel: the pod delays answers for it
    seconds: float


def probe() -> KernelSupport:
    try:
        return netlink.in_new_namespace(_try_everything)
    except PermissionError:
        return KernelSupport(False, False, False, False)


def _try_everything() -> KernelSupport:
    with Netlink() as link:
        lo = _find(link, "lo", "a new namespace").index

        def works(*messages: bytes) -> bool:
            try:
                link.send(messages)
            except NetlinkError as error:
                if error.errno == errno.EPERM:
                    raise PermissionError(error.errno, error.strerror) from None
                return False
            return True

        htb = works(traffic.root(link, lo))
        bpf = htb and works(traffic.classify(link, lo, Side("up", 0, (), 1)))
        if htb:
            link.send([traffic.remove_root(link, lo)])
        netem = works(
            traffic.netem(
                link,
                lo,
                traffic.ROOT,
                traffic.HANDLE,
                Leaf(0.01, 0.0, 0.0, 1000, 0),
                netlink.CREATE | netlink.EXCLUSIVE,
            )
        )
    return KernelSupport(True, htb, bpf, netem)


# ---- doing


def apply(pods: Sequence[PodLinks], kernel: KernelSupport | None = None) -> Applied:
    """Make all links, or none and raise a ShapingError."""
    begun = time.monotonic()
    kernel = kernel or probe()
    if kernel.missing:
        raise ShapingError(f"links cannot be shaped by the kernel: {kernel.missing}; change that, {MODEL_INSTEAD}")
    plans = [make_plan(pod, kernel.netem) for pod in pods]
    classes = leaves = 0
    with ExitStack() as undo:
        for plan in plans:
            with Ends(plan.asked) as ends:
                ends.apply(plan, undo)
                found = ends.read_back(plan)
                classes, leaves = classes + found[0], leaves + found[1]
        undo.pop_all()
    held = tuple(dict.fromkeys(what for plan in plans for what in plan.in_user_space))
    devices = sum(len(pod.devices) for pod in pods)
    return Applied(devices, classes, leaves, kernel.netem, held, time.monotonic() - begun)


def change(pods: Sequence[PodLinks], kernel: KernelSupport | None = None) -> Applied:
    """Set new figures for devices that already have links; the other devices keep theirs."""
    begun = time.monotonic()
    netem = (kernel or probe()).netem
    plans = [make_plan(pod, netem) for pod in pods]
    classes = leaves = 0
    for plan in plans:
        with Ends(plan.asked) as ends:
            ends.change(plan)
            found = ends.read_back(plan)
            classes, leaves = classes + found[0], leaves + found[1]
    held = tuple(dict.fromkeys(what for plan in plans for what in plan.in_user_space))
    devices = sum(len(pod.devices) for pod in pods)
    return Applied(devices, classes, leaves, netem, held, time.monotonic() - begun)


def clear(pods: Iterable[PodLinks]) -> None:
    """Remove what is left of the links. A part that is already gone, such as a whole namespace, is not an error."""
    for pod in pods:
        with suppress(ShapingError), Ends(pod) as ends:
            ends.clear()


class Ends:
    """The two interfaces of a pod's link: its own, and the server's."""

    def __init__(self, asked: PodLinks) -> None:
        self.asked = asked
        self._inside = _socket(asked.namespace)
        try:
            self._outside = _socket(asked.server_namespace)
        except BaseException:
            self._inside.close()
            raise

    def __enter__(self) -> Ends:
        try:
            self._up = _find(self._inside, self.asked.interface, "the pod's namespace")
            if self.asked.server_interface is not None:
                self._down = _find(self._outside, self.asked.server_interface, "the server's namespace")
            else:
                self._down = self._peer()
            self._bridge = None if self._down.master is None else self._outside.interface(self._down.master)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        self._inside.close()
        self._outside.close()

    def _peer(self) -> Interface:
        found = None if self._up.peer is None else self._outside.interface(self._up.peer)
        itself = self.asked.namespace == self.asked.server_namespace and found == self._up
        if found is None or found.peer != self._up.index or itself:
            raise ShapingError(
                f"the other end of {self.asked.interface} is not in the server's namespace, so its downlink cannot "
                f"be shaped there; give server_interface, {MODEL_INSTEAD}"
            )
        return found

    def _sides(self, plan: ShapingPlan) -> list[tuple[Netlink, int, Side]]:
        return [(self._inside, self._up.index, plan.up), (self._outside, self._down.index, plan.down)]

    def apply(self, plan: ShapingPlan, undo: ExitStack) -> None:
        inside, outside = self.asked.namespace, self.asked.server_namespace
        for link, where, message, back in self._routes(plan.patience_s):
            self._do(link, [message], "a route", where, back, undo)
        if inside is not None:
            self._tell_tcp(inside, plan, undo)
        lumps = [(self._inside, inside, self._up, plan.up), (self._outside, outside, self._down, plan.down)]
        if self._bridge is not None:  # the server's route ends at the bridge
            lumps.append((self._outside, outside, self._bridge, plan.down))
        for link, where, interface, side in lumps:
            if side.segments < interface.segments:
                both = (side.segments, interface.segments)
                message, back = (traffic.segments(link, interface.index, count) for count in both)
                self._do(link, [message], "its largest lumps", where, back, undo)
        for (link, index, side), where in zip(self._sides(plan), (inside, outside), strict=True):
            name = f"the interface of {self.asked.interface}" if link is self._outside else self.asked.interface
            self._do(link, [traffic.root(link, index)], f"htb on {name}", where, traffic.remove_root(link, index), undo)
            messages = [traffic.classify(link, index, side)]
            for one in side.classes:
                messages += traffic.device_class(link, index, one, netlink.CREATE | netlink.EXCLUSIVE)
            self._do(link, messages, f"classes on {name}", where, None, undo)

    def _tell_tcp(self, inside: int | str, plan: ShapingPlan, undo: ExitStack) -> None:
        """Set TCP in the pod's namespace; the server's side gets its settings through routes."""
        for key, value in settings(plan).items():
            if (was := netlink.setting(inside, key)) is not None:
                netlink.set_setting(inside, key, value)
                undo.callback(netlink.set_setting, inside, key, was)
        if (was := netlink.setting(inside, _CONGESTION)) is not None:
            undo.callback(netlink.set_setting, inside, _CONGESTION, was)
            for name in CONGESTION_CONTROLS:
                with suppress(OSError):  # not available, or not allowed in other namespaces by the host
                    netlink.set_setting(inside, _CONGESTION, name)
                    break

    def _do(
        self,
        link: Netlink,
        messages: Sequence[bytes],
        what: str,
        where: int | str | None,
        back: bytes | None,
        undo: ExitStack,
    ) -> None:
        try:
            link.send(messages)
        except NetlinkError as error:
            raise _explained(error, what, self.asked) from None
        if back is not None:
            undo.callback(_send_quietly, where, back)

    def _routes(self, patience_s: float = 0.0) -> list[tuple[Netlink, int | str | None, bytes, bytes]]:
        """Routes by which the server's side reaches the devices, with its TCP settings for that path; a prefix must
        also be local to the pod. Each message comes with the message that undoes it. `patience_s`: 0 leaves out the TCP
        settings."""
        metrics: list[tuple[str, Any]] = []
        if patience_s:
            told = [
                ("RTAX_LOCK", 1 << _RTO_MIN),  # otherwise RTO_MIN is only a suggestion
                ("RTAX_RTO_MIN", round(1e3 * patience_s)),
                ("RTAX_CC_ALGO", _congestion_control()),
            ]
            metrics = [("RTA_METRICS", {"attrs": told})]
        inside, outside = self.asked.namespace, self.asked.server_namespace
        routes: list[tuple[Netlink, int | str | None, tuple[Any, ...]]]
        if self.asked.prefix is None:
            hop = ("RTA_OIF", (self._bridge or self._down).index)
            routes = [
                (self._outside, outside, (32, _UNICAST, _MAIN_TABLE, _LINK_SCOPE, ("RTA_DST", to), hop, *metrics))
                for to, _ in self.asked.devices
            ]
        else:
            prefix = IPv4Network(self.asked.prefix)
            gateway = self.asked.gateway or self._inside.address(self._up.index)
            if gateway is None:
                raise ShapingError(
                    f"{self.asked.interface} has no IPv4 address, so no route can lead to {prefix} behind it"
                )
            lo = _find(self._inside, "lo", "the pod's namespace").index
            length, dst, via = prefix.prefixlen, ("RTA_DST", str(prefix.network_address)), ("RTA_GATEWAY", gateway)
            routes = [
                (self._inside, inside, (length, _LOCAL, _LOCAL_TABLE, _HOST_SCOPE, dst, ("RTA_OIF", lo))),
                (self._outside, outside, (length, _UNICAST, _MAIN_TABLE, _UNIVERSE, dst, via, *metrics)),
            ]
        new = netlink.CREATE | netlink.EXCLUSIVE
        return [
            (link, where, link.route(netlink.NEW_ROUTE, new, *route), link.route(netlink.DELETE_ROUTE, 0, *route))
            for link, where, route in routes
        ]

    def change(self, plan: ShapingPlan, known: bool = False) -> None:
        """`known`: these classes were changed before, so they exist."""
        for link, index, side in self._sides(plan):
            there = set() if known else {one["handle"] & 0xFFFF for one in link.of_interface(netlink.GET_CLASS, index)}
            if missing := [] if known else [one.minor for one in side.classes if one.minor not in there]:
                raise ShapingError(
                    f"{len(missing)} of the devices of {self.asked.interface} have no link yet, the first is class "
                    f"1:{missing[0]:x}; apply first, then change"
                )
            try:
                link.send(
                    [
                        m
                        for one in side.classes
                        for m in traffic.device_class(link, index, one, netlink.CREATE | netlink.REPLACE)
                    ]
                )
            except NetlinkError as error:
                raise _explained(error, f"new figures on {self.asked.interface}", self.asked) from None

    def clear(self) -> None:
        for link, index in ((self._inside, self._up.index), (self._outside, self._down.index)):
            with suppress(NetlinkError):
                link.send([traffic.remove_root(link, index)])
            with suppress(NetlinkError):
                link.send([traffic.segments(link, index, UNLIMITED_SEGMENTS)])
        if self._bridge is not None:
            with suppress(NetlinkError):
                self._outside.send([traffic.segments(self._outside, self._bridge.index, UNLIMITED_SEGMENTS)])
        if self.asked.namespace is not None:
            usual = DEFAULTS | {_CONGESTION: netlink.setting(None, _CONGESTION) or CONGESTION_CONTROLS[0]}
            for key, value in usual.items():
                with suppress(OSError):  # not every kernel has all settings
                    netlink.set_setting(self.asked.namespace, key, value)
        for link, _, _, back in self._routes():
            with suppress(NetlinkError):
                link.send([back])

    def read_back(self, plan: ShapingPlan) -> tuple[int, int]:
        """Number of classes and leaves; ShapingError if a figure differs from the plan."""
        classes = leaves = 0
        for link, index, side in self._sides(plan):
            rates = {
                message["handle"] & 0xFFFF: traffic.HTB_CLASS.unpack(
                    message.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")
                )
                for message in link.of_interface(netlink.GET_CLASS, index)
                if message["handle"] >> 16 == traffic.HANDLE >> 16
            }
            leaved = any(one.leaf is not None for one in side.classes)
            held = {
                message["parent"] & 0xFFFF: message.get_attr("TCA_OPTIONS")
                for message in (link.of_interface(netlink.GET_QDISC, index) if leaved else ())
                if message.get_attr("TCA_KIND") == "netem"
            }
            for one in side.classes:
                asked = traffic.class_figures(one)
                found = rates.get(one.minor)
                if found is None or (found[5], found[11], found[12]) != (asked[5], asked[11], asked[12]):
                    raise ShapingError(f"class 1:{one.minor:x} {side.way} was set to {asked} and reads {found}")
                if one.leaf is not None:
                    said = held.get(one.minor)
                    wanted = traffic.leaf_figures(one.leaf)
                    if said is None or any(said[name] != value for name, value in wanted.items()):
                        raise ShapingError(
                            f"the leaf of 1:{one.minor:x} {side.way} was set to {wanted} and reads {said}"
                        )
                    leaves += 1
                classes += 1
        return classes, leaves


# ---- what goes wrong


def _socket(namespace: int | str | None) -> Netlink:
    try:
        return Netlink(namespace)
    except FileNotFoundError:
        who = f"process {namespace}" if isinstance(namespace, int) else f"network namespace {namespace}"
        raise ShapingError(f"there is no {who}: has the pod ended?") from None
    except PermissionError:
        raise ShapingError(f"entering the namespace {namespace} needs root; ask for that, {MODEL_INSTEAD}") from None


def _find(link: Netlink, name: str, where: str) -> Interface:
    """An interface, by name or by a pattern that matches exactly one: an engine calls a container's first interface
    eth0, and eth1 if it was detached and attached again."""
    if "*" in name and len(names := fnmatch.filter(link.interfaces(), name)) == 1:
        name = names[0]
    found = link.interface(name)
    if found is None:
        raise ShapingError(f"there is no interface {name} in {where}; there are {', '.join(sorted(link.interfaces()))}")
    return found


def _explained(error: NetlinkError, what: str, asked: PodLinks) -> ShapingError:
    said = f"the kernel refused {what}: {error.strerror}"
    match error.errno:
        case errno.EPERM | errno.EACCES:
            return ShapingError(f"{said}; it takes root, or the capability NET_ADMIN; ask for that, {MODEL_INSTEAD}")
        case errno.EEXIST if what == "a route" and asked.prefix is None:
            where = asked.devices[0][0]
            return ShapingError(f"there is a route to {where} already, not made by this run; remove it (ip route del)")
        case errno.EEXIST if what == "a route":
            return PrefixTaken(f"{asked.prefix} is in use already; choose another prefix for the devices")
        case errno.EEXIST:
            return ShapingError(f"{what}: there is one already, not made by this run; remove it first (tc qdisc del)")
        case errno.ENETUNREACH | errno.EHOSTUNREACH:
            return ShapingError(f"{said}; {asked.gateway or asked.interface} is not next to the server's side")
    return ShapingError(f"{said}; {MODEL_INSTEAD[3:]}")


def _congestion_control() -> str:
    """The algorithm of the server's side: a route may name any that the kernel has."""
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return next((name for name in CONGESTION_CONTROLS if name in there), CONGESTION_CONTROLS[-1])


def _send_quietly(namespace: int | str | None, message: bytes) -> None:
    """Send an undo message; an error means that the object is already gone."""
    with suppress(ShapingError, NetlinkError), _socket(namespace) as link:
        link.send([message])


# ---- as a program


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.links.shaping", description=__doc__)
    parser.add_argument("do", choices=("probe", "apply", "change", "clear", "dry-run"))
    options = parser.parse_args(arguments)
    try:
        if options.do == "probe":
            told: Any = asdict(probe())
        else:
            pods = _read(sys.stdin.read())
            if options.do == "dry-run":
                netem = probe().netem
                print("\n".join(line for pod in pods for line in commands(make_plan(pod, netem))))
                return 0
            do: dict[str, Callable[[list[PodLinks]], Applied]] = {"apply": apply, "change": change}
            if options.do == "clear":
                clear(pods)
                told = {}
            else:
                told = asdict(do[options.do](pods))
    except UserError as error:
        print(f"shaping: {error}", file=sys.stderr)
        return PREFIX_TAKEN if isinstance(error, PrefixTaken) else 2
    print(json.dumps(told))
    return 0


def _read(text: str) -> list[PodLinks]:
    try:
        told = json.loads(text)
        return [PodLinks.from_json(pod) for pod in told["pods"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise ShapingError(f'standard input must be {{"pods": [...]}}: {error!r}') from None


if __name__ == "__main__":
    sys.exit(main())
