"""Programs of Debian that tests need: present, or installed now, or the test is skipped with a reason. Only one process
at a time calls apt-get: parallel tests would meet its lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_QUIET = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]


def program(name: str, package: str) -> str:
    """Its path. Root installs it if it is missing."""
    if found := shutil.which(name):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"{name} is not here, and only root on Debian can install it: apt-get install {package}")
    install({name: package})
    found = shutil.which(name)
    assert found is not None
    return found


def install(packages: dict[str, str]) -> None:
    """Install the packages of the missing programs."""
    with apt():
        missing = [package for name, package in packages.items() if shutil.which(name) is None]
        if not missing:
            return
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run([*_QUIET, *missing], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join([*_QUIET, *missing])}: {done.stdout}{done.stderr}"


@contextmanager
def apt() -> Iterator[None]:
    """The holder may call apt-get."""
    with Path("/var/tmp/cleave-apt.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
