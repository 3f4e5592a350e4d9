"""Memory per emulated device, and how late its answers are at a steady rate.

The emulator alone: a bare ROUTER takes the place of the parameter server. It speaks the protocol, sends blocks at
random times and records when their answers arrive.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import psutil
import zmq
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import BLOCK, PIECE, Heartbeat, Join, Result, Welcome, Work, decode, encode, send_frames
from emulator.model.fleet import Fleet
from testbed.bench.ours import LIMIT_S
from testbed.launch.processes import Pods

# 4 KiB down and 4 KiB up per block, as in the project's platform notes
SIDE, INNER, BLOCKS_PER_MESSAGE = 32, 16, 10
HEARTBEAT_S = 0.5
RELEASED_AFTER = 600  # messages: three seconds, by when the answers have arrived


def measure(devices: int = 4000, blocks_per_s: int = 2000, lasting_s: float = 2.0, passes: int = 6) -> dict[str, Any]:
    latency_s = np.random.default_rng(3).uniform(0.01, 0.04, devices).tolist()
    profiles = pack_profiles([Profile(5e10, 1e-4, 50e6, 10e6, s, 512_000_000, 4) for s in latency_s])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        with Pods(
            Fleet(profiles, ["bench"] * devices, ["none"] * devices, {}),
            os.cpu_count() or 1,
            f"tcp://127.0.0.1:{port}",
            "model",
        ) as pods:
            peers = _welcome(router, devices)
            begun_s = _cpu_s(pods.pids)
            late = [_one_pass(router, peers, turn, int(lasting_s * blocks_per_s), lasting_s) for turn in range(passes)]
            cpu_s, memory_bytes = _cpu_s(pods.pids) - begun_s, pods.memory_bytes()
            pods.end()
    finally:
        context.destroy(linger=0)
    best = min(late, key=lambda late_s: float(np.percentile(late_s, 99)))
    return {
        "devices": devices,
        "blocks": len(best),
        "blocks_per_s": len(best) / lasting_s,
        "pods_memory_bytes": memory_bytes,
        "pods_cpu_s_per_block": cpu_s / sum(map(len, late)),
        "bytes_per_device": memory_bytes / devices,
        **{f"late_p{p}_s": float(np.percentile(best, p)) for p in (50, 99)},
        "all_late_p99_s": [float(np.percentile(late_s, 99)) for late_s in late],
    }


def _cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _welcome(router: zmq.Socket[bytes], devices: int) -> dict[bytes, int]:
    """Wait until all devices have joined: connection -> number of its devices."""
    peers: dict[bytes, int] = {}
    deadline = time.monotonic() + LIMIT_S
    while sum(peers.values()) < devices:
        if time.monotonic() > deadline or not router.poll(int(LIMIT_S * 1000)):
            raise RuntimeError(f"only {sum(peers.values())} of {devices} devices joined")
        identity, *frames = router.recv_multipart()
        message = decode(frames)
        if isinstance(message, Join):
            peers[identity] = peers.get(identity, 0) + len(message.profiles)  # a pod's devices join in parts
            deadline = time.monotonic() + LIMIT_S
            router.send_multipart([identity, *encode(Welcome(HEARTBEAT_S, "density"))])
    return peers


def _one_pass(
    router: zmq.Socket[bytes], peers: dict[bytes, int], turn: int, blocks: int, lasting_s: float
) -> NDArray[np.float64]:
    """Lateness of every answer, in seconds; negative if it arrived early."""
    rng = np.random.default_rng(blocks)
    moments = np.sort(rng.uniform(0.0, lasting_s, blocks // BLOCKS_PER_MESSAGE)).tolist()
    identities = list(peers)
    late: list[float] = []
    begun = heartbeat = time.monotonic()
    sent = 0
    while len(late) < sent * BLOCKS_PER_MESSAGE or sent < len(moments):
        now = time.monotonic()
        if sent < len(moments) and now >= begun + moments[sent]:
            identity = identities[sent % len(identities)]
            device = rng.integers(0, peers[identity], BLOCKS_PER_MESSAGE)
            send_frames(router, [identity, *encode(_work(turn * len(moments) + sent, device))])
            sent += 1
            continue
        if now >= heartbeat:
            heartbeat = now + HEARTBEAT_S
            for identity in identities:
                send_frames(router, [identity, *encode(Heartbeat())])
        wake = begun + moments[sent] if sent < len(moments) else now + HEARTBEAT_S
        if now > begun + lasting_s + LIMIT_S:  # for example, a pod found this process silent and joined anew
            raise RuntimeError("the devices did not answer; is the machine overloaded?")
        if not router.poll(max(1, int(1000 * min(HEARTBEAT_S, wake - now)))):
            continue
        frames = router.recv_multipart(copy=False)
        received_ns = time.monotonic_ns()
        message = decode(frames[1:])
        if isinstance(message, Result):
            late += ((received_ns - message.answers["due_ns"].astype(np.int64)) / 1e9).tolist()
    return np.array(late)


def _work(job: int, device: NDArray[np.int64]) -> Work:
    """Blocks that share their right operand; each message also releases the operands of an old message."""
    pieces = np.zeros(2, PIECE)
    pieces["piece"] = (2 * job, 2 * job + 1)
    pieces["batch"], pieces["outer"], pieces["inner"] = 1, (SIDE * len(device), SIDE), INNER
    blocks = np.zeros(len(device), BLOCK)
    blocks["device"], blocks["job"], blocks["block"] = device, job, np.arange(len(device))
    blocks["left"], blocks["right"], blocks["left_outer"] = 2 * job, 2 * job + 1, np.arange(len(device)) * SIDE
    blocks["batch"], blocks["rows"], blocks["columns"] = 1, SIDE, SIDE
    data = [np.ones((SIDE * len(device), INNER), np.float32), np.ones((SIDE, INNER), np.float32)]
    blocks["chunks"], blocks["down_bytes"] = 1, 4 * INNER * 2 * SIDE
    old = 2 * (job - RELEASED_AFTER)
    released = np.array([old, old + 1] if old >= 0 else [], "<u4")
    return Work(time.monotonic_ns(), released, pieces, blocks, list(data))
