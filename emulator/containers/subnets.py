"""Address ranges that look free, for the bridges of a run. Pure, except for reading this host's routes."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from agent.protocol.errors import UserError

PORTS = 1000  # per bridge: Linux allows 1,023, a few are reserved
# private ranges first, then those that RFC 2544 reserves for network tests
CANDIDATES = (
    *(f"10.{second}.0.0/16" for second in range(201, 251)),
    *(f"172.{second}.0.0/16" for second in range(24, 32)),
    "198.18.0.0/16",
    "198.19.0.0/16",
)


def free_subnets(used: Iterable[IPv4Network]) -> Iterator[IPv4Network]:
    """Ranges of 65,536 addresses that overlap neither the used ranges nor each other."""
    taken = [network for network in used if network.prefixlen > 0]  # the default route overlaps everything
    for candidate in map(ipaddress.IPv4Network, CANDIDATES):
        if not any(candidate.overlaps(network) for network in taken):
            yield candidate


def asked_subnet(text: str, containers: int, used: Sequence[IPv4Network]) -> IPv4Network:
    """The user's range, if it is valid, large enough and free."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError:
        raise UserError(f'launch.subnet is "{text}"; it must be an IPv4 range such as 10.77.0.0/16') from None
    room = max(0, network.num_addresses - 3)  # without the network, gateway and broadcast addresses
    if room < containers:
        raise UserError(
            f"launch.subnet {network} has room for {room:,} containers and there are {containers:,}: "
            "give a larger range, or leave it out"
        )
    if clash := next((other for other in used if other.prefixlen > 0 and other.overlaps(network)), None):
        instead = next(free_subnets(used), None)
        raise UserError(
            f"launch.subnet {network} is in use here ({clash}): "
            + (f"take another, for example {instead}, or leave it out" if instead else "take another")
        )
    return network


def bridges_for(containers: int) -> int:
    return -(-containers // PORTS)


def split(network: IPv4Network, count: int) -> list[IPv4Network]:
    """The first `count` of 2^n equal parts, the smallest 2^n of at least `count`."""
    return list(network.subnets(prefixlen_diff=(count - 1).bit_length()))[:count]


def host_routes(table: Path = Path("/proc/net/route")) -> list[IPv4Network]:
    """Ranges that this host has routes for; none where the kernel does not list them."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return []
    found = []
    for line in lines:
        _, destination, _, _, _, _, _, mask, *_ = line.split()
        address, bits = (socket.inet_ntoa(struct.pack("=L", int(word, 16))) for word in (destination, mask))
        found.append(ipaddress.IPv4Network(f"{address}/{bits}", strict=False))
    return found
