"""Describes this device: processor, memory, CPU quota, software versions. None where something cannot be read."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any


def describe(name: str, threads: int) -> dict[str, Any]:
    return {
        "name": name,
        "threads": threads,
        "cores": os.cpu_count(),
        "cpu_quota": cpu_quota(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "memory_bytes": total_memory(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("numpy", "pyzmq", "onnxruntime", "cleave-testbed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def total_memory() -> int | None:
    return _meminfo("MemTotal")


def available_memory() -> int | None:
    return _meminfo("MemAvailable")


def _meminfo(key: str) -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    return None


def cpu_quota() -> dict[str, int] | None:
    """The tightest CPU quota of this process's control groups; None if there is none or it cannot be read."""
    found = []
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("cpu" if controllers else "")
        here = root / path.lstrip("/")
        for group in (here, *here.parents):
            if controllers:
                words = [*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")]
            else:
                words = " ".join(_lines(group / "cpu.max")).split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                found.append({"quota_us": int(words[0]), "period_us": int(words[1])})
            if group == root:
                break
    return min(found, key=lambda quota: quota["quota_us"] / quota["period_us"], default=None)


def _lines(path: str | Path) -> Iterator[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield from Path(path).read_text(encoding="utf-8").splitlines()
