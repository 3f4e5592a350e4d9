"""Runs on the kernel that has netem, started by test_netem.py: makes links with delay, jitter, loss and rate, and
prints the kernel's settings and the round trips of ping and ZeroMQ, as JSON."""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import time
from dataclasses import asdict, replace
from typing import Any

import zmq

from emulator.links import netlink
from emulator.links.lab import PREFIX, SERVER_ADDRESS, LinkLab, link_lab
from emulator.links.netlink import Netlink, in_namespace
from emulator.links.shaping import apply, change, clear, probe
from emulator.links.shaping_plan import PodLinks, addresses
from emulator.model.link import LinkSpec

TICK_S = 64e-9
PINGS = 7


def read_back(lab: LinkLab) -> dict[str, dict[int, dict[str, float]]]:
    """Settings by direction and class, decoded by pyroute2."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for way, namespace, name in (("up", lab.pod, lab.pod_interface), ("down", lab.server, lab.server_interface)):
        with Netlink(namespace) as link:
            index = link.interfaces()[name].index
            rows = found.setdefault(way, {})
            for message in link.of_interface(netlink.GET_CLASS, index):
                parms = message.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")
                rows[message["handle"] & 0xFFFF] = {"rate_bytes_s": struct.unpack_from("=I", parms, 8)[0]}
            for message in link.of_interface(netlink.GET_QDISC, index):
                if message.get_attr("TCA_KIND") == "netem":
                    told = message.get_attr("TCA_OPTIONS")
                    rows[message["parent"] & 0xFFFF] |= {
                        "delay_s": TICK_S * told["delay"],
                        "jitter_s": TICK_S * told["jitter"],
                        "loss": told["loss"] / (2**32 - 1),
                    }
    return found


def ping_s(lab: LinkLab, address: str) -> list[float]:
    """Round trips of echo requests from a device's address."""
    took = []
    raw = in_namespace(lab.pod, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    with raw:
        raw.bind((address, 0))
        raw.settimeout(10.0)
        for number in range(PINGS):
            identity = os.getpid() & 0xFFFF
            total = 0x0800 + identity + number
            checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
            request = struct.pack("!BBHHH", 8, 0, checksum, identity, number)
            begun = time.monotonic()
            raw.sendto(request, (SERVER_ADDRESS, 0))
            while raw.recv(2048)[20] != 0:  # an echo reply
                pass
            took.append(time.monotonic() - begun)
    return took


def zeromq_s(lab: LinkLab, address: str) -> list[float]:
    """Round trips of small messages on one connection."""

    def listen() -> tuple[zmq.Context[Any], zmq.Socket[bytes], int]:
        context: zmq.Context[Any] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        return context, router, router.bind_to_random_port(f"tcp://{SERVER_ADDRESS}")

    there, router, port = in_namespace(lab.server, listen)

    def connect() -> tuple[zmq.Context[Any], zmq.Socket[bytes]]:
        context: zmq.Context[Any] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{address}:0;{SERVER_ADDRESS}:{port}")
        return context, dealer

    here, dealer = in_namespace(lab.pod, connect)
    took = []
    try:
        for _ in range(PINGS + 1):
            begun = time.monotonic()
            dealer.send(b"are you there?")
            router.send_multipart(router.recv_multipart())
            dealer.recv()
            took.append(time.monotonic() - begun)
    finally:
        here.destroy(linger=0)
        there.destroy(linger=0)
    return took[1:]  # the first includes connecting


def main() -> None:
    plain = LinkSpec(4e6, 1e6, 0.08, 0.06, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    specs = [
        plain,
        replace(plain, delay_down_s=0.12, delay_up_s=0.1, jitter_down_s=0.012, jitter_up_s=0.005),
        replace(plain, loss_down=0.01, loss_up=0.0025, rate_down_bps=2.5e6),
    ]
    told: dict[str, Any] = {"kernel": os.uname().release, "probe": asdict(probe())}
    with link_lab() as lab:
        devices = tuple(zip(addresses(PREFIX, len(specs)), specs, strict=True))
        pod = PodLinks(lab.pod_interface, devices, lab.pod, PREFIX, lab.server)
        told["asked"] = [asdict(spec) for spec in specs]
        told["applied"] = asdict(apply([pod]))
        told["set"] = read_back(lab)
        told["ping_s"] = [statistics.median(ping_s(lab, address)) for address, _ in devices[:2]]
        told["zeromq_s"] = [statistics.median(zeromq_s(lab, address)) for address, _ in devices[:2]]
        slower = replace(plain, delay_down_s=0.16, delay_up_s=0.1)
        change([replace(pod, devices=((devices[0][0], slower),))])
        told["changed_ping_s"] = statistics.median(ping_s(lab, devices[0][0]))
        clear([pod])
        told["left"] = read_back(lab)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
