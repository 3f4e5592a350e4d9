"""Promises of emulator.links.shaping, checked on a real kernel: in network namespaces that end with the test.
`test_netem.py` has the parts that need netem, on a kernel that has it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from places import ROOT
from processes import LIMIT_S, Multiplication, grid

from agent.identity.keys import Keys
from emulator.links import netlink
from emulator.links.lab import POD_ADDRESS, PREFIX, SERVER_ADDRESS, LinkLab, link_lab
from emulator.links.netlink import Netlink, in_namespace
from emulator.links.probe import Asked, ProbeServer, measure
from emulator.links.shaping import KernelSupport, PrefixTaken, ShapingError, apply, change, clear, probe
from emulator.links.shaping_plan import CONGESTION_CONTROLS, PodLinks, addresses, class_rate
from emulator.model.link import LinkSpec
from ps.access.access_file import AccessFile
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Start, Until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="kernel links are Linux's"),
    pytest.mark.root("network namespaces"),
]
PLAIN = LinkSpec(20e6, 1e6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ATTEMPTS = 3
GOOD = KernelSupport(allowed=True, htb=True, bpf=True, netem=False)


@pytest.fixture
def lab(nothing_left_behind: None) -> Iterator[LinkLab]:
    with link_lab() as made:
        yield made


def pod_links(lab: LinkLab, *specs: LinkSpec) -> PodLinks:
    devices = tuple(zip(addresses(PREFIX, len(specs)), specs, strict=True))
    return PodLinks(lab.pod_interface, devices, lab.pod, PREFIX, lab.server)


def state(lab: LinkLab) -> list[object]:
    """Everything that shaping may change."""
    found: list[object] = []
    for namespace in (lab.pod, lab.server):
        with Netlink(namespace) as link:
            interfaces = link.interfaces()
            found.append(interfaces)
            for one in interfaces.values():
                of_it = link.of_interface(netlink.GET_QDISC, one.index)
                found.append([(m.get_attr("TCA_KIND"), m["handle"], m["parent"]) for m in of_it])
        found.append(in_namespace(namespace, Path("/proc/thread-self/net/fib_trie").read_text))
        keys = ("tcp_limit_output_bytes", "tcp_rto_min_us", "tcp_congestion_control")
        found += [netlink.setting(namespace, f"net/ipv4/{key}") for key in keys]
    return found


def rates(lab: LinkLab) -> dict[str, list[int]]:
    """Rates of all classes, up and down, in bytes per second, read from the kernel."""
    found = {}
    for way, namespace, name in (("up", lab.pod, lab.pod_interface), ("down", lab.server, lab.server_interface)):
        with Netlink(namespace) as link:
            classes = link.of_interface(netlink.GET_CLASS, link.interfaces()[name].index)
            parms = [m.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS") for m in classes]
            found[way] = [int.from_bytes(parm[8:12], sys.byteorder) for parm in parms]
    return found


# ---- setting up


def test_two_thousand_devices_have_one_class_each_per_direction_and_leave_nothing_behind(lab: LinkLab) -> None:
    before = state(lab)
    specs = [replace(PLAIN, rate_up_bps=1e6 + 1000 * i, rate_down_bps=20e6 - 1000 * i) for i in range(2000)]
    pod = pod_links(lab, *specs)
    applied = apply([pod], GOOD)
    assert (applied.devices, applied.classes) == (2000, 4000)
    found = rates(lab)
    assert sorted(found["up"]) == sorted(class_rate(spec.rate_up_bps) for spec in specs)
    assert sorted(found["down"]) == sorted(class_rate(spec.rate_down_bps) for spec in specs)
    clear([pod])
    assert state(lab) == before
    clear([pod])  # clearing twice is no error


def test_rates_of_the_named_links_change_while_links_are_in_use(lab: LinkLab) -> None:
    pod = pod_links(lab, PLAIN, PLAIN, PLAIN)
    apply([pod], GOOD)
    slower = replace(PLAIN, rate_up_bps=5e5, rate_down_bps=2e6)
    changed = change([replace(pod, devices=((pod.devices[1][0], slower),))], GOOD)
    assert changed.classes == 2
    assert sorted(rates(lab)["up"]) == sorted(class_rate(bps) for bps in (1e6, 5e5, 1e6))
    assert sorted(rates(lab)["down"]) == sorted(class_rate(bps) for bps in (20e6, 2e6, 20e6))
    with pytest.raises(ShapingError, match="have no link yet"):
        change([replace(pod, devices=(("10.253.9.9", slower),))], GOOD)


def test_a_device_with_the_interfaces_own_address_needs_no_prefix(lab: LinkLab) -> None:
    before = state(lab)
    pod = PodLinks(lab.pod_interface, ((POD_ADDRESS, PLAIN),), lab.pod, None, lab.server)
    assert apply([pod], GOOD).classes == 2
    clear([pod])
    assert state(lab) == before


@pytest.mark.alone
def test_rates_follow_a_trace_and_end_with_the_input(lab: LinkLab, until: Until) -> None:
    """Half a second of 20 packets, half a second of 60, on a line with twice the trace's mean; the other line stays."""
    pod = pod_links(lab, replace(PLAIN, rate_down_bps=1.92e6, rate_up_bps=1.92e6), PLAIN)
    apply([pod], GOOD)
    milliseconds = [*range(13, 501, 25), *(500 + 25 * i // 3 for i in range(1, 61))]
    trace = {"down_ms": milliseconds, "up_ms": milliseconds}
    told = {"pods": [pod.to_json()], "traces": [trace], "following": {pod.devices[0][0]: [0, 0.0]}}
    command = [sys.executable, "-m", "emulator.links.follow"]
    slow, fast = class_rate(2 * 480e3), class_rate(2 * 1.44e6)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        for expected in (slow, fast, slow):
            until(lambda: expected in rates(lab)["up"] and expected in rates(lab)["down"], f"the rate is {expected}")  # noqa: B023
            assert class_rate(PLAIN.rate_up_bps) in rates(lab)["up"]
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


# ---- what links carry


def listening() -> socket.socket:
    made = socket.socket()
    made.bind((SERVER_ADDRESS, 0))
    made.listen(64)
    return made


@pytest.mark.alone
def test_rates_in_both_directions_are_as_requested_from_two_to_one_to_twenty_to_one(lab: LinkLab) -> None:
    """Eight of 200 links at a time, up and down at once. The share of a downlink that acknowledgements of uploads take
    is within the 5%. No attempt may be too fast; a host that takes the processor away makes a link look slower than it
    is, so each link has to reach its rate in one of the attempts."""
    up_bps = 400e3
    specs = [replace(PLAIN, rate_up_bps=up_bps, rate_down_bps=up_bps * (2, 5, 10, 20)[i % 4]) for i in range(200)]
    pod = pod_links(lab, *specs)
    apply([pod], GOOD)
    asked = [Asked(address, spec.rate_down_bps, spec.rate_up_bps) for address, spec in pod.devices[:8]]
    best = [(0.0, 0.0)] * len(asked)
    for _ in range(ATTEMPTS):
        with ProbeServer(in_namespace(lab.server, listening)) as server:
            found = measure((SERVER_ADDRESS, server.port), asked, lambda: in_namespace(lab.pod, socket.socket))
        for one, got in zip(asked, found, strict=True):
            assert got.down_bps <= 1.05 * one.down_bps
            assert got.up_bps <= 1.05 * one.up_bps
        best = [(max(down, got.down_bps), max(up, got.up_bps)) for (down, up), got in zip(best, found, strict=True)]
        if all(
            down >= 0.95 * one.down_bps and up >= 0.95 * one.up_bps for one, (down, up) in zip(asked, best, strict=True)
        ):
            return
    pytest.fail(f"below 95% of what was asked in {ATTEMPTS} attempts: {list(zip(asked, best, strict=True))}")


@pytest.mark.parametrize("own_address", [False, True])
def test_tcp_slows_down_at_a_full_queue_whatever_the_hosts_congestion_control(lab: LinkLab, own_address: bool) -> None:
    pod = pod_links(lab, PLAIN)
    if own_address:
        pod = PodLinks(lab.pod_interface, ((POD_ADDRESS, PLAIN),), lab.pod, None, lab.server)
    before = state(lab)
    apply([pod], GOOD)
    with in_namespace(lab.server, listening) as server, in_namespace(lab.pod, socket.socket) as device:
        device.bind((pod.devices[0][0], 0))
        device.connect(server.getsockname())
        with server.accept()[0] as connection:
            used = [
                end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
                for end in (connection, device)
            ]
    assert used[0] == "cubic"
    assert used[1] in CONGESTION_CONTROLS
    clear([pod])
    assert state(lab) == before


@pytest.mark.slow
def test_a_pods_devices_compute_over_their_links_and_no_faster_than_these(
    lab: LinkLab, start: Start, tmp_path: Path
) -> None:
    specs = [replace(PLAIN, rate_down_bps=2e6 * (1 + i), rate_up_bps=1e6) for i in range(4)]
    pod = pod_links(lab, *specs)
    apply([pod], GOOD)
    keys, access = Keys.new(), AccessFile(tmp_path)
    pods_at = f"tcp://{SERVER_ADDRESS}:0"
    server = in_namespace(lab.server, lambda: Server(unlisted=[pods_at], access=access)).start()
    server.trust(keys.public, "the pod", len(specs))
    try:
        told = {
            "profiles": [[50e9, 1e-4, spec.rate_down_bps, spec.rate_up_bps, 0.0, 2**30, 4] for spec in specs],
            "labels": [f"emulated-{i}" for i in range(4)],
            "addresses": [address for address, _ in pod.devices],
            "latency_in_pod": False,
            "curve": {"server": server.public_key, "secret": keys.secret},
        }
        inside = (
            f"from emulator.links import netlink; from emulator.pods import pod; netlink.enter({lab.pod!r}); pod.main()"
        )
        started = start("-c", inside, "--ps", server.unlisted_addresses[0], "--links", "kernel", stdin=json.dumps(told))
        assert server.wait_for_devices(4, LIMIT_S), started.output
        Multiplication(server, (1, 256, 256, 256), grid(256, 256, 64, [0, 1, 2, 3])).check()
        columns = server.records.columns()
    finally:
        server.stop()
    for number, spec in enumerate(specs):
        mine = columns["device"] == server.labels.index(f"emulated-{number}")  # connections arrive in any order
        took_s = columns["due_s"][mine].min() - columns["sent_s"][mine].min()
        down_bits = 8 * 2 * 64 * 256 * 4  # its first block has two slabs
        assert took_s > 0.9 * down_bits / spec.rate_down_bps


# ---- refusals


def test_every_failure_says_why_and_leaves_nothing_behind(lab: LinkLab) -> None:
    before = state(lab)
    pod = pod_links(lab, PLAIN, PLAIN)
    for broken, says in (
        (replace(pod, interface="eth7"), "there is no interface eth7"),
        (replace(pod, server_interface="veth9"), "there is no interface veth9"),
        (replace(pod, namespace=2**22 + 1), "there is no process"),
        (replace(pod, namespace="not-created"), "there is no network namespace not-created"),
        (replace(pod, gateway="192.0.2.1"), "not next to the server's side"),
        (replace(pod, server_namespace=lab.pod), "the other end of pod is not in the server's namespace"),
    ):
        with pytest.raises(ShapingError, match=says) as caught:
            apply([broken], GOOD)
        assert "\n" not in str(caught.value)
        assert state(lab) == before


def test_an_interface_shaped_by_another_program_is_left_alone_and_the_other_end_and_routes_are_undone(
    lab: LinkLab,
) -> None:
    with Netlink(lab.server) as link:
        index = link.interfaces()[lab.server_interface].index
        new = netlink.CREATE | netlink.EXCLUSIVE
        theirs = (("TCA_KIND", "bfifo"), ("TCA_OPTIONS", {"limit": 100_000}))
        link.send([link.traffic(netlink.NEW_QDISC, new, index, 0x70000, 0xFFFFFFFF, *theirs)])
    before = state(lab)
    with pytest.raises(ShapingError, match="not made by this run"):
        apply([pod_links(lab, PLAIN)], GOOD)
    assert state(lab) == before


def test_another_programs_route_to_a_device_stays(lab: LinkLab) -> None:
    with Netlink(lab.server) as link:
        theirs = (("RTA_DST", POD_ADDRESS), ("RTA_OIF", link.interfaces()[lab.server_interface].index))
        link.send([link.route(netlink.NEW_ROUTE, netlink.CREATE | netlink.EXCLUSIVE, 32, 1, 254, 253, *theirs)])
    before = state(lab)
    with pytest.raises(ShapingError, match=f"a route to {POD_ADDRESS} already"):
        apply([PodLinks(lab.pod_interface, ((POD_ADDRESS, PLAIN),), lab.pod, None, lab.server)], GOOD)
    assert state(lab) == before


def test_a_prefix_in_use_has_its_own_error_so_that_another_can_be_chosen(lab: LinkLab) -> None:
    with Netlink(lab.server) as link:
        to = ("RTA_DST", PREFIX.partition("/")[0])
        new = netlink.CREATE | netlink.EXCLUSIVE
        link.send([link.route(netlink.NEW_ROUTE, new, 16, 1, 254, 0, to, ("RTA_GATEWAY", POD_ADDRESS))])
    before = state(lab)
    with pytest.raises(PrefixTaken, match="choose another prefix"):
        apply([pod_links(lab, PLAIN)], GOOD)
    assert state(lab) == before


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (KernelSupport(False, False, False, False), "root, or the capabilities NET_ADMIN"),
        (KernelSupport(True, False, False, True), "no queueing discipline htb"),
        (KernelSupport(True, True, False, True), "no classifier bpf"),
    ],
)
def test_a_kernel_without_support_is_reported_with_an_alternative(
    lab: LinkLab, kernel: KernelSupport, says: str
) -> None:
    before = state(lab)
    with pytest.raises(ShapingError, match=says) as caught:
        apply([pod_links(lab, PLAIN)], kernel)
    assert 'links.kind = "model"' in str(caught.value)
    assert state(lab) == before


# ---- as a program


UNPRIVILEGED = (
    "import os, sys; from emulator.links import shaping; os.setgid(65534); os.setuid(65534); sys.exit(shaping.main())"
)


def program(do: str, told: str = "", unprivileged: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", UNPRIVILEGED) if unprivileged else ("-m", "emulator.links.shaping")), do]
    return subprocess.run(command, input=told, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S)


def test_the_program_applies_changes_and_clears_links_read_from_its_input(lab: LinkLab) -> None:
    before = state(lab)
    told = json.dumps({"pods": [pod_links(lab, PLAIN, PLAIN).to_json()]})
    applied = json.loads(program("apply", told).stdout)
    assert (applied["devices"], applied["classes"]) == (2, 4)
    assert applied["netem"] == probe().netem
    assert json.loads(program("change", told).stdout)["classes"] == 4
    assert program("clear", told).returncode == 0
    assert state(lab) == before
    assert "htb default 0" in program("dry-run", told).stdout
    assert state(lab) == before


@pytest.mark.parametrize("told", ["", "[]", '{"pods": 3}', '{"pods": [{}]}'])
def test_the_program_refuses_what_it_cannot_read(told: str) -> None:
    done = program("apply", told)
    assert done.returncode == 2
    assert done.stderr.startswith("shaping: ")
    assert len(done.stderr.splitlines()) == 1


def test_without_privileges_the_program_says_which_are_missing(lab: LinkLab) -> None:
    before = state(lab)
    told = json.dumps({"pods": [pod_links(lab, PLAIN).to_json()]})
    done = program("apply", told, unprivileged=True)
    assert done.returncode == 2
    assert "NET_ADMIN" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert json.loads(program("probe", unprivileged=True).stdout)["allowed"] is False
    assert state(lab) == before
