"""What an agent costs its device: seconds from its start until it has joined, and resident memory.

    python -m testbed.bench.footprint

The first start also measures the device, for a few seconds, and is reported separately. Times are those of a process on
this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil

from ps.transport.server import Server

STARTS = 7
LIMIT_S = 120.0
MIB = 1 << 20


def start(server: Server, folder: str, kernel: str | None) -> tuple[float, float]:
    """Seconds until the agent has joined, and MiB of resident memory then."""
    command = [sys.executable, "-m", "agent", "--ps", server.address, *(["--kernel", kernel] if kernel else [])]
    environment = os.environ | {"CLEAVE_AGENT_STATE": folder, "CLEAVE_RULES": os.devnull}
    there = len(server.labels)
    begun = time.monotonic()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while len(server.labels) == there:
            if process.poll() is not None or time.monotonic() > begun + LIMIT_S:
                raise RuntimeError("the agent did not join")
            time.sleep(0.002)
        return time.monotonic() - begun, psutil.Process(process.pid).memory_info().rss / MIB
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    server = Server(run="footprint").start()
    server.notice = lambda text: None
    try:
        for kernel in ("numpy", "onnxruntime", None):
            with tempfile.TemporaryDirectory() as folder:
                first_s, _ = start(server, folder, kernel)
                later = np.array([start(server, folder, kernel) for _ in range(STARTS)])
            seconds, mib = later[:, 0], later[:, 1]
            told = f"{np.median(seconds):.2f} s (at most {seconds.max():.2f}), the first time {first_s:.2f} s"
            print(f"{kernel or 'the faster one':<15} starts in {told}; holds {mib.max():.1f} MiB when it has joined")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
