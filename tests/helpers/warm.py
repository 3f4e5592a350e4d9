"""Commands of this project in processes that already have PyTorch. Importing it with a model takes 4 to 5 s of a core,
more than everything else in a small run. One process imports it, computes nothing, and forks into each command: such
a command is still a process of its own, with its signals, exit code and output.

Linux only: elsewhere a process with this many libraries cannot be forked safely. `python tests/helpers/warm.py` imports
everything and ends, so that later processes find the bytecode.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from places import ROOT

COMMAND = "import sys; from testbed.commands.cli import main; sys.exit(main())"
POSSIBLE = sys.platform == "linux"
LOADED = (  # everything a small run imports; what is missing here is imported later, by every command
    "pyarrow.dataset",
    "pyarrow.parquet",
    "testbed.commands.cli",
    "testbed.runs.run",
    "testbed.virtual.recovery",
    "torch._dynamo.backends.common",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "transformers.models.opt.modeling_opt",
)
LIGHT = (  # what commands without PyTorch import, and those that refuse
    "emulator.model.calibration",
    "testbed.access.inviting",
    "testbed.commands.cli",
    "testbed.runs.scenario",
    "testbed.virtual.plan",
    "testbed.virtual.recovery",
    "typer._adapters",
)


class Forked:
    """A forked command, with the interface of `subprocess.Popen`."""

    def __init__(self, args: list[str], line: socket.socket, out: IO[str], err: IO[str]) -> None:
        self.args = args
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = out
        self.stderr: IO[str] | None = err
        self.returncode: int | None = None
        self._line, self._heard = line, b""
        pid = self._hear(None)
        assert pid is not None
        self.pid = pid

    def _hear(self, limit_s: float | None) -> int | None:
        """The next number from the forking process; None if it does not come in time."""
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._heard:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([self._line], [], [], left_s)[0]:
                return None
            more = self._line.recv(64)
            if not more:
                raise RuntimeError("the process that forks has ended")
            self._heard += more
        number, _, self._heard = self._heard.partition(b"\n")
        return int(number)

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, limit_s: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._hear(limit_s)
            if self.returncode is not None:
                self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The forking process, seen by its users."""

    def __init__(self, modules: tuple[str, ...] = LOADED) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )

    def start(self, code: str, arguments: list[str], environment: dict[str, str], cwd: Path) -> Forked:
        line, theirs = socket.socketpair()
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        socket.send_fds(self._control, [b"+"], [their_out, their_err, theirs.fileno()])
        for number in (their_out, their_err):
            os.close(number)
        theirs.close()
        line.sendall(json.dumps([code, arguments, environment, str(cwd)]).encode())
        line.shutdown(socket.SHUT_WR)
        return Forked(arguments, line, os.fdopen(out, errors="replace"), os.fdopen(err, errors="replace"))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class _Forking:
    """The forking process, from inside."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._running: dict[int, socket.socket] = {}

    def serve(self) -> list[Any]:
        """Returns in each process that becomes a command, with its order; in the forking process it never returns."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal is for the tests and their commands
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._report_ended()
            if self._control.fileno() in ready:
                asked, files, _, _ = socket.recv_fds(self._control, 1, 3)
                if not asked:
                    sys.exit()
                out, err, line = files
                pid = os.fork()
                if pid == 0:
                    return self._become(out, err, socket.socket(fileno=line))
                for number in (out, err):
                    os.close(number)
                self._running[pid] = socket.socket(fileno=line)
                self._tell(self._running[pid], pid)

    def _report_ended(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._running.pop(pid) as line:
                self._tell(line, os.waitstatus_to_exitcode(status))

    def _tell(self, line: socket.socket, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # no listener is left
            line.sendall(b"%d\n" % number)

    def _become(self, out: int, err: int, line: socket.socket) -> list[Any]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in ((out, 1), (err, 2)):
            os.dup2(number, stream)
            os.close(number)
        for number in (self._woken, self._wake):
            os.close(number)
        for other in (self._control, *self._running.values()):
            other.close()
        asked = b""
        with line:
            while more := line.recv(1 << 16):
                asked += more
        told: list[Any] = json.loads(asked)
        return told


def _load(control: socket.socket, modules: list[str]) -> _Forking:
    sys.path[0] = ""  # as with python -c
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that memory stays shared
    return _Forking(control)


def _leave(code: int) -> None:
    """End as Python does, but leave the modules to the kernel: taking them apart copies all memory shared so far."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__" and not sys.argv[1:]:  # only to have the bytecode made
    for _name in LOADED:
        importlib.import_module(_name)
elif __name__ == "__main__":
    _code, _arguments, _environment, _cwd = _load(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).serve()
    os.environ.clear()
    os.environ.update(_environment)
    os.chdir(_cwd)
    sys.argv = ["cleave", *_arguments]
    try:
        exec(compile(_code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as _end:
        if _end.code is None or isinstance(_end.code, int):
            _leave(_end.code or 0)
        raise
    _leave(0)
