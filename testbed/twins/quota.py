"""A CPU quota for a process of this machine: a temporary control group.

With quotas, one machine stands in for several slower devices. Needs Linux, control groups version 1 or 2, and the right
to create them (root, or a delegated group); otherwise raises UserError.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent.protocol.errors import UserError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 5000
LEAST_US = 1000  # some kernels silently ignore a smaller quota


@contextlib.contextmanager
def cpu_quota(quota_us: int, period_us: int = PERIOD_US) -> Iterator[Path]:
    """The group's folder; see `enter`. Processes still in it at the end are moved back to this process's group."""
    if quota_us < LEAST_US:
        raise UserError(f"a CPU quota of {quota_us} us is too small for the kernel to keep; give at least {LEAST_US}")
    first = (ROOT / "cpu" / "cpu.cfs_period_us").exists() or (ROOT / "cpu" / "cgroup.procs").exists()
    parent = ROOT / "cpu" if first else ROOT
    group = parent / f"cleave-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        if first:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            kept = int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())
        else:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
            one, two = (group / "cpu.max").read_text().split()
            kept = int(one), int(two)
        with contextlib.suppress(OSError):  # the group gets its full quota, whatever else runs on this machine
            (group / ("cpu.shares" if first else "cpu.weight")).write_text("262144" if first else "10000")
        if kept != (quota_us, period_us):
            raise UserError(
                f"the kernel set {kept[0]} of {kept[1]} us instead of a CPU quota of {quota_us} of {period_us}"
            )
        yield group
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"no CPU quota can be set here ({error}); run as root on Linux, or without a quota") from None
    finally:
        _remove(group, parent)


@contextlib.contextmanager
def served_first() -> Iterator[None]:
    """Give this process and its children priority over others on this machine, as far as the kernel allows: a control
    group of the largest weight (if sessions are scheduled as groups, niceness counts only within a session). Does
    nothing if that is not allowed."""
    first = (ROOT / "cpu" / "cgroup.procs").exists()
    parent = ROOT / "cpu" if first else ROOT
    group = parent / f"cleave-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.suppress(OSError):
        group.mkdir()
        (group / ("cpu.shares" if first else "cpu.weight")).write_text("262144" if first else "10000")
        enter(group)
    with contextlib.suppress(OSError):
        os.nice(-10)
    try:
        yield
    finally:
        _remove(group, parent)


def enter(group: Path, process: int = 0) -> None:
    """Put a process with all its threads into the group; 0 is this process. Call it before the process starts
    computing."""
    (group / "cgroup.procs").write_text(str(process))


@contextlib.contextmanager
def running(
    command: Sequence[str], quota: tuple[int, int] | None, threads: int, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A device's process, with its CPU quota and this many BLAS threads; terminated at the end."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(cpu_quota(*quota)) if quota else None
        limits = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
        environment = os.environ | limits | {"CLEAVE_RULES": os.devnull}  # the owner's rules do not apply here
        process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, start_new_session=True, env=environment, **options
        )
        try:
            if group is not None:
                enter(group, process.pid)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _remove(group: Path, parent: Path) -> None:
    if not group.exists():
        return
    for _ in range(100):  # a process that has just ended may linger for a moment
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(process)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)
