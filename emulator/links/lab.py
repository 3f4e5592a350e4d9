"""Two network namespaces with a veth pair between them, where links can be made and measured without affecting anything
else on the machine. Needs root.

The namespaces have no names and disappear when the process that holds them ends, however it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg

from agent.protocol.errors import UserError
from emulator.links import netlink
from emulator.links.netlink import Netlink, in_new_namespace

SERVER_ADDRESS, POD_ADDRESS = "10.254.255.1", "10.254.255.2"  # only visible inside the lab
PREFIX = "10.253.0.0/16"
_UP = 1


@dataclass(frozen=True, slots=True)
class LinkLab:
    """Paths of the two namespaces, as `PodLinks` takes them, and the interfaces between them."""

    pod: str
    server: str
    pod_interface: str = "pod"
    server_interface: str = "server"


@contextmanager
def link_lab() -> Iterator[LinkLab]:
    try:
        pod, server = _namespace(), _namespace()
    except PermissionError:
        raise UserError("links are tried in network namespaces of their own, and making those needs root") from None
    try:
        lab = LinkLab(f"/proc/{os.getpid()}/fd/{pod}", f"/proc/{os.getpid()}/fd/{server}")
        with Netlink(lab.pod) as inside, Netlink(lab.server) as outside:
            new = netlink.CREATE | netlink.EXCLUSIVE
            peer = {"attrs": [("IFLA_IFNAME", lab.server_interface), ("IFLA_NET_NS_FD", server)]}
            info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", peer)]})]}
            inside.send([inside.link(0, ("IFLA_IFNAME", lab.pod_interface), ("IFLA_LINKINFO", info), flags=new)])
            for link, name, address in (
                (inside, lab.pod_interface, POD_ADDRESS),
                (outside, lab.server_interface, SERVER_ADDRESS),
            ):
                found = link.interfaces()
                link.send([_address(found[name].index, address)])
                link.send([link.link(found[one].index, change=_UP) for one in (name, "lo")])
            default = (0, 1, 254, 0, ("RTA_GATEWAY", SERVER_ADDRESS))
            inside.send([inside.route(netlink.NEW_ROUTE, new, *default)])
        yield lab
    finally:
        os.close(pod)
        os.close(server)


def _namespace() -> int:
    """A new namespace, as a descriptor that keeps it alive."""
    return in_new_namespace(lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))


def _address(index: int, address: str) -> bytes:
    message = ifaddrmsg()
    message["family"], message["prefixlen"], message["index"] = 2, 30, index
    attributes = [("IFA_LOCAL", address), ("IFA_ADDRESS", address)]
    return netlink.encoded(message, netlink.NEW_ADDRESS, netlink.CREATE | netlink.EXCLUSIVE, attributes)
