"""`cleave links check` for scenarios with containers: the links that a run would have, measured from inside.

Containers start as in a run, but run the probe (`emulator.links.probe`) instead of the pod; they have the same links,
and the probe's server listens where the run's server would. Of one-device containers, only those of the sample start.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from agent.protocol.errors import Failure
from emulator.containers.engine import THREADS, Spec, Stream
from emulator.links.probe import Asked, MeasuredLink, ProbeServer, groups
from emulator.links.shaping import Applied
from emulator.model.fleet import Fleet
from testbed.inspect.link_check import Row, judge, specs_of
from testbed.launch.container_host import ContainerHost
from testbed.launch.kernel_links import End, KernelLinks
from testbed.runs.scenario import Launch

PROBE_S = 180.0  # longest silence


def check_in_containers(asked: Launch, pods: int, fleet: Fleet, sample: Sequence[int]) -> tuple[Applied, list[Row]]:
    labels = [fleet.labels[device] for device in sample]
    if pods == len(fleet):  # one device per container: start only those of the sample
        fleet, sample, pods = fleet.take(sample), range(len(sample)), len(sample)
    specs = specs_of(fleet)
    with ContainerHost(asked, pods) as container_host, ExitStack() as stack:
        links = KernelLinks(container_host)
        stack.callback(links.close)
        host = container_host.server_host()
        listening = socket.socket()
        listening.bind((host, 0))
        listening.listen(1024)
        server = stack.enter_context(ProbeServer(listening))
        address = container_host.server_at(f"tcp://{host}:{server.port}").removeprefix("tcp://")
        with ThreadPoolExecutor(THREADS) as pool:
            started = list(pool.map(lambda pod: _start(container_host, pod, address), range(pods)))
        for _, stream in started:
            stack.callback(stream.close)
        told = links.shape(fleet, [end for end, _ in started])
        wanted: dict[str, tuple[int, Asked]] = {}  # by address: its pod, and what is requested
        for device in sample:
            own = told[device % pods]["addresses"][device // pods]
            wanted[own] = (device % pods, Asked(own, specs[device].rate_down_bps, specs[device].rate_up_bps))
        found = _measured([stream for _, stream in started], wanted)
        applied = Applied(
            len(fleet), 2 * len(fleet), 0, links.netem, links.in_user_space, links.seconds
        )  # read back in the container, which would have reported a difference
    rows = [
        judge(label, specs[device], found[told[device % pods]["addresses"][device // pods]], links.netem)
        for label, device in zip(labels, sample, strict=True)
    ]
    return applied, rows


def _start(container_host: ContainerHost, pod: int, address: str) -> tuple[End, Stream]:
    engine, bridge = container_host.engine, container_host.bridges[pod % len(container_host.bridges)]
    spec = Spec(f"cleave-{engine.run}-{pod}", ["emulator.links.probe", "--server", address], bridge.id)
    container, stream = engine.start(spec, container_host.image)
    engine.do(f"look at {spec.name}", container.reload)
    (network,) = container.attrs["NetworkSettings"]["Networks"].values()
    return End(int(container.attrs["State"]["Pid"]), str(network["IPAddress"])), stream


def _measured(streams: Sequence[Stream], wanted: dict[str, tuple[int, Asked]]) -> dict[str, MeasuredLink]:
    """Containers whose rates fit together measure at the same time; if any has several devices, each measures alone."""
    of_pod: dict[int, list[Asked]] = {}
    for pod, asked in wanted.values():
        of_pod.setdefault(pod, []).append(asked)
    alone = all(len(devices) == 1 for devices in of_pod.values())
    together = (
        [[wanted[one.address][0] for one in group] for group in groups([asked for _, asked in wanted.values()])]
        if alone
        else [[pod] for pod in of_pod]
    )
    found: dict[str, MeasuredLink] = {}
    for pods in together:
        for pod in pods:
            question = json.dumps([asdict(one) for one in of_pod[pod]]).encode()
            streams[pod].send_all(question, last=True)
        for pod in pods:
            answer = streams[pod].receive_all(PROBE_S)
            if not answer:
                raise Failure(f"a container could not measure its links: {streams[pod].errors.decode().strip()}")
            rows: list[dict[str, Any]] = json.loads(answer)
            found |= {row["address"]: MeasuredLink(**row) for row in rows}
    return found
