"""Pods as processes of this machine: started together, watched, and gone when the run is over, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType

import psutil

from agent.errors import Failure
from emulator.fleet import Fleet


class LaunchError(Failure):
    """A pod did not start or died; the text has its last words."""


class Pods:
    def __init__(self, fleet: Fleet, count: int, address: str, links: str) -> None:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._processes: list[subprocess.Popen[str]] = []
        labels = [f"{d}/{n}/{i}" for i, (d, n) in enumerate(zip(fleet.device_names, fleet.network_names, strict=True))]
        try:
            for pod in range(min(count, len(fleet))):
                mine = slice(pod, None, count)  # dealt out, so that every pod has the same mix
                process = subprocess.Popen(
                    [sys.executable, "-m", "emulator.pod", "--ps", address, "--links", links],
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for us; we tell them
                )
                self._processes.append(process)
                assert process.stdin is not None
                with process.stdin as pipe:
                    json.dump({"profiles": fleet.profiles[mine].tolist(), "labels": labels[mine]}, pipe)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise if a pod has died while the run goes on."""
        for process in self._processes:
            if process.poll() is not None:
                said = process.stderr.read().strip() if process.stderr else ""
                raise LaunchError(f"a pod ended with code {process.returncode}: {said or 'it said nothing'}")

    def memory_bytes(self) -> int:
        total = 0
        for process in self._processes:
            try:
                total += psutil.Process(process.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def end(self) -> None:
        """Ask them to leave, where no server will say goodbye."""
        for process in self._processes:
            process.terminate()

    def stop(self) -> None:
        """They end by themselves when the server says goodbye; those that do not are ended."""
        for patience_s, insist in ((3.0, subprocess.Popen.terminate), (3.0, subprocess.Popen.kill), (3.0, None)):
            for process in self._processes:
                try:
                    process.wait(timeout=patience_s)
                except subprocess.TimeoutExpired:
                    if insist is not None:
                        insist(process)
        for process in self._processes:
            if process.stderr is not None:
                process.stderr.close()

    def __enter__(self) -> Pods:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
