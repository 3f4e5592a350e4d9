"""Runs on a kernel with control groups of version 2, started by test_throttle.py: a process in a group like an
engine's, its arithmetic limited. Prints the shares that the computing thread and the others got, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from emulator.containers.throttle import ComputeThread, throttle_all

GROUPS = Path("/sys/fs/cgroup")
SPIN_S = 1.0


def spent() -> float:
    """Share of a core that this thread gets, with nothing else to do."""
    begun_s, before_s = time.monotonic(), time.thread_time()
    while time.monotonic() < begun_s + SPIN_S:
        pass
    return (time.thread_time() - before_s) / (time.monotonic() - begun_s)


class Spin:
    name = "spin"

    def product(self, left: Any, right: Any) -> Any:
        return spent()


def main() -> None:
    subprocess.run(["mount", "-t", "cgroup2", "none", str(GROUPS)], check=True)
    (GROUPS / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    container = GROUPS / "docker-0123.scope"
    container.mkdir()
    (container / "cgroup.procs").write_text(str(os.getpid()))
    kernel: Any = ComputeThread(Spin())
    throttle_all([{"process": os.getpid(), "quota_us": int(sys.argv[1]), "period_us": int(sys.argv[2])}], groups=GROUPS)
    threads = (container / "kernel" / "cgroup.threads").read_text().split()
    print(json.dumps({"computes": kernel.product(None, None), "others": spent(), "threads": len(threads)}))


if __name__ == "__main__":
    main()
