"""Pods as processes of this machine: started together, watched, and gone when the run is over, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from emulator.fleet import Fleet
from emulator.link import Links
from emulator.performance import Models
from ps.peers import printable
from testbed.pods import PodGroup, line_of, no_cable, parts


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


class PodProcess:
    """A handle (`testbed.pods`) of a subprocess."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], first: bytes) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us; we tell them
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        try:
            self._input.write(first)
            self._input.flush()
        except BrokenPipeError:
            pass  # it has ended; whoever checks will say so
        except BaseException:
            self.process.kill()
            self.process.wait()
            self.close()
            raise
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._output.fileno(), False)

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def was_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    def fileno(self) -> int:
        return self._output.fileno()

    def send(self, data: bytes) -> int:
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

    def last_words(self) -> str:
        return self.process.stderr.read().decode(errors="replace") if self.process.stderr else ""

    def fate(self) -> str:
        return "SIGKILL, not ours"

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
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Pods(PodGroup):
    def __init__(
        self, fleet: Fleet, count: int, address: str, links: str, absent: Iterable[int] = (), scale: float = 1.0
    ) -> None:
        """`absent` devices of the fleet are not there at first; `scale`: of the clock, as the server has it."""
        super().__init__(fleet, count)
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "emulator.pod", "--ps", address, "--links", links, "--scale", str(scale)]
        self._running: list[PodProcess] = []
        try:
            for part in parts(fleet, count, absent):
                self._running.append(PodProcess(command, environment, line_of(part)))
        except BaseException:
            self.stop()
            raise

    @property
    def _handles(self) -> Sequence[PodProcess]:
        return self._running

    def end(self) -> None:
        """Ask them to leave, where no server will say goodbye."""
        for pod in self._running:
            pod.process.terminate()

    def stop(self) -> None:
        for pod in self._running:
            pod.resume()  # whoever is stopped hears nothing
        for patience_s, insist in ((3.0, subprocess.Popen.terminate), (3.0, subprocess.Popen.kill), (3.0, None)):
            for pod in self._running:
                try:
                    pod.process.wait(timeout=patience_s)
                except subprocess.TimeoutExpired:
                    if insist is not None:
                        insist(pod.process)
        for pod in self._running:
            pod.close()
