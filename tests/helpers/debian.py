"""Programs of Debian that tests need: there, or installed now, or the test is skipped and says why."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def program(name: str, package: str) -> str:
    """Its path. Root installs what is missing, one process at a time."""
    if found := shutil.which(name):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{name} is not here, and only root on Debian can install it: apt-get install {package}")
    with Path("/var/tmp/cleave-apt.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shutil.which(name):
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
            done = subprocess.run(
                install, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{' '.join(install)}: {done.stdout}{done.stderr}"
    found = shutil.which(name)
    assert found is not None
    return found
