"""Faults of the machine: pods that crash, a full disk, repeated Ctrl-C. Real processes and files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import small_runs
from small_runs import CLEAVE, RUN_LIMIT_S

from emulator.model.fleet import Fleet, uniform_fleet
from testbed.launch.pods import LaunchError
from testbed.launch.processes import LAST_WORDS, PodProcess, Pods
from testbed.results.files import EventLog
from testbed.results.keeping import Keeping

if TYPE_CHECKING:
    from conftest import Serve, Start, Until

SMALL = ("--devices", "12", *small_runs.SMALL)


def fleet_of(count: int) -> Fleet:
    return Fleet(uniform_fleet("extreme", count, 0, 1.0), ["phone"] * count, ["line"] * count, {})


def summary_of(results: Path) -> dict[str, Any]:
    (folder,) = results.iterdir()
    told: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return told


# ---- pods that crash


@pytest.mark.slow
def test_a_crashed_pod_counts_as_lost_is_restarted_and_the_run_ends_with_the_exact_loss(
    start_warm: Start, tmp_path: Path
) -> None:
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, "--steps", "8", "--results", str(tmp_path))
    run.expect("step 1 of 8", RUN_LIMIT_S)
    (first, *_) = psutil.Process(run.pid).children()
    first.send_signal(signal.SIGSEGV)
    told = run.expect("SIGSEGV", RUN_LIMIT_S)
    assert "it is started again with its devices" in told
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    summary = summary_of(tmp_path)
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["flops_done"] == summary["flops_reference"]
    assert summary["verdict"] == "DEGRADED"
    assert "ended (SIGSEGV, not by us), and was started again" in summary["reasons"][0]
    assert summary["fleet"]["ended"] == 12
    assert summary["recovery"]["departures"] == summary["lost_devices"] > 0


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_restarted_pod_returns_with_the_devices_it_had(serve: Serve, until: Until, number: signal.Signals) -> None:
    server = serve()
    server.notice = lambda text: None
    with Pods(fleet_of(6), 2, server.address, "off", [3], pod_pass=server.pod_pass, restarts=1) as pods:
        assert server.wait_for_devices(5, 30.0)
        pods.order(1, {"do": "leave", "devices": [2]})  # device 5
        until(lambda: pods.exchange(0.1), "the device has left")
        until(lambda: server.devices == 4, "the server knows")
        for again in (True, False):
            os.kill(pods.pids[1], number)
            until(lambda: pods.codes[1] is not None, "the pod is dead")
            until(lambda: server.devices == 3, "the server knows")
            (told,) = pods.look_after()
            assert ("started again" in told) is again
            assert pods.look_after() == []
            if again:
                until(lambda: server.devices == 4, "device 1 is back, 3 and 5 are not")
        assert [death.restarted for death in pods.deaths] == [True, False]
        assert [death.devices for death in pods.deaths] == [1, 1]
        assert sorted(set(server.labels)) == sorted(pods.fleet.labels[device] for device in (0, 1, 2, 4, 5))
        server.stop()


def test_a_pod_killed_by_the_scenario_stays_dead(serve: Serve, until: Until) -> None:
    server = serve()
    server.notice = lambda text: None
    with Pods(fleet_of(4), 2, server.address, "off", pod_pass=server.pod_pass, restarts=3) as pods:
        assert server.wait_for_devices(4, 30.0)
        pods.kill(0)
        until(lambda: server.devices == 2, "the server misses its devices")
        until(lambda: pods.codes[0] is not None, "the pod is dead")
        assert pods.look_after() == []
        assert pods.deaths == []
        server.stop()


def test_a_pod_that_cannot_start_is_reported_with_its_last_output(
    monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.devnull)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Pods(fleet_of(1), 1, "tcp://127.0.0.1:1", "off", restarts=3) as pods:
        until(lambda: pods.codes[0] is not None, "the pod has ended")
        with pytest.raises(LaunchError, match=r"a pod ended \(exit code 1\)"):
            pods.check()


def test_a_pod_may_write_any_amount_of_output(until: Until) -> None:
    """A pipe holds 64 KiB; a writer to a pipe that is not read would block for ever."""
    code = "import sys\nfor i in range(20000): print('line', i, 'of many', file=sys.stderr)\nprint('done', flush=True)"
    pod = PodProcess([sys.executable, "-c", code], dict(os.environ), b"{}\n")
    try:
        until(lambda: pod.code is not None, "the pod has written everything and ended")
        assert pod.receive() == b"done\n"
        words = pod.last_words()
        assert words.endswith("line 19999 of many\n")
        assert len(words) == LAST_WORDS
    finally:
        pod.kill()
        pod.process.wait()
        pod.close()


# ---- a full disk


def test_events_that_do_not_fit_on_the_disk_are_lost_with_one_notice_and_nothing_stops(tmp_path: Path) -> None:
    said: list[str] = []
    keeping = Keeping(said.append)
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    events = EventLog(tmp_path / "events.jsonl", keeping=keeping)
    for number in range(5):
        events.write("step", number=number)
    events.close()
    assert len(said) == 1
    assert "events.jsonl" in said[0]
    assert "No space left on device" in keeping.told


def test_events_continue_when_the_disk_has_room_again(tmp_path: Path) -> None:
    """An event that was cut is one unreadable line; all lines before and after it are readable."""
    path, keeping = tmp_path / "events.jsonl", Keeping(lambda text: None)
    events = EventLog(path, keeping=keeping)
    events.write("first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        events.write("torn", text="x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    events.write("last")
    events.close()
    first, torn, last = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in (first, last)] == ["first", "last"]
    assert len(torn) == 20
    assert keeping.missing == ["events.jsonl"]


def test_an_incomplete_file_is_removed_and_the_previous_one_stays(tmp_path: Path) -> None:
    keeping, path = Keeping(lambda text: None), tmp_path / "runs" / "blocks.parquet"

    def no_room(part: Path) -> None:
        part.write_bytes(b"half of it")
        with Path("/dev/full").open("wb") as file:
            file.write(b"x")

    keeping.write(path, no_room)
    assert list(path.parent.iterdir()) == []
    assert keeping.missing == ["blocks.parquet"]
    keeping.write(path, lambda part: part.write_bytes(b"all of it"))
    keeping.write(path, no_room)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == b"all of it"


BROKEN_LOGS = {  # what becomes of standard output
    "full": "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); ",
    "gone": """
import os, threading
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader))).start()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("log", BROKEN_LOGS)
def test_a_log_that_cannot_be_written_stops_no_training(start_warm: Start, tmp_path: Path, log: str) -> None:
    """Its disk is full, or its reader is gone after the first line."""
    words = ["run", "quickstart", *SMALL, "--steps", "3", "--results", str(tmp_path)]
    run = start_warm("-c", BROKEN_LOGS[log] + CLEAVE, *words)
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    assert "Traceback" not in run.output
    summary = summary_of(tmp_path)
    assert summary["steps"] == 3
    assert summary["loss_max_abs_diff"] <= 1e-4


@pytest.mark.slow
def test_a_results_folder_that_disappears_is_created_again(start_warm: Start, tmp_path: Path) -> None:
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, "--steps", "3", "--results", str(tmp_path))
    run.expect("step 1 of 3", RUN_LIMIT_S)
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    assert "Traceback" not in run.output
    assert summary_of(tmp_path)["steps"] == 3


@pytest.mark.slow
def test_a_pod_that_crashes_while_devices_join_is_started_again(
    start_warm: Start, until: Until, tmp_path: Path
) -> None:
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, "--steps", "1", "--results", str(tmp_path))
    run.expect("server at", RUN_LIMIT_S)
    found: list[psutil.Process] = []

    def pods() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):  # a process that is just starting
            found[:] = [p for p in psutil.Process(run.pid).children() if "emulator.pods.pod" in p.cmdline()]
        return found

    until(pods, "a pod has started", RUN_LIMIT_S)
    found[0].send_signal(signal.SIGSEGV)
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    assert "it is started again with its devices" in run.output
    assert summary_of(tmp_path)["loss_max_abs_diff"] <= 1e-4


@pytest.mark.slow
def test_a_full_disk_stops_no_training_and_the_results_say_what_is_missing(start_warm: Start, tmp_path: Path) -> None:
    """No file may grow beyond 12 kB, which needs no root: as on a full disk, small files fit and large ones do not."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)); " + CLEAVE
    small = (*SMALL, "--steps", "3", "--results", str(tmp_path))
    run = start_warm("-c", limited, "run", "quickstart", *small, "--strict")
    assert run.wait(RUN_LIMIT_S) == 3, run.output  # DEGRADED; 0 without --strict
    assert "Traceback" not in run.output
    assert run.output.count("The run goes on; its results will be marked as incomplete") == 1
    summary = summary_of(tmp_path)
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["steps"] == 3
    (told,) = summary["incomplete"]
    assert told.startswith("results are incomplete: ")
    assert "report.html" in told
    assert told in summary["reasons"]
    assert summary["verdict"] == "DEGRADED"
    (folder,) = tmp_path.iterdir()
    assert not (folder / "report.html").exists()
    assert len((folder / "steps.csv").read_text(encoding="utf-8").splitlines()) == 4


# ---- repeated Ctrl-C

ENDING = """
import signal, subprocess, sys, time
from contextlib import ExitStack
from testbed.runs import interrupts

interrupts.install()

class Thing:
    def __enter__(self):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return self
    def __exit__(self, *_):
        with interrupts.held():
            time.sleep(0.3)  # as a container that takes its time
            self.child.kill()
            self.child.wait()

try:
    with Thing(), Thing(), Thing():
        print("ready", flush=True)
        if sys.argv[1] == "interrupted":
            time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("all is gone", flush=True)
"""


@pytest.mark.parametrize("when", ["interrupted", "at its end"])
@pytest.mark.parametrize("seed", [1, 2])
def test_signals_at_any_moment_leave_nothing_half_stopped(start: Start, until: Until, when: str, seed: int) -> None:
    """`start` fails the test if one of the children is left."""
    rng, pause = random.Random(seed), threading.Event()
    program = start("-c", ENDING, when)
    program.expect("ready")
    for _ in range(3):
        pause.wait(rng.uniform(0.0, 0.35))
        program.signal(rng.choice([signal.SIGINT, signal.SIGTERM]))
    assert program.wait() == 0, program.output
    assert "interrupted" in program.said
    assert program.said[-1] == "all is gone"


LEAVING = """
import os, signal, sys
import testbed.commands.cli

class Last:  # ends while modules are cleared: Python's own handlers are gone by then
    def __init__(self) -> None:
        self.again = lambda kill=os.kill, pid=os.getpid(), number=signal.SIGINT: kill(pid, number)
    def __del__(self) -> None:
        self.again()

def app() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise SystemExit(130) from None

sys.modules["last"] = Last()
testbed.commands.cli.app = app
testbed.commands.cli.main()
"""


def test_a_signal_while_python_shuts_down_changes_no_exit_code(start: Start) -> None:
    program = start("-c", LEAVING)
    assert program.wait() == 130, program.output


@pytest.mark.slow
def test_a_run_interrupted_three_times_ends_like_one_interrupted_once(start_warm: Start, tmp_path: Path) -> None:
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, "--steps", "50", "--results", str(tmp_path))
    run.expect("step 1 of 50", RUN_LIMIT_S)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 1
    rng, pause = random.Random(3), threading.Event()
    for _ in range(3):
        run.signal(signal.SIGINT)
        pause.wait(rng.uniform(0.0, 0.1))
    assert run.wait(RUN_LIMIT_S) == 130, run.output
    assert "Traceback" not in run.output
    assert "everything that was started has ended" in run.output
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
