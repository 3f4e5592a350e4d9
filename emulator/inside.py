"""What a container finds where it runs: whether it reaches the server, how fast a core is, what time it is there.

`python -m emulator.inside HOST PORT` in a container, before hundreds of others are started. It says one line of JSON,
then answers every line on standard input with its monotonic clock, so that whoever asks can compare it with theirs.
"""

from __future__ import annotations

import json
import socket
import sys
import time

REACH_S = 5.0


def main() -> int:
    host, port = sys.argv[1], int(sys.argv[2])
    why = ""
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError as error:
        why = error.strerror or str(error)
    from agent.kernels import pick_kernel  # NumPy: not needed to say that nothing can be reached

    print(json.dumps({"unreachable": why, "core_flops": 0.0 if why else pick_kernel("numpy").flops}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"monotonic_ns": time.monotonic_ns()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
