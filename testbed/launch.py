"""Pods as processes of this machine: started together, watched, and gone when the run is over, whatever happens.

Orders (`emulator.faults`) go to a pod's standard input, its reports come from its standard output. Neither ever blocks:
what a pipe does not take waits here until `exchange` is called the next time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from agent.errors import Failure
from agent.keys import Curve
from emulator.fleet import Fleet
from emulator.link import Links, links_to_json
from emulator.performance import Models
from ps.peers import printable


class LaunchError(Failure):
    """A pod did not start or died; the text has its last words."""


def models_of(fleet: Fleet, labels: Sequence[str]) -> Models | None:
    """The fleet's models in the order in which devices with these labels joined; real ones among them have none."""
    if fleet.models is None:
        return None
    joined = _places(fleet, labels)
    return Models(
        fleet.models.kinds,
        np.array([-1 if device < 0 else fleet.models.of[device] for device in joined], np.int64),
        tuple((0, 0) if device < 0 else fleet.models.seeds[device] for device in joined),
    )


def links_of(fleet: Fleet, labels: Sequence[str]) -> Links | None:
    """The links of the devices in the order in which they joined; a real device's is plain."""
    return None if fleet.links is None else fleet.links.take(_places(fleet, labels))


def _places(fleet: Fleet, labels: Sequence[str]) -> list[int]:
    """Which device of the fleet each is; -1: none of it."""
    place = {printable(label): device for device, label in enumerate(fleet.labels)}
    return [place.get(label, -1) for label in labels]


class Pods:
    def __init__(
        self,
        fleet: Fleet,
        count: int,
        address: str,
        links: str,
        absent: Iterable[int] = (),
        scale: float = 1.0,
        curve: Curve | None = None,
    ) -> None:
        """`absent` devices of the fleet are not there at first; `scale`: of the clock, as the server has it; `curve`:
        keys of encrypted connections, which the server must trust."""
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.fleet = fleet
        self._processes: list[subprocess.Popen[bytes]] = []
        self._killed: set[int] = set()
        self._ended: set[int] = set()  # will report no more
        self._count = count
        self._outbox: list[bytes] = []
        self._inbox: list[bytes] = []
        labels = fleet.labels
        away = set(absent)
        try:
            for pod in range(min(count, len(fleet))):
                mine = slice(pod, None, count)  # dealt out, so that every pod has the same mix
                devices = range(len(fleet))[mine]
                process = subprocess.Popen(
                    [sys.executable, "-m", "emulator.pod", "--ps", address, "--links", links, "--scale", str(scale)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for us; we tell them
                )
                self._processes.append(process)
                self._outbox.append(b"")
                self._inbox.append(b"")
                assert process.stdin is not None
                assert process.stdout is not None
                part = {
                    "profiles": fleet.profiles[mine].tolist(),
                    "labels": labels[mine],
                    "absent": [at for at, device in enumerate(devices) if device in away],
                    "models": fleet.models.part(devices).as_json() if fleet.models else None,
                }
                if curve is not None:
                    part["curve"] = {"server": curve.server, "secret": curve.keys.secret}
                if fleet.links is not None:
                    part |= links_to_json(fleet.links.take(mine))
                process.stdin.write(json.dumps(part).encode() + b"\n")
                process.stdin.flush()
                os.set_blocking(process.stdin.fileno(), False)
                os.set_blocking(process.stdout.fileno(), False)
        except BaseException:
            self.stop()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    def check(self) -> None:
        """Raise if a pod has died while the run goes on, unless it was killed on purpose."""
        for pod, process in enumerate(self._processes):
            if pod not in self._killed and process.poll() is not None:
                said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
                raise LaunchError(f"a pod ended with code {process.returncode}: {said or 'it said nothing'}")

    def give_up_killed(self) -> None:
        """A pod that somebody has killed (kill -9, or a host without memory) is lost like any device, and no reason to
        end the run."""
        self._killed.update(pod for pod, p in enumerate(self._processes) if p.poll() == -signal.SIGKILL)

    # ---- faults

    def place(self, device: int) -> tuple[int, int]:
        """Which pod a device of the fleet is in, and its index there."""
        return device % self._count, device // self._count

    def device(self, pod: int, index: int) -> int:
        """The other way round."""
        return index * self._count + pod

    def order(self, pod: int, order: Mapping[str, Any]) -> None:
        """Goes out with the next `exchange`."""
        self._outbox[pod] += json.dumps(order).encode() + b"\n"

    def kill(self, pod: int) -> None:
        """kill -9, on purpose: its devices are lost, and the run goes on."""
        self._killed.add(pod)
        self._outbox[pod] = b""
        self._processes[pod].kill()

    def pause(self, pod: int) -> None:
        """SIGSTOP: it neither answers nor says so."""
        self._processes[pod].send_signal(signal.SIGSTOP)

    def resume(self, pod: int) -> None:
        self._processes[pod].send_signal(signal.SIGCONT)

    def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]:
        """Send the orders that wait, and take the reports that are there, or come within that time: (pod, report)."""
        outputs = {p.stdout.fileno(): i for i, p in enumerate(self._processes) if p.stdout and i not in self._ended}
        for pod, process in enumerate(self._processes):
            if self._outbox[pod] and process.stdin is not None:
                try:
                    sent = os.write(process.stdin.fileno(), self._outbox[pod])
                except BlockingIOError:
                    continue  # the pipe is full; later
                except BrokenPipeError:
                    sent = len(self._outbox[pod])  # it has ended; `check` will say so
                self._outbox[pod] = self._outbox[pod][sent:]
        reports: list[tuple[int, dict[str, Any]]] = []
        poll = select.poll()
        for descriptor in outputs:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(int(1000 * wait_s)):
            pod = outputs[descriptor]
            while True:
                try:
                    read = os.read(descriptor, 1 << 16)
                except BlockingIOError:
                    break
                if not read:
                    self._ended.add(pod)
                    break
                self._inbox[pod] += read
            *lines, self._inbox[pod] = self._inbox[pod].split(b"\n")
            reports += [(pod, json.loads(line)) for line in lines]
        return reports

    # ---- the end

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

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
        for pod in range(len(self._processes)):
            self.resume(pod)  # whoever is stopped hears nothing
        for patience_s, insist in ((3.0, subprocess.Popen.terminate), (3.0, subprocess.Popen.kill), (3.0, None)):
            for process in self._processes:
                try:
                    process.wait(timeout=patience_s)
                except subprocess.TimeoutExpired:
                    if insist is not None:
                        insist(process)
        for process in self._processes:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> Pods:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
