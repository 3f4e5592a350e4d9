"""Real containers: a Docker engine of its own, an image made without a registry, runs on it, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from docker_engine import CLEAVE, TestEngine, engine, why_not
from places import ROOT

from agent.identity.keys import Curve, Keys
from agent.protocol.errors import UserError
from agent.protocol.profile import Profile, pack_profiles
from emulator.containers.allotments import LEAST_US, MESSAGES_SHARE, OWN_BYTES, allotment
from emulator.containers.engine import IMAGE, RUN_LABEL, DockerEngine, EngineError, Spec
from emulator.containers.subnets import free_subnets, split
from emulator.containers.throttle import container_group, thread_of
from emulator.links.netlink import in_namespace
from emulator.links.shaping import probe
from emulator.model.fleet import Fleet
from ps.access.access_file import AccessFile
from ps.transport.server import Server
from testbed.launch import container_pods
from testbed.launch.container_host import ContainerHost
from testbed.launch.container_pods import ContainerPods
from testbed.launch.kernel_links import End, KernelLinks
from testbed.runs.scenario import Launch

if TYPE_CHECKING:
    from conftest import Until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.root("network namespaces and an engine"),
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first test installs the engine and makes the image
]
DEVICE = """
title = "a device of tests"
kind = "board"
gemm = "24 GFLOPS"
basis = "estimate"
overhead = "200 us"
ram = "1 GB"
ram_basis = "estimate"
budget = "64 MB"
source = "made up"
"""
BUDGET_BYTES = 64_000_000
SCENARIO = """
name = "containers"
seed = 8 # the faults hit four different containers
[model]
name = "opt-tiny"
[data]
batch = 4
sequence = 32
[launch]
kind = "docker"
[links]
kind = "kernel"
[fleet]
devices = DEVICES
pods = PODS
kinds = {"device.toml" = 1}
networks = {uk-ftth = 1}
line_share = 0.2
[training]
steps = STEPS
"""


@pytest.fixture(scope="module")
def docker() -> Iterator[TestEngine]:
    if reason := why_not():
        pytest.skip(reason)
    with engine() as running:
        # not in the engine's namespace, which has no way out: pip fetches the packages
        command = [*CLEAVE, "image", "--base", "debootstrap"]
        made = subprocess.run(command, env=running.environment, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout + made.stderr
        yield running


@pytest.fixture
def at(docker: TestEngine, monkeypatch: pytest.MonkeyPatch) -> TestEngine:
    """The engine, for all of this process; nothing of ours is there before or after."""
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    assert not ours(docker)
    return docker


def ours(docker: TestEngine) -> list[str]:
    """Names of containers and networks that carry our label."""
    label = ("--filter", f"label={RUN_LABEL}", "--format", "{{.Name}}")
    containers = docker.docker("ps", "-a", *label[:2], "--format", "{{.Names}}").split()
    return containers + docker.docker("network", "ls", *label).split()


def scenario(folder: Path, devices: int, pods: int, steps: int, faults: str = "") -> str:
    (folder / "device.toml").write_text(DEVICE)
    file, text = folder / "scenario.toml", SCENARIO + faults
    for word, number in (("DEVICES", devices), ("PODS", pods), ("STEPS", steps)):
        text = text.replace(word, str(number))
    file.write_text(text)
    return str(file)


def summary(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("runs/*/summary.json")
    told: dict[str, Any] = json.loads(file.read_text())
    return told


@contextmanager
def running(at: TestEngine, folder: Path, file: str, until: Until) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run beside the engine, once its devices have joined, and its log. Killed if it does not end before."""
    log = folder / "log"
    with log.open("wb") as said:
        command = [*at.inside, *CLEAVE, "run", file]  # nsenter execs the command
        run = subprocess.Popen(command, env=at.environment, cwd=folder, stdout=said, stderr=said)
    try:
        until(lambda: run.poll() is not None or "devices joined" in log.read_text(), "devices join", 100)
        assert run.poll() is None, log.read_text()
        yield run, log
    finally:
        run.kill()
        run.wait()


FAULTS = """
[[faults]]
at = "0 s"
do = "stop"
seconds = 1
[[faults]]
at = "0 s"
do = "disconnect"
seconds = 1
[[faults]]
at = "0.2 s"
do = "kill"
[[faults]]
at = "0.3 s"
do = "exhaust"
"""


def test_a_run_on_containers_is_exact_whatever_happens_to_them_and_leaves_nothing_behind(
    at: TestEngine, tmp_path: Path, until: Until
) -> None:
    """Containers are paused, unplugged, killed, and killed by the kernel for exceeding their memory, over links that
    the kernel shapes."""
    with running(at, tmp_path, scenario(tmp_path, 6, 6, 3, FAULTS), until) as (run, log):
        found = json.loads(at.docker("inspect", *at.docker("ps", "-q", "--filter", f"label={RUN_LABEL}").split()))
        assert len(found) == 6
        check_limits(found)
        assert run.wait(120) == 0, log.read_text()
    told = summary(tmp_path)
    assert told["loss_max_abs_diff"] < 1e-4
    assert told["flops_done"] == told["flops_reference"]
    assert told["pods"] == told["devices"] == 6
    assert ("held in user space (no netem there)" in told["links"]) == (not probe().netem)
    assert "shaped by the kernel" in told["links"]
    done_to = {fault["do"]: fault["done"] for fault in told["audit"]["faults"]["list"]}
    assert done_to == dict.fromkeys(("stop", "continue", "disconnect", "reconnect", "kill", "exhaust"), 1)
    assert "was killed (exit code 137, out of memory): the run goes on without it" in log.read_text()
    assert told["lost_devices"] >= 2
    assert not ours(at)


def check_limits(found: list[dict[str, Any]]) -> None:
    """One device per container, on its own address, with the limits of its model."""
    addresses = set()
    for container in found:
        limits = container["HostConfig"]
        assert limits["Memory"] == limits["MemorySwap"] == BUDGET_BYTES + OWN_BYTES
        check_quota(int(container["State"]["Pid"]), limits["CpuQuota"] / limits["CpuPeriod"])
        assert not limits["Privileged"]
        (network,) = container["NetworkSettings"]["Networks"].values()
        addresses.add(network["IPAddress"])
    assert len(addresses) == len(found)


def check_quota(pod: int, whole: float) -> None:
    """The computing thread has the share of a core that matches its device (a core's rate is measured, see
    test_allotments); the container has one core more, and its other threads at least that."""
    thread, groups = thread_of(pod), Path("/sys/fs/cgroup")
    assert thread is not None
    inside, second = container_group(Path(f"/proc/{pod}/task/{thread}/cgroup").read_text(), groups)
    around, _ = container_group(Path(f"/proc/{pod}/cgroup").read_text(), groups)
    assert inside.parent == around
    names = ["cpu.max"] if second else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    quota_us, period_us = (int(word) for name in names for word in (inside / name).read_text().split())
    assert quota_us >= LEAST_US
    assert 0.01 < quota_us / period_us <= 1.0
    assert whole == pytest.approx(quota_us / period_us + MESSAGES_SHARE, rel=0.01)
    others = {int(task.name) for task in Path(f"/proc/{pod}/task").iterdir()} - {thread}
    assert others
    for other in others:
        assert container_group(Path(f"/proc/{pod}/task/{other}/cgroup").read_text(), groups)[0] == around


def test_after_kill_9_of_the_testbed_clean_removes_what_is_ours_and_nothing_else(
    at: TestEngine, tmp_path: Path, until: Until
) -> None:
    at.docker("run", "-d", "--name", "not-ours", "--entrypoint", "sleep", IMAGE, "600")
    at.docker("network", "create", "--subnet", "10.201.0.0/16", "not-ours")  # the first range that we would take
    routes = ["ip", "-n", at.namespace, "route"]
    before = subprocess.check_output(routes)
    try:
        with running(at, tmp_path, scenario(tmp_path, 40, 2, 1000), until) as (run, log):
            addresses = connected_to(run, log)
            assert len(addresses) == 40  # every device of the two pods has its own
            assert not any(address.startswith("10.201.") for address in addresses)  # that range is in use
            assert "left alone" in at.cleave("clean").stdout  # the run is still going on
            assert len(ours(at)) == 3
            run.send_signal(signal.SIGKILL)
        cleaned = at.cleave("clean")
        assert (cleaned.returncode, cleaned.stdout) == (0, "removed 2 containers and 1 networks\n")
        assert not ours(at)
        assert subprocess.check_output(routes) == before
        assert at.docker("ps", "--format", "{{.Names}}").split() == ["not-ours"]
        assert at.cleave("clean").stdout == "removed 0 containers and 0 networks\n"
    finally:
        at.docker("rm", "-f", "not-ours")
        at.docker("network", "rm", "not-ours")


def connected_to(run: subprocess.Popen[bytes], log: Path) -> set[str]:
    """Addresses connected to the server of this run, in its own network namespace."""
    match = re.search(r"containers join at tcp://[0-9.]+:(\d+)", log.read_text())
    assert match
    found = set()
    for line in Path(f"/proc/{run.pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == "01" and int(local.partition(":")[2], 16) == int(match[1]):
            found.add(socket.inet_ntoa(struct.pack("=L", int(remote.partition(":")[0], 16))))
    return found


SPIN = """
import json, time
from emulator.containers.throttle import ComputeThread
class Spin:
    name = "spin"
    def product(self, left, right):
        begun, spent = time.monotonic(), time.thread_time()
        while time.monotonic() - begun < 1.0: pass
        return [time.monotonic() - begun, time.thread_time() - spent]
kernel = ComputeThread(Spin())
input()
print(json.dumps(kernel.product(None, None)), flush=True)
"""


@pytest.mark.parametrize(("devices", "pods"), [(3, 3), (40, 2)])
def test_links_are_checked_from_inside_containers_and_nothing_is_left_behind(
    at: TestEngine, tmp_path: Path, devices: int, pods: int
) -> None:
    file = scenario(tmp_path, devices, pods, 1)
    options = ["--set", "fleet.line_share=0.02", "--sample", "3", "--format", "json"]
    done = at.cleave("links", "check", file, *options, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr  # 1: this machine was too busy for its links
    told = json.loads(done.stdout)
    assert told["applied"]["devices"] == devices
    assert len(told["devices"]) == 3
    assert all(row["down_bps"] > 0 and row["up_bps"] > 0 for row in told["devices"])
    assert not ours(at)


def test_the_quota_of_the_computing_thread_really_limits_it_and_ends_with_its_container(at: TestEngine) -> None:
    limits = allotment(20e9, 1 << 30, 80e9, modelled=False)
    whole, quota = limits.container, limits.arithmetic
    made = DockerEngine("quota", "")
    try:
        command = ["timeit", "-n", "1", "-r", "1", f"exec({SPIN!r})"]
        spec = Spec("cleave-quota", command, "none", whole.quota_us, whole.period_us, limits.memory_bytes)
        container, stream = made.start(spec, IMAGE)
        container.reload()
        pod = {"process": container.attrs["State"]["Pid"], "quota_us": quota.quota_us, "period_us": quota.period_us}
        group, _ = container_group(Path(f"/proc/{pod['process']}/cgroup").read_text(), Path("/sys/fs/cgroup"))
        question = json.dumps({"pods": [pod]}).encode()
        asked = Spec("cleave-quotas", ["emulator.containers.throttle"], sets_quotas=True)
        assert made.ask(asked, IMAGE, question)[0] == 0
        stream.send_all(b"go\n")
        assert container.wait()["StatusCode"] == 0
        stream.close()
        wall_s, spent_s = json.loads(container.logs().splitlines()[0])
        assert spent_s / wall_s < 1.2 * quota.share  # at any load of this machine; a last period may overrun
        gone = made.ask(asked, IMAGE, question)
        assert gone[0] == 2
        assert gone[2] == "throttle: the processes of containers cannot be seen from here\n"
    finally:
        made.remove_containers("quota")
        made.close()
    assert not group.exists()


def test_if_the_computing_thread_cannot_be_limited_the_container_is_and_the_run_says_why(
    at: TestEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an engine that does not expose its control groups."""
    monkeypatch.setattr(container_pods, "Spec", lambda *of, sets_quotas=False, **more: Spec(*of, **more))

    def act() -> None:
        with ContainerHost(Launch(kind="docker"), 1) as container_host:
            keys = Keys.new()
            server = Server(unlisted=[f"tcp://{container_host.server_host()}:0"], access=AccessFile(tmp_path)).start()
            server.trust(keys.public, "a test", 2)
            curve = Curve(server.public_key, keys)
            try:
                profile = Profile(4e9, 1e-4, 1e9, 1e9, 0.0, 1 << 26, 2)
                fleet = Fleet(pack_profiles([profile]), ["test"], ["none"], {"estimate": 1})
                address = server.unlisted_addresses[0]
                with ContainerPods(container_host, fleet, 1, address, "model", (), 1.0, curve) as pods:
                    pods.start()
                    assert server.wait_for_devices(1, 60.0)
                    assert "messages within them (the processes of containers" in pods.limits_told()
                    (name,) = at.docker("ps", "-q", "--filter", f"label={RUN_LABEL}").split()
                    (found,) = json.loads(at.docker("inspect", name))
                    assert pods.allotments is not None
                    assert found["HostConfig"]["CpuQuota"] == pods.allotments[0].undivided.quota_us
            finally:
                server.stop()

    in_namespace(at.namespace, act)
    assert not ours(at)


def test_without_permission_for_the_engine_the_error_says_how_to_get_it(at: TestEngine) -> None:
    code = """
import os, docker, requests
from emulator.containers.engine import DockerEngine
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try: DockerEngine()
except Exception as error: print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=at.environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("UserError you may not use the Docker engine at unix://")
    assert "join the group docker" in said


def test_for_a_missing_or_outdated_image_the_error_says_make_image(at: TestEngine) -> None:
    with pytest.raises(UserError, match='has no image "no-such": make it with `make image`'):
        ContainerHost(Launch(kind="docker", image="no-such"), 1)
    changed = at.docker("create", IMAGE).strip()
    at.docker("commit", "--change", "LABEL cleave.sources=other", changed, "old")
    at.docker("rm", changed)
    with pytest.raises(UserError, match="was made from other sources: `make image` makes it anew"):
        ContainerHost(Launch(kind="docker", image="old"), 1)
    assert not ours(at)


def test_a_range_that_is_too_small_or_taken_is_refused_and_nothing_is_left_behind(at: TestEngine) -> None:
    with pytest.raises(UserError, match="has room for 5 containers and there are 6"):
        ContainerHost(Launch(kind="docker", subnet="10.99.0.0/29"), 6)
    with ContainerHost(Launch(kind="docker", subnet="10.99.0.0/24"), 6) as first:
        assert [str(bridge.subnet) for bridge in first.bridges] == ["10.99.0.0/24"]
        with pytest.raises(UserError, match="is in use here"):
            ContainerHost(Launch(kind="docker", subnet="10.99.0.0/16"), 6)
        with ContainerHost(Launch(kind="docker"), 2500) as second:  # more than a bridge has ports
            assert len({bridge.subnet for bridge in second.bridges}) == 3
            assert len(ours(at)) == 4
    assert not ours(at)


def test_a_full_bridge_is_reported_and_nothing_is_left_behind(at: TestEngine) -> None:
    """Filled with other interfaces up to the kernel's limit."""
    ip, most = [*at.inside, "ip"], 1100
    ports = "".join(f"link add full{number} group 77 master BRIDGE type veth\n" for number in range(most))
    try:
        with ContainerHost(Launch(kind="docker"), 2) as container_host:
            bridge, image = container_host.bridges[0], container_host.image
            batch = ports.replace("BRIDGE", f"br-{bridge.id[:12]}")
            refused = subprocess.run([*ip, "-batch", "-"], input=batch, capture_output=True, text=True, check=False)
            assert "Exchange full" in refused.stderr
            says = r"^a bridge is full \(.*\): take fewer containers, set fleet.pods$"
            with pytest.raises(EngineError, match=says) as said:
                container_host.engine.start(Spec("cleave-full", ["emulator.pods.pod", "--help"], bridge.id), image)
            assert "\n" not in str(said.value)
    finally:
        subprocess.run([*ip, "link", "del", "group", "77"], check=True)
    assert not ours(at)


def test_addresses_in_use_on_the_engines_machine_are_avoided(at: TestEngine) -> None:
    """A range in use that cannot be seen from here, as on another machine: the kernel refuses it. And a range that is
    too small for all pods together: each pod gets its own."""
    with ContainerHost(Launch(kind="docker"), 2) as container_host, idle(container_host, 2) as ends:
        first, second, third, *_ = free_subnets(container_host.engine.used_ranges())
        theirs = str(split(first, 2)[1])
        subprocess.run([*at.inside, "ip", "route", "add", "blackhole", theirs], check=True)
        try:
            told = KernelLinks(container_host).shape(uniform(6), ends)
        finally:
            subprocess.run([*at.inside, "ip", "route", "del", "blackhole", theirs], check=True)
        ranges = split(second, 2)
        assert [IPv4Address(pod["addresses"][0]) in ranges[i] for i, pod in enumerate(told)] == [True, True]
        routes = subprocess.run([*at.inside, "ip", "route"], capture_output=True, text=True, check=True).stdout
        assert str(ranges[0]) in routes
        assert str(split(first, 2)[0]) not in routes  # changes for the first range are undone
        assert third
    assert not ours(at)


def test_more_devices_than_a_kernel_has_classes_are_refused_and_nothing_is_left_behind(at: TestEngine) -> None:
    with ContainerHost(Launch(kind="docker"), 1) as container_host, idle(container_host, 1) as ends:
        says = r"has room for 65,533 devices, 65,534 are asked for; take more pods \(fleet.pods\), or use links.kind"
        with pytest.raises(UserError, match=says):
            KernelLinks(container_host).shape(uniform(65_534), ends)
    assert not ours(at)


def uniform(devices: int) -> Fleet:
    profiles = pack_profiles([Profile(4e9, 1e-4, 1e7, 1e6, 0.0, 1 << 26, 2)]).repeat(devices)
    return Fleet(profiles, ["test"] * devices, ["none"] * devices, {"estimate": devices})


@contextmanager
def idle(container_host: ContainerHost, count: int) -> Iterator[list[End]]:
    """Containers on the bridge, until they are told to end."""
    wait = ["timeit", "-n", "1", "-r", "1", "input()"]
    streams, ends = [], []
    try:
        for number in range(count):
            spec = Spec(f"cleave-{container_host.engine.run}-{number}", wait, container_host.bridges[0].id)
            container, stream = container_host.engine.start(spec, container_host.image)
            streams.append(stream)
            pod = container_pods.PodContainer(container_host.engine, container, stream, container_host.bridges[0])
            ends.append(End(pod.engine_pid, pod.address))
        yield ends
    finally:
        for stream in streams:
            stream.close()


def test_a_server_that_containers_cannot_reach_is_reported_before_they_are_started(at: TestEngine) -> None:
    with (
        ContainerHost(
            Launch(kind="docker"), 2
        ) as elsewhere,  # outside the engine's namespace, as outside its virtual machine
        pytest.raises(UserError, match=r"is not one of this machine: .* set launch.server_address"),
    ):
        elsewhere.server_host()
    with ContainerHost(Launch(kind="docker", server_address="127.0.0.1"), 2) as container_host:
        assert container_host.server_host() == "0.0.0.0"
        address = container_host.server_at("tcp://0.0.0.0:9")
        with pytest.raises(UserError, match=r"do not reach the server at tcp://127.0.0.1:9 .*launch.server_address"):
            container_host.look_inside(address)
    assert not ours(at)


def test_an_engine_on_another_machine_is_used_over_the_network_and_needs_the_servers_address(
    at: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forwarded(at) as port:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
        with pytest.raises(UserError, match=r"is not on this machine: set launch.server_address"):
            ContainerHost(Launch(kind="docker"), 1)
        with ContainerHost(Launch(kind="docker", server_address="127.0.0.1"), 1) as container_host:
            with pytest.raises(UserError, match="containers do not reach the server"):
                container_host.look_inside("tcp://127.0.0.1:9")
            found = container_host.look_inside(
                f"tcp://{container_host.bridges[0].gateway}:{listening(at, container_host)}"
            )
            assert found.core_flops > 0
            assert abs(found.clock_offset_ns) < 1e9  # it is really this machine
    assert not ours(at)


def listening(at: TestEngine, container_host: ContainerHost) -> int:
    """The port of a listener beside the engine, in a container with the engine's own network."""
    code = "import socket; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    spec = Spec("cleave-listener", ["timeit", "-n", "1", "-r", "1", code], "host")
    container, stream = container_host.engine.start(spec, container_host.image)
    for line in container.logs(stream=True):
        stream.close()
        return int(line)
    raise AssertionError(container.logs())


@contextmanager
def forwarded(at: TestEngine) -> Iterator[int]:
    """A port of this machine that leads to the engine's socket."""
    path = str(at.folder / "docker.sock")
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def copy(one: socket.socket, two: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                two.sendall(data)
        with contextlib.suppress(OSError):
            two.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(path)
                ends.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threads.append(threading.Thread(target=copy, args=pair))
                    threads[-1].start()

    threads.append(threading.Thread(target=serve))
    threads[0].start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for end in (listener, *ends):
            end.close()
