"""The owner of a run: this machine and this process, as text that outlives both. `cleave clean` checks whether the
owner is alive."""

from __future__ import annotations

import os
import platform

import psutil


def this_process() -> str:
    return f"{platform.node()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def alive(owner: str) -> bool:
    """Whether the process still runs. A process of another machine counts as gone: it cannot be checked from here."""
    try:
        machine, pid, created = owner.rsplit("/", 2)
        return machine == platform.node() and abs(psutil.Process(int(pid)).create_time() - float(created)) < 1.0
    except (ValueError, psutil.NoSuchProcess):
        return False
