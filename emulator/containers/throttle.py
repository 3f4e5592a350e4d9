"""A CPU quota for a device's arithmetic alone: a control group within its container's.

One thread of a pod does the device's arithmetic (`ComputeThread`); others do messages, their encryption and Python,
which are not the device's work. So the quota applies to that thread alone. A container cannot set its own quota: the
testbed runs this module in a container that sees the engine's processes and control groups, and passes the pods on
standard input:

    python -m emulator.containers.throttle    {"pods": [{"process": 71, "quota_us": 1000, "period_us": 20000}, ...]}

Supports control groups version 1 and, as threaded groups, version 2. The groups disappear with their containers. An
error is one line on standard error and exit code 2; the caller then has to limit whole containers.
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

from agent.compute.kernels import Array, Kernel
from agent.protocol.errors import UserError

GROUPS = Path("/groups")  # where a container finds the engine's control groups
THREAD = "cleave-kernel"  # the computing thread's name as seen by Linux, at most 15 characters
GROUP = "kernel"
READY_S = 60.0  # for a pod to start its thread: hundreds of Python processes start at the same time
_PR_SET_NAME = 15


class ThrottleError(UserError):
    """No quota could be set for a pod's arithmetic."""


class ComputeThread:
    """A kernel that computes products in a separate thread; the caller waits for each product."""

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
            except Exception as error:  # the caller handles it
                self._done.put(error)
            del left, right  # otherwise released operands stay in memory until the next product


def thread_of(process: int, root: Path = Path("/proc")) -> int | None:
    """The pod's thread that computes; None if it has not started yet."""
    for task in (root / str(process) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if (task / "comm").read_text().strip() == THREAD:
                return int(task.name)
    return None


def container_group(listed: str, groups: Path = GROUPS) -> tuple[Path, bool]:
    """The CPU control group of a process, from its /proc/PID/cgroup, and whether it is version 2."""
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
    """Limit this thread of a process in this group to `quota_us` of processor time per period, and read the limit
    back."""
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
        raise ThrottleError(
            f"the kernel set {' of '.join(kept)} us instead of a CPU quota of {quota_us} of {period_us}"
        )


def throttle_all(
    pods: Sequence[dict[str, Any]], now_s: Callable[[], float] = time.monotonic, groups: Path = GROUPS
) -> None:
    """A pod that has ended needs no quota; if no pod's process exists, the pods are hidden from this container."""
    if pods and not any(Path(f"/proc/{pod['process']}").exists() for pod in pods):
        raise ThrottleError("the processes of containers cannot be seen from here")
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
            if Path(f"/proc/{process}").exists():  # otherwise the pod has ended, which other code notices
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
