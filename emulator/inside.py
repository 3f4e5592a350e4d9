"""What a container finds where it runs: whether it reaches the server, how fast a core is, what time it is there.

`python -m emulator.inside HOST PORT` in a container, before hundreds of others are started. The first line of its input
has the keys of an encrypted connection, if there are any. It says one line of JSON, then answers every further line
with its monotonic clock, so that whoever asks can compare it with theirs.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable

import zmq

from agent.keys import Curve, Keys

REACH_S = 5.0
SIDE, REPEATS = 2000, 5  # less than a second


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
    """Of one thread, with a product so large that a larger one is no faster, per second of the processor's time: that
    is what a quota counts. The best of some: beside other programs a product takes up to 10% more, never less."""
    import numpy as np  # not needed to say that nothing can be reached

    from agent.kernels import NumpyKernel

    kernel, times = NumpyKernel(), []
    left, right = (np.full((SIDE, SIDE), value, np.float32) for value in (1.0, 2.0))  # a square of one is half the work
    for _ in range(REPEATS):
        begun_s = clock()
        kernel.product(left, right.T)
        times.append(clock() - begun_s)
    return 2 * SIDE**3 / max(min(times), 1e-9)


def shake_hands(endpoint: str, curve: Curve) -> None:
    """As a device does; a connection that breaks off the handshake would look like a stranger's."""
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
