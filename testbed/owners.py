"""Whose a run is: this machine and this process, in a word that outlives both. `cleave clean` asks who is alive."""

from __future__ import annotations

import os
import platform

import psutil


def this_process() -> str:
    return f"{platform.node()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def alive(owner: str) -> bool:
    """Does the process still run? What ran on another machine counts as gone: nobody here can tell."""
    try:
        machine, pid, created = owner.rsplit("/", 2)
        return machine == platform.node() and abs(psutil.Process(int(pid)).create_time() - float(created)) < 1.0
    except (ValueError, psutil.NoSuchProcess):
        return False
