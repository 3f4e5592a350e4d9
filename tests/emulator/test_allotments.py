"""Limits of containers, their addresses, and how their streams are read: everything but the engine."""

from __future__ import annotations

import os
import socket
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.errors import UserError
from emulator.containers.allotments import (
    LEAST_US,
    LONGEST_US,
    MESSAGES_SHARE,
    OWN_BYTES,
    OWN_SHARE,
    ROOM,
    allotment,
    quota,
)
from emulator.containers.engine import HEADER, STANDARD_ERROR, Stream
from emulator.containers.subnets import PORTS, asked_subnet, bridges_for, free_subnets, host_routes, split
from testbed.launch.owners import alive, this_process

rates = st.floats(1e8, 1e13)


@given(st.floats(0.01, 4.0))
def test_a_quota_is_its_share_and_never_so_small_that_a_kernel_ignores_it(share: float) -> None:
    made = quota(share)
    assert made.quota_us >= LEAST_US
    assert 1000 <= made.period_us <= LONGEST_US  # limits of kernels
    assert made.share == pytest.approx(share, rel=0.01)


@given(rates, rates, st.integers(0, 2**36))
def test_a_device_gets_the_share_of_a_core_that_matches_its_model(flops: float, core: float, budget: int) -> None:
    exact, modelled = (allotment(flops, budget, core, waits) for waits in (False, True))
    for one in (exact, modelled):
        assert one.memory_bytes == budget + OWN_BYTES
        assert one.capped == (flops > core)
        assert one.arithmetic.share <= 1.0
        assert one.container.share == pytest.approx(one.arithmetic.share + MESSAGES_SHARE, rel=0.01)
    if 0.01 <= flops / core <= 1:
        share = flops / core
        assert exact.arithmetic.share == exact.undivided.share == pytest.approx(share, rel=0.01)
        assert modelled.arithmetic.share == pytest.approx(min(1.0, share * (1 + ROOM)), rel=0.01)
        assert modelled.undivided.share == pytest.approx(share + OWN_SHARE, rel=0.01)


networks = st.builds(
    lambda address, bits: IPv4Network((address, bits), strict=False), st.integers(0, 2**32 - 1), st.integers(8, 32)
)


@given(st.lists(networks, max_size=30))
def test_ranges_that_are_in_use_are_not_taken(used: list[IPv4Network]) -> None:
    found = list(free_subnets(used))
    assert not any(one.overlaps(other) for one in found for other in used)
    assert len(set(found)) == len(found)


def test_a_default_route_takes_no_range() -> None:
    assert list(free_subnets([IPv4Network("0.0.0.0/0")])) == list(free_subnets([]))


def test_if_all_private_ranges_are_taken_a_test_range_is_used() -> None:
    used = [IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]
    assert [str(network) for network in free_subnets(used)] == ["198.18.0.0/16", "198.19.0.0/16"]


def test_a_requested_range_must_be_valid_large_enough_and_free() -> None:
    used = [IPv4Network("0.0.0.0/0"), IPv4Network("10.77.3.0/24")]
    assert asked_subnet("10.78.0.0/28", 13, used) == IPv4Network("10.78.0.0/28")
    with pytest.raises(UserError, match=r"must be an IPv4 range such as 10\.77\.0\.0/16"):
        asked_subnet("10.77.0.0/99", 1, used)
    with pytest.raises(UserError, match="has room for 5 containers and there are 6: give a larger range"):
        asked_subnet("10.78.0.0/29", 6, used)
    with pytest.raises(UserError, match=r"is in use here \(10\.77\.3\.0/24\): take another, for example 10\.201"):
        asked_subnet("10.77.0.0/16", 1, used)


@given(st.integers(1, 20 * PORTS))
def test_no_bridge_gets_more_containers_than_it_has_ports(containers: int) -> None:
    bridges = bridges_for(containers)
    assert -(-containers // bridges) <= PORTS
    parts = split(IPv4Network("10.0.0.0/12"), bridges)
    assert len(parts) == bridges
    assert not any(one.overlaps(other) for one in parts for other in parts if one is not other)


def test_the_routes_of_a_host_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    table = tmp_path / "route"
    table.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert host_routes(table) == [IPv4Network("0.0.0.0/0"), IPv4Network("192.168.1.0/24")]
    assert host_routes(tmp_path / "none") == []


@given(st.lists(st.tuples(st.sampled_from([1, STANDARD_ERROR]), st.binary(max_size=64)), max_size=20), st.data())
def test_output_and_errors_are_separated_wherever_the_stream_is_cut(
    pieces: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    sent = b"".join(HEADER.pack(stream, len(piece)) + piece for stream, piece in pieces)
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    try:
        stream.send_all(b"")
        read, at = b"", 0
        while at < len(sent):
            size = data.draw(st.integers(1, len(sent) - at))
            theirs.sendall(sent[at : at + size])
            at += size
            received = stream.receive()
            assert received is not None
            read += received
        theirs.close()
        assert stream.receive() is None
        assert read == b"".join(piece for kind, piece in pieces if kind != STANDARD_ERROR)
        assert stream.errors == b"".join(piece for kind, piece in pieces if kind == STANDARD_ERROR)
    finally:
        stream.close()
        theirs.close()


def test_a_process_that_has_ended_is_not_alive_and_neither_is_its_successor() -> None:
    owner = this_process()
    assert alive(owner)
    machine, pid, created = owner.rsplit("/", 2)
    assert not alive(f"{machine}/{pid}/{float(created) - 100}")  # another process had this number before
    assert not alive(f"{machine}/{2**22 + 1}/{created}")  # no process has such a number
    assert not alive(f"another-{machine}/{os.getpid()}/{created}")
    assert not alive("")
