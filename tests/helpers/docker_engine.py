"""A Docker engine for tests: installed if missing, in its own network namespace, removed afterwards.

The engine's bridges, routes and firewall rules stay in that namespace; a program that must reach its containers is
started there, as a user's testbed and engine share one host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import debian
from places import ROOT

READY_S = 60.0
# `cleave` of this checkout, whatever is installed
CLEAVE = [sys.executable, "-c", "from testbed.commands.cli import main; main()"]


def why_not() -> str:
    """Why no engine can be started here; "" if one can."""
    if not sys.platform.startswith("linux"):
        return "a Docker engine for tests needs Linux"
    if os.geteuid() != 0:
        return "a Docker engine for tests needs root"
    return ""


@dataclass(frozen=True, slots=True)
class TestEngine:
    __test__ = False

    namespace: str
    folder: Path

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def inside(self) -> list[str]:
        """Command prefix: enter the namespace of the engine's bridges."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"DOCKER_HOST": self.host, "PYTHONPATH": str(ROOT)}

    def cleave(
        self, *arguments: str, cwd: Path | None = None, limit_s: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `cleave` beside the engine until it ends."""
        return subprocess.run(
            [*self.inside, *CLEAVE, *arguments],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def docker(self, *arguments: str) -> str:
        command = ["docker", "-H", self.host, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


PACKAGES = {"dockerd": "docker.io", "iptables": "iptables", "debootstrap": "debootstrap", "ip": "iproute2"}


@contextmanager
def engine() -> Iterator[TestEngine]:
    debian.install(PACKAGES)
    folder = Path(tempfile.mkdtemp(prefix="cleave-engine-", dir="/var/tmp"))  # /tmp may be memory
    made = TestEngine(f"cleave-{os.getpid()}", folder)
    subprocess.run(["ip", "netns", "add", made.namespace], check=True)
    process = None
    try:
        subprocess.run(["ip", "-n", made.namespace, "link", "set", "lo", "up"], check=True)
        kept = {"--data-root": "data", "--exec-root": "exec", "--pidfile": "dockerd.pid"}
        options = [word for option, name in kept.items() for word in (option, f"{folder}/{name}")]
        options += ["--cgroup-parent", made.namespace, "--shutdown-timeout", "2"]
        with (folder / "dockerd.log").open("wb") as log:
            process = subprocess.Popen(
                # nsenter, not "ip netns exec": that one would hide the control groups
                [*made.inside, "dockerd", "-H", made.host, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _wait(made, process)
        yield made
    finally:
        if process is not None:
            process.terminate()  # ends its containerd, which ends its containers
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        _forget(made)


def _forget(made: TestEngine) -> None:
    """Remove what an engine leaves behind: mounts, control groups, the namespace, files."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{made.folder}/")]):
        subprocess.run(["umount", "-l", mount], check=False)
    for group in Path("/sys/fs/cgroup").glob(f"**/{made.namespace}"):
        for inner in sorted(group.glob("**/"), reverse=True):
            with suppress(OSError):
                inner.rmdir()
    subprocess.run(["ip", "netns", "del", made.namespace], check=False)
    shutil.rmtree(made.folder)


def _wait(made: TestEngine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while subprocess.run(["docker", "-H", made.host, "version"], capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"dockerd did not start: {(made.folder / 'dockerd.log').read_text()[-2000:]}")
        time.sleep(0.1)


if __name__ == "__main__":  # by hand: an engine until Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with engine() as running:
        print(f"DOCKER_HOST={running.host}  beside it: {' '.join(running.inside)}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
