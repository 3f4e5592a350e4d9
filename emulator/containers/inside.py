"""Checks from inside a container: whether it reaches the server, how fast a core is, and what its clock reads.

Run `python -m emulator.containers.inside HOST PORT` in a container before hundreds of others are started. The first
line of its input holds the keys of an encrypted connection, if any. It prints one line of JSON, then answers every
further line with its monotonic clock, so that the caller can compare clocks.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable

import zmq

from agent.identity.keys import Curve, Keys

REACH_S = 5.0
SIDE, REPEATS = 2000, 5  # takes less than a second


def main() -> int:
    host, port = sys.argv[1], int(sys.argv[2])
    keys = json.loads(sys.stdin.readline()).get("curve")
    why = ""
    try:
        if keys is None:
            socket.create_connection((host, port), REACH_S).close()
        else:
            shake_hands(f"tcp://{host}:{port}", Curve(keys["server"], Keys.of(keys["secret"])))
    except OSError as error:
        why = error.strerror or str(error)
    print(json.dumps({"unreachable": why, "core_flops": 0.0 if why else core_flops()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"monotonic_ns": time.monotonic_ns()}), flush=True)
    return 0


def core_flops(clock: Callable[[], float] = time.thread_time) -> float:
    """FLOP/s of one thread, per second of processor time (which a quota counts), on a product so large that a larger
    one is no faster. The best of several: next to other programs a product takes up to 10% longer, never less."""
    import numpy as np  # not needed to report that the server is unreachable

    from agent.compute.kernels import NumpyKernel

    kernel, times = NumpyKernel(), []
    # the square of one matrix is half the work
    left, right = (np.full((SIDE, SIDE), value, np.float32) for value in (1.0, 2.0))
    for _ in range(REPEATS):
        begun_s = clock()
        kernel.product(left, right.T)
        times.append(clock() - begun_s)
    return 2 * SIDE**3 / max(min(times), 1e-9)


def shake_hands(endpoint: str, curve: Curve) -> None:
    """Complete the handshake as a device does; an incomplete one would look like a stranger's connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        curve.apply(line)
        events = line.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        line.connect(endpoint)
        if not events.poll(int(1000 * REACH_S)):
            raise OSError(f"no answer within {REACH_S:.0f} s")
        line.disable_monitor()
        events.close()


if __name__ == "__main__":
    sys.exit(main())
