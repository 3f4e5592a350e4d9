"""Fixtures for tests with real processes and sockets. They check for leftovers after the test: a process, a thread or a
descriptor that was not there before fails it.

- `start`: programs of this project as subprocesses, their output read while they run
- `start_warm`: the same, but commands that need PyTorch have it already
- `start_light`: the same for commands that do not need PyTorch, or are refused before they do
- `serve`: parameter servers in this process, stopped at the end
- `until`: waits for a condition, never longer than its limit

Every program carries a mark in its environment, which its children inherit, so that even a grandchild whose parent is
long dead is found. Tests cannot import this file; they import its types for type checking only.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

# In an environment that forbids bytecode, every program of a test would compile all that it imports: PyTorch in 20 s
# instead of 8.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before anything imports NumPy, and for everything that tests start: matrices are small here, and threads of several
# processes that wait for each other in them made a fit of 2 s take 80.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
# A run in virtual time asks for all cores. With threads that spin while they wait for the next matrix, 40 steps of a
# tiny model took 24 s instead of 2 beside one other process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil  # noqa: E402
import pytest  # noqa: E402
import zmq  # noqa: E402
from hypothesis import settings  # noqa: E402
from warm import COMMAND, LIGHT, POSSIBLE, Forked, Warm  # noqa: E402

from ps.transport.server import Server  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MARK = "CLEAVE_TEST_MARK"
LIMIT_S = 60.0  # limit of any wait; reached only when something is broken
SETTLE_S = 5.0  # time within which ending threads and processes must be gone

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or programs of tests would ignore Ctrl-C too

settings.register_profile("calm", deadline=None)  # a busy machine fails no test
settings.load_profile("calm")


FAST_LEAVES_OUT = ("slow", "root", "docker", "alone")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cleave")
    group.addoption("--fast", action="store_true", help=f"leave out tests marked {', '.join(FAST_LEAVES_OUT)}")
    group.addoption(
        "--phase",
        choices=("beside", "alone"),
        help="beside: only tests that may run beside others (with -n); alone: only those marked alone",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test that runs alone need not be imported in that phase."""
    if config.getoption("--phase") != "alone" or collection_path.suffix != ".py":
        return None
    return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests that were not asked for, and puts files with long tests first, so that in parallel runs the short
    ones fill up the end."""

    def wanted(item: pytest.Item) -> bool:
        if config.getoption("--fast") and any(item.get_closest_marker(name) for name in FAST_LEAVES_OUT):
            return False
        phase = config.getoption("--phase")
        return phase is None or (phase == "alone") == (item.get_closest_marker("alone") is not None)

    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if wanted(item)]
    if config.getoption("--fast") or config.getoption("--phase"):
        long = {item.path: 0 for item in items}
        for item in items:
            long[item.path] += 100 if item.get_closest_marker("docker") else bool(item.get_closest_marker("slow"))
        items.sort(key=lambda item: -long[item.path])


def pytest_collection_finish() -> None:
    _forget_garbage()


@pytest.hookimpl(tryfirst=True)  # before its fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked root("for what") is skipped for other users."""
    marker = item.get_closest_marker("root")
    if marker is not None and (not hasattr(os, "geteuid") or os.geteuid() != 0):
        pytest.skip(f"needs root: {', '.join(marker.args)}")


class Until(Protocol):
    def __call__(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None: ...


class Start(Protocol):
    def __call__(self, *command: str, stdin: str | None = None, cwd: Path | None = None) -> Program: ...

    def command(self, *words: str) -> Program: ...


class Serve(Protocol):
    def __call__(self, port: int = 0, heartbeat_s: float = 0.5) -> Server: ...


@pytest.fixture(scope="session", autouse=True)
def no_state_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Agents of tests neither read nor change the owner's settings on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEAVE_AGENT_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setenv("CLEAVE_STATE", str(tmp_path_factory.mktemp("server")))
        patch.setenv("CLEAVE_RULES", os.devnull)
        yield


@pytest.fixture(name="until", scope="session")
def _until() -> Until:
    return until


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Polls every few milliseconds: events of other processes offer nothing to wait on."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit_s:.0f} s in vain until {what}")
        pause.wait(0.005)


class Program:
    """A subprocess whose output is kept, line by line, while it runs."""

    def __init__(self, process: subprocess.Popen[str] | Forked, stdin: str | None = None) -> None:
        self.said: list[str] = []  # both streams
        self.printed: list[str] = []  # standard output alone
        self.errors: list[str] = []  # standard error alone
        self._news = threading.Condition()
        self._open_streams = 2
        self._process = process
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        self._readers = [
            threading.Thread(target=self._read, args=(out, [self.said, self.printed])),
            threading.Thread(target=self._read, args=(err, [self.said, self.errors])),
        ]
        for reader in self._readers:
            reader.start()
        if stdin is not None:
            assert self._process.stdin is not None
            with self._process.stdin as pipe:
                pipe.write(stdin)

    def _read(self, stream: Iterator[str], lists: list[list[str]]) -> None:
        for line in stream:
            with self._news:
                for kept in lists:
                    kept.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._open_streams -= 1
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.said)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def expect(self, text: str, limit_s: float = LIMIT_S) -> str:
        """The first line that contains the text; waits for it."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while (line := next((line for line in self.said if text in line), None)) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._open_streams:
                    pytest.fail(f"{text!r} never appeared; the output was:\n{self.output}")
                self._news.wait(left_s)
        return line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code; all output has been read by then."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {limit_s:.0f} s; its output:\n{self.output}")
        for reader in self._readers:
            reader.join(limit_s)
        return code

    def completed(self, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Like the result of `subprocess.run`."""
        code = self.wait(limit_s)
        return subprocess.CompletedProcess(self._process.args, code, "\n".join(self.printed), "\n".join(self.errors))

    def end(self) -> None:
        if self.running:
            self._process.kill()  # also ends a stopped process
        self._process.wait()
        for reader in self._readers:
            reader.join(5.0)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="module")
def start_module() -> Iterator[Start]:
    """`start` for programs that several tests share."""
    with_mark = _Started()
    yield with_mark
    with_mark.finish()


@pytest.fixture
def start(nothing_left_behind: None) -> Iterator[Start]:
    with_mark = _Started()
    yield with_mark
    with_mark.finish()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm | None]:
    """Created before any test counts processes and descriptors, and only if a test needs it."""
    if not POSSIBLE:
        yield None
        return
    made = Warm()
    yield made
    made.close()


@pytest.fixture(scope="session")
def light() -> Iterator[Warm | None]:
    """`warm` without PyTorch."""
    if not POSSIBLE:
        yield None
        return
    made = Warm(LIGHT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def start_warm_module(warm: Warm | None) -> Iterator[Start]:
    """`start_warm` for programs that several tests share."""
    with_mark = _Started(warm)
    yield with_mark
    with_mark.finish()


@pytest.fixture
def start_warm(warm: Warm | None, nothing_left_behind: None) -> Iterator[Start]:
    """`start`, but start_warm("cleave", ...) and start_warm("-c", ...) are forked from a process with PyTorch."""
    with_mark = _Started(warm)
    yield with_mark
    with_mark.finish()


@pytest.fixture
def start_light(light: Warm | None, nothing_left_behind: None) -> Iterator[Start]:
    """`start`, but start_light("cleave", ...) is forked from a process that has what a refused command imports."""
    with_mark = _Started(light)
    yield with_mark
    with_mark.finish()


class _Started:
    def __init__(self, warm: Warm | None = None) -> None:
        self._warm = warm
        self._mark = uuid.uuid4().hex
        self._programs: list[Program] = []

    def __call__(self, *command: str, stdin: str | None = None, cwd: Path | None = None) -> Program:
        """start("agent", ...) is python -m agent ..., start("-c", code) a script, start("cleave", ...) the command."""
        if self._warm is not None and command[0] in ("cleave", "-c"):
            code, words = (COMMAND, command[1:]) if command[0] == "cleave" else (command[1], command[2:])
            return self._keep(Program(self._warm.start(code, list(words), self._environment, cwd or ROOT)))
        match command[0]:
            case "cleave":
                begin = [str(Path(sys.executable).with_name("cleave"))]
            case "-c":
                begin = [sys.executable, "-c"]
            case module:
                begin = [sys.executable, "-m", module]
        return self._begin([*begin, *command[1:]], stdin, cwd or ROOT)

    def command(self, *words: str) -> Program:
        """Any program."""
        return self._begin(list(words), None, ROOT)

    def _begin(self, words: list[str], stdin: str | None, cwd: Path) -> Program:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=cwd,
            env=self._environment,
        )
        return self._keep(Program(process, stdin))

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | {MARK: self._mark}

    def _keep(self, program: Program) -> Program:
        self._programs.append(program)
        return program

    def finish(self) -> None:
        for program in self._programs:
            program.end()
        left = marked_processes(self._mark)
        _, alive = psutil.wait_procs(left, timeout=SETTLE_S)
        for process in alive:
            process.kill()
        if alive:
            pytest.fail(f"still running after the test: {[_describe(p) for p in alive]}")


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # gone, or another user's
            continue
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid} (gone)"


@pytest.fixture
def serve(nothing_left_behind: None) -> Iterator[Serve]:
    servers: list[Server] = []

    def serve(port: int = 0, heartbeat_s: float = 0.5) -> Server:
        server = Server(port=port, heartbeat_s=heartbeat_s)
        servers.append(server)
        return server.start()

    yield serve
    for server in servers:
        server.stop()
    assert [server.error for server in servers if server.error is not None] == []


@pytest.fixture(scope="session")
def zero_copy_ready() -> None:
    """The first zero-copy message of a process makes pyzmq start a thread that stays: not a leak, if it is running
    before any test counts."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://zero-copy")
        two.connect("inproc://zero-copy")
        one.send(bytearray(1 << 20), copy=False)
        two.recv()
    looks: list[int] = []  # a new thread gets its name shortly after it has started

    def named() -> bool:
        looks.append(len(_zmq_threads()))
        return len(looks) >= 20 and len(set(looks[-20:])) == 1

    until(named, "ZeroMQ's threads have their names", SETTLE_S)


@pytest.fixture
def nothing_left_behind(zero_copy_ready: None) -> Iterator[None]:
    """Children, threads (Python's and ZeroMQ's) and descriptors after the test are those before it."""
    _forget_garbage()
    children, threads, zmq_threads, files = _children(), set(threading.enumerate()), _zmq_threads(), _descriptors()
    yield
    gc.collect()
    until(lambda: len(_zmq_threads()) <= len(zmq_threads), "ZeroMQ's threads ended: a context was not closed", SETTLE_S)
    until(lambda: not set(threading.enumerate()) - threads, f"threads ended: {threading.enumerate()}", SETTLE_S)
    left = [p for p in _children() if p not in children]
    for process in left:
        process.kill()
    assert [_describe(p) for p in left] == []
    gc.collect()
    more = {number: target for number, target in _descriptors().items() if files.get(number) != target}
    assert len(_descriptors()) <= len(files), f"descriptors left open: {more}"


def _forget_garbage() -> None:
    """Exclude the rest from later collections: with PyTorch and all tests in memory, each took half a second."""
    gc.collect()
    gc.freeze()


def _children() -> list[psutil.Process]:
    """Direct ones: their children are found by the mark."""
    return [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]


def _zmq_threads() -> list[str]:
    """Linux only: elsewhere a thread's name cannot be seen from outside."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(task.read_text().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith("ZMQbg")]


def _descriptors() -> dict[str, str]:
    """Open descriptors and what they are; only their number if /proc is missing."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return {str(i): "?" for i in range(psutil.Process().num_fds())}
    found = {}
    for entry in folder.iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except OSError:  # the descriptor that read the folder
            continue
    return found
