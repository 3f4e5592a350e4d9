"""A share of a processor for a device's arithmetic, and for nothing else: a control group within its container's.

What a device computes is done by one thread of its pod (`Apart`); messages, their encryption and Python are the work of
other threads, and not the device's. So the quota is that thread's alone. A container cannot set it by itself: the
testbed runs this in one that has the engine's processes and control groups, and is told of the pods on standard input:

    python -m emulator.throttle    {"pods": [{"process": 71, "quota_us": 1000, "period_us": 20000}, ...]}

Control groups of version 1 and, as threaded ones, of version 2. They go with their containers. An error is one line on
standard error and exit code 2: who asked then has to limit whole containers.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from agent.errors import UserError
from agent.kernels import Array, Kernel

GROUPS = Path("/groups")  # where a container finds the engine's control groups
THREAD = "cleave-kernel"  # its name for the kernel, at most 15 characters
GROUP = "kernel"
READY_S = 60.0  # until a pod has started its thread: Python of hundreds of them starts at the same time
_PR_SET_NAME = 15


class ThrottleError(UserError):
    """No quota could be set for a pod's arithmetic."""


class Apart:
    """A kernel whose products are computed by a thread of their own. Whoever asks for one waits for it."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self._asked: SimpleQueue[tuple[Array, Array]] = SimpleQueue()
        self._done: SimpleQueue[Array | Exception] = SimpleQueue()
        threading.Thread(target=self._work, args=(kernel,), name=THREAD, daemon=True).start()

    def product(self, left: Array, right: Array) -> Array:
        self._asked.put((left, right))
        done = self._done.get()
        if isinstance(done, Exception):
            raise done
        return done

    def _work(self, kernel: Kernel) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD.encode())
        while True:
            left, right = self._asked.get()
            try:
                self._done.put(kernel.product(left, right))
            except Exception as error:  # its asker's to handle
                self._done.put(error)
            del left, right  # or operands that were released stay until the next product


def thread_of(process: int, root: Path = Path("/proc")) -> int | None:
    """Of those of a pod, the one that computes; None if it is not there yet."""
    for task in (root / str(process) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == THREAD:
                return int(task.name)
    return None


def container_group(listed: str, groups: Path = GROUPS) -> tuple[Path, bool]:
    """Where a process is, by its /proc/PID/cgroup, in the hierarchy that has processor time; whether that is version
    2."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
        if "cpu" in controllers.split(","):
            folder = next((name for name in (controllers, "cpu") if (groups / name).is_dir()), "cpu")
            return groups / folder / path.lstrip("/"), False
    if "" not in found:
        raise ThrottleError("there is no control group of processor time")
    return groups / found[""].lstrip("/"), True


def throttle(group: Path, second: bool, thread: int, quota_us: int, period_us: int) -> None:
    """So much processor time in each period for this thread of a process in this group. Read back."""
    inner = group / GROUP
    inner.mkdir(exist_ok=True)
    if second:
        (inner / "cgroup.type").write_text("threaded")
        (group / "cgroup.subtree_control").write_text("+cpu")
        (inner / "cpu.max").write_text(f"{quota_us} {period_us}")
        kept = (inner / "cpu.max").read_text().split()
        (inner / "cgroup.threads").write_text(str(thread))
    else:
        (inner / "cpu.cfs_period_us").write_text(str(period_us))
        (inner / "cpu.cfs_quota_us").write_text(str(quota_us))
        kept = [(inner / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period")]
        (inner / "tasks").write_text(str(thread))
    if kept != [str(quota_us), str(period_us)]:
        raise ThrottleError(f"the kernel made {' of '.join(kept)} us of a CPU quota of {quota_us} of {period_us}")


def throttle_all(
    pods: Sequence[dict[str, Any]], now_s: Callable[[], float] = time.monotonic, groups: Path = GROUPS
) -> None:
    """A pod that has ended needs nothing; but if there is none at all, they are hidden from us."""
    if pods and not any(Path(f"/proc/{pod['process']}").exists() for pod in pods):
        raise ThrottleError("the processes of containers are not to be seen from here")
    deadline_s = now_s() + READY_S
    for pod in pods:
        process = int(pod["process"])
        try:
            while (thread := thread_of(process)) is None:
                if now_s() > deadline_s:
                    raise ThrottleError(f"a pod has not begun to compute within {READY_S:.0f} s")
                time.sleep(0.02)
            where, second = container_group(Path(f"/proc/{process}/cgroup").read_text(), groups)
            throttle(where, second, thread, int(pod["quota_us"]), int(pod["period_us"]))
        except OSError as error:
            if Path(f"/proc/{process}").exists():  # or it has ended, which is for others to notice
                raise ThrottleError(f"{error.filename or 'a control group'}: {error.strerror}") from None


def main() -> int:
    try:
        throttle_all(json.load(sys.stdin)["pods"])
    except UserError as error:
        print(f"throttle: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
