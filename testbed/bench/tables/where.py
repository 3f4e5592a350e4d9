"""Where and when figures were measured: date, commit, machine. No host name and no path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("numpy", "pyzmq", "torch")


def where() -> dict[str, Any]:
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine()}


def machine() -> str:
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    return (
        f"{os.cpu_count()} cores, {memory_gib} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def commit() -> str:
    """The commit of this code, marked if files differ from it; "unknown" outside a repository."""
    root = Path(__file__).resolve().parents[3]
    try:
        found, changed = (
            subprocess.run(["git", *call], cwd=root, capture_output=True, text=True, timeout=30, check=True).stdout
            for call in (("rev-parse", "--short=10", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.strip() + (" with changes" if changed.strip() else "")
