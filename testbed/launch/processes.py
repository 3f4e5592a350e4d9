"""Pods as processes of this machine: started together, watched, and gone when the run is over, whatever happens.

A pod's standard input stays open as long as this process lives; it tells the pod that its run is alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agent.identity.keys import Curve
from agent.protocol.wire import printable
from emulator.model.fleet import Fleet
from emulator.model.link import Links
from emulator.model.performance import Models
from testbed.launch.pods import PodGroup, line_of, no_cable, part_of, parts

LAST_WORDS = 4096  # bytes kept of a pod's standard error; the rest is read and dropped


def models_of(fleet: Fleet, labels: Sequence[str]) -> Models | None:
    """The fleet's models in the order in which devices with these labels joined; real devices have none."""
    if fleet.models is None:
        return None
    joined = _places(fleet, labels)
    return Models(
        fleet.models.kinds,
        np.array([-1 if device < 0 else fleet.models.of[device] for device in joined], np.int64),
        tuple((0, 0) if device < 0 else fleet.models.seeds[device] for device in joined),
    )


def links_of(fleet: Fleet, labels: Sequence[str]) -> Links | None:
    """The devices' links in the order in which they joined; a real device's link is plain."""
    return None if fleet.links is None else fleet.links.take(_places(fleet, labels))


def _places(fleet: Fleet, labels: Sequence[str]) -> list[int]:
    """The device of the fleet for each label; -1: not in the fleet."""
    place = {printable(label): device for device, label in enumerate(fleet.labels)}
    return [place.get(label, -1) for label in labels]


class PodProcess:
    """A handle (`testbed.launch.pods`) for a subprocess."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], first: bytes) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # this process handles Ctrl-C and ends the pods
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._words = b""
        self._listener = threading.Thread(target=self._listen, name="stderr of a pod", daemon=True)
        self._listener.start()
        os.set_blocking(self._output.fileno(), False)
        self._teller = threading.Thread(target=self._tell, args=(first,), name="first line of a pod", daemon=True)
        self._teller.start()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def fileno(self) -> int:
        return self._output.fileno()

    def _tell(self, first: bytes) -> None:
        """In a thread: the pod reads only once it has loaded its imports. Other pods start meanwhile, and a pod that
        never reads blocks nothing."""
        rest = memoryview(first)
        with contextlib.suppress(OSError):  # the pod has ended, which is noticed elsewhere
            while rest:
                rest = rest[os.write(self._input.fileno(), rest) :]
            os.set_blocking(self._input.fileno(), False)

    def send(self, data: bytes) -> int:
        if self._teller.is_alive():
            raise BlockingIOError
        return os.write(self._input.fileno(), data)

    def receive(self) -> bytes | None:
        read = b""
        while True:
            try:
                more = os.read(self._output.fileno(), 1 << 16)
            except BlockingIOError:
                return read
            if not more:
                return read or None
            read += more

    def _listen(self) -> None:
        """Read the pod's standard error: an unread pipe is full after 64 KiB and blocks the pod."""
        assert self.process.stderr is not None
        while more := os.read(self.process.stderr.fileno(), 1 << 16):
            self._words = (self._words + more)[-LAST_WORDS:]

    def last_words(self) -> str:
        if self.code is not None:
            self._listener.join(1.0)  # the thread ends at the end of the stream
        return self._words.decode(errors="replace")

    def fate(self) -> str:
        code = self.code or 0
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"{signal.Signals(-code).name}, not by us"
        except ValueError:
            return f"signal {-code}, not by us"

    def kill(self) -> None:
        self.process.kill()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def disconnect(self) -> None:
        raise no_cable()

    def reconnect(self) -> None:
        raise no_cable()

    def close(self) -> None:
        for thread in (self._listener, self._teller):
            thread.join(1.0)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Pods(PodGroup):
    def __init__(
        self,
        fleet: Fleet,
        count: int,
        address: str,
        links: str,
        absent: Iterable[int] = (),
        scale: float = 1.0,
        curve: Curve | None = None,
        pod_pass: Mapping[str, Any] | None = None,
        restarts: int = 0,
    ) -> None:
        """`absent` devices of the fleet are away at first; `scale`: the clock's scale, the same as the server's;
        `curve`: keys of encrypted connections, which the server must trust; `pod_pass`: the server's pass for this
        machine; `restarts`: how often each pod may be restarted."""
        super().__init__(fleet, count, absent, restarts)
        self._curve, self._pod_pass = curve, pod_pass
        self._environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._command = [
            sys.executable,
            "-m",
            "emulator.pods.pod",
            "--ps",
            address,
            "--links",
            links,
            "--scale",
            str(scale),
        ]
        self._running: list[PodProcess] = []
        self._before: list[PodProcess] = []  # ended pods that were restarted
        self._stopping = False
        try:
            for part in parts(fleet, count, absent, curve, pod_pass):
                self._running.append(PodProcess(self._command, self._environment, line_of(part)))
        except BaseException:
            self.stop()
            raise

    @property
    def _handles(self) -> Sequence[PodProcess]:
        return self._running

    def _start_again(self, pod: int) -> bool:
        """Runs in the caller's thread, which must outlive the pod: Linux ends a pod with the thread that started it."""
        if self._stopping:
            return False
        part = part_of(self.fleet, pod, self._count, self._away, self._curve, self._pod_pass)
        try:
            again = PodProcess(self._command, self._environment, line_of(part))
        except OSError:
            return False  # this host cannot start a process at present
        self._before.append(self._running[pod])
        self._running[pod] = again
        return True

    def end(self) -> None:
        """Ask the pods to leave, if no server will say goodbye."""
        for pod in self._running:
            pod.process.terminate()

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
        for pod in self._running:
            pod.resume()  # a stopped process cannot react
        for patience_s, insist in ((3.0, subprocess.Popen.terminate), (3.0, subprocess.Popen.kill), (3.0, None)):
            for pod in self._running:
                try:
                    pod.process.wait(timeout=patience_s)
                except subprocess.TimeoutExpired:
                    if insist is not None:
                        insist(pod.process)
        for pod in [*self._running, *self._before]:
            pod.close()
