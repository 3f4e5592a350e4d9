"""Cost of encryption: bytes per second through the server's own socket, and a training step of a fleet behind links.

Both ends share this machine's cores, so each byte is encrypted and decrypted here; a real server does only one of the
two. Passes alternate between plain and encrypted, and the best pass counts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq

from agent.identity.keys import Curve, Keys
from ps.access.access_file import AccessFile
from ps.access.listening import bind, new_router
from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model, model_config
from ps.graph.text import batches, read_text
from ps.graph.trainer import train
from ps.transport.server import Server
from testbed.launch.processes import Pods
from testbed.runs.fleets import make_fleet
from testbed.runs.scenario import load_scenario

FRAME = 1 << 20
FRAMES = 512  # per pass
LIMIT_S = 60.0
SHAPES = ((1, 1), (2, 2), (2, 4))  # I/O threads of the server, connections
FLEET = {"fleet.devices": "200", "fleet.line_share": "0.05"}
GO, UP, DONE = b"go", b"up", b"done"


def measure(repeats: int = 3, steps: int = 3) -> dict[str, Any]:
    told: dict[str, Any] = {"throughput": throughput(repeats)}
    for kind in ("plain", "encrypted"):
        shapes = [figures for name, figures in told["throughput"].items() if name.startswith(kind)]
        told[kind] = {way: max(figures[way] for figures in shapes) for way in ("down", "up")}
        told[kind]["cpu_s_per_gb"] = min(figures["cpu_s_per_gb"] for figures in shapes)
    return told | {"step": step(steps)}


# ---- bytes per second


def throughput(repeats: int) -> dict[str, dict[str, float]]:
    """GB/s down and up, and CPU seconds per GB, both ends together."""
    found: dict[str, dict[str, float]] = {}
    for io_threads, connections in SHAPES:
        with contextlib.ExitStack() as stack:
            lines = {
                kind: stack.enter_context(_lines(kind == "encrypted", io_threads, connections))
                for kind in ("plain", "encrypted")
            }
            for _ in range(repeats):
                for kind, line in lines.items():
                    name = f"{kind}, {io_threads} I/O threads, {connections} connections"
                    best = found.setdefault(name, {"down": 0.0, "up": 0.0, "cpu_s_per_gb": float("inf")})
                    before_s = line.processor_s()
                    for way, rate in (("down", line.down()), ("up", line.up())):
                        best[way] = max(best[way], rate)
                    used_s = line.processor_s() - before_s
                    best["cpu_s_per_gb"] = min(best["cpu_s_per_gb"], used_s / (2 * FRAMES * FRAME / 1e9))
    return found


class _Lines:
    """The server's ROUTER, and processes at the other ends of its connections."""

    def __init__(self, router: zmq.Socket[bytes], pids: list[int]) -> None:
        self._router = router
        self._processes = [psutil.Process(pid) for pid in (os.getpid(), *pids)]
        self._ids: list[bytes] = []
        self._payload = memoryview(os.urandom(FRAME))
        while len(self._ids) < len(pids):
            self._ids.append(self._receive()[0])

    def _receive(self) -> list[bytes]:
        deadline = time.monotonic() + LIMIT_S
        while not self._router.poll(1):
            if time.monotonic() > deadline:
                raise RuntimeError("no process is at the other end")
        return self._router.recv_multipart()

    def processor_s(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes))

    def down(self) -> float:
        begun, left = time.perf_counter(), {identity: FRAMES // len(self._ids) for identity in self._ids}
        while left:
            sent = False
            for identity in list(left):
                try:
                    self._router.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
                except zmq.Again:
                    continue
                self._router.send(self._payload, copy=False)
                sent = True
                left[identity] -= 1
                if not left[identity]:
                    del left[identity]
            if not sent:
                time.sleep(0.0002)
        for identity in self._ids:
            self._router.send_multipart([identity, GO])
        for _ in self._ids:
            self._receive()
        return FRAMES * FRAME / (time.perf_counter() - begun) / 1e9

    def up(self) -> float:
        begun, each = time.perf_counter(), FRAMES // len(self._ids)
        for identity in self._ids:
            self._router.send_multipart([identity, UP, str(each).encode()])
        got = 0
        while got < each * len(self._ids):
            got += len(self._receive()[-1]) == FRAME
        return FRAMES * FRAME / (time.perf_counter() - begun) / 1e9


@contextmanager
def _lines(encrypted: bool, io_threads: int, connections: int) -> Iterator[_Lines]:
    context, router = new_router(io_threads)
    router.setsockopt(zmq.MAXMSGSIZE, 2 * FRAME)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        keys = Keys.new() if encrypted else None
        if keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)  # without a ZAP domain: any key may come
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        where = bind(router, "tcp://127.0.0.1:0")
        command = [sys.executable, "-m", "testbed.bench.encryption", where, keys.public if keys is not None else ""]
        processes += [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(connections)]
        yield _Lines(router, [process.pid for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        context.destroy(linger=0)


def _other_end(endpoint: str, server_key: str) -> None:
    """One connection: receives, confirms and sends as told."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = context.socket(zmq.DEALER)
    if server_key:
        Curve(server_key, Keys.new()).apply(line)
    line.connect(endpoint)
    line.send(DONE)
    payload = memoryview(os.urandom(FRAME))
    while True:
        frames = line.recv_multipart(copy=False)
        match bytes(frames[0].buffer[:4]):
            case word if word == GO and len(frames[0]) == len(GO):
                line.send(DONE)
            case word if word == UP and len(frames) == 2:
                for _ in range(int(bytes(frames[1].buffer))):
                    line.send(payload, copy=False)


# ---- a step of a fleet behind its links


def step(steps: int) -> dict[str, Any]:
    """The quickstart's model and fleet, smaller: seconds per step over plain and encrypted connections, in turn."""
    asked = load_scenario("quickstart", FLEET)
    fleet, cores = make_fleet(asked.fleet, asked.links, asked.seed), os.cpu_count() or 1
    data = batches(read_text("stdlib"), steps + 1, asked.data.batch, asked.data.sequence, seed=0)
    torch.set_num_threads(max(1, cores // 2))
    seconds: dict[str, list[float]] = {"plain": [], "encrypted": []}
    losses: dict[str, list[float]] = {"plain": [], "encrypted": []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        calls = {}
        for kind in seconds:
            keys = Keys.new() if kind == "encrypted" else None
            listen = ["tcp://127.0.0.1:0"] if keys else []
            server = Server(run="bench", listen=listen, access=AccessFile(folder) if keys else None)
            server.notice = lambda text: None
            if keys:
                server.trust(keys.public, "pod", devices=len(fleet))
            address = server.public_addresses[0] if keys else server.address
            server.start()
            stack.callback(server.stop)
            curve = Curve(server.public_key, keys) if keys else None
            stack.enter_context(
                Pods(fleet, cores, address, "model", curve=curve, pod_pass=None if curve else server.pod_pass)
            )
            stack.callback(server.stop)
            if not server.wait_for_devices(len(fleet), LIMIT_S):
                raise RuntimeError(f"only {server.devices} of {len(fleet)} devices joined")
            torch.manual_seed(0)
            model = build_model(model_config(asked.model.name))
            executor = Executor(server)
            forward = distribute(model, executor.run)
            executor.rehearse(partial(_backward, forward, data[0]))
            model.zero_grad()
            calls[kind] = model, forward
        for at in range(steps + 1):
            for kind, (model, forward) in calls.items():
                (done,) = train(model, forward, data[at : at + 1], seed=0, learning_rate=1e-3, weight_decay=0.01)
                losses[kind].append(done.loss)
                if at:  # the first step makes the plans
                    seconds[kind].append(done.seconds)
    best = {kind: min(values) for kind, values in seconds.items()}
    return {
        "devices": len(fleet),
        "plain_s": best["plain"],
        "encrypted_s": best["encrypted"],
        "differs": best["encrypted"] / best["plain"] - 1,
        "all_s": seconds,
        "loss_max_abs_diff": max(abs(a - b) for a, b in zip(losses["plain"], losses["encrypted"], strict=True)),
    }


def _backward(call: Any, tokens: torch.Tensor) -> None:
    call(input_ids=tokens, labels=tokens).loss.backward()


if __name__ == "__main__":
    _other_end(*sys.argv[1:3])
