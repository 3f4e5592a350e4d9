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

import zmq

from agent.keys import Curve, Keys

REACH_S = 5.0


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
    from agent.kernels import pick_kernel  # NumPy: not needed to say that nothing can be reached

    print(json.dumps({"unreachable": why, "core_flops": 0.0 if why else pick_kernel("numpy").flops}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"monotonic_ns": time.monotonic_ns()}), flush=True)
    return 0


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
