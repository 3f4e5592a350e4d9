"""From nothing to useful work on a phone: the bootstrap script in a stand-in Termux, under both shells."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import debian
import pytest
from processes import Multiplication
from termux import CRASHES, NO_STATE, Termux

from android.bundle import SCRIPT
from android.serving import Serving

if TYPE_CHECKING:
    from conftest import Serve, Until


@pytest.fixture
def files(nothing_left_behind: None) -> Iterator[Serving]:
    with Serving("127.0.0.1") as serving:
        yield serving


BOTH_SHELLS = pytest.mark.parametrize("shell", ["dash", "bash"])


@pytest.fixture
def shell() -> str:
    return "dash"  # Termux's sh


@pytest.fixture
def onnxruntime() -> bool:
    return False


@pytest.fixture
def termux(tmp_path: Path, shell: str, onnxruntime: bool) -> Iterator[Termux]:
    made = Termux(tmp_path, shell).make(onnxruntime)
    yield made
    made.end()


def test_the_script_is_clean_for_shellcheck() -> None:
    shellcheck = debian.program("shellcheck", "shellcheck")
    done = subprocess.run([shellcheck, "--shell=sh", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@BOTH_SHELLS
@pytest.mark.parametrize("onnxruntime", [True])
def test_a_fresh_phone_does_useful_work_after_one_command(termux: Termux, files: Serving, serve: Serve) -> None:
    server = serve()
    done = termux.sh(files.command(server.address) + " --name phone --kernel numpy --unmeasured")
    assert done.returncode == 0, done.stdout
    assert "self-test: ONNX Runtime and NumPy compute correctly" in done.stdout
    assert "this phone works now" in done.stdout
    assert server.wait_for_devices(1, 10.0)
    Multiplication(server, (1, 40, 30, 20)).check()
    assert "phone" in server.labels[0]
    again = termux.sh(files.command(server.address) + " --name phone --kernel numpy --unmeasured")
    assert again.returncode == 0, again.stdout
    assert "the agent is there already" in again.stdout
    assert "runs already" in again.stdout
    assert sum(call.startswith("pkg install") for call in termux.calls) == 3  # no package is installed twice
    assert server.totals.lost_devices == 0
    stopped = termux.sh("cleave-agent stop")
    assert "has left" in stopped.stdout, stopped.stdout


DOES_NOT_LOAD = (NO_STATE, "No module named 'onnxruntime.capi.onnxruntime_pybind11_state'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "code", "why"),
    [("dash", *DOES_NOT_LOAD), ("bash", *DOES_NOT_LOAD), ("dash", CRASHES, "its test crashed")],
    ids=["does not load, dash", "does not load, bash", "crashes"],
)
def test_with_a_broken_onnx_runtime_numpy_is_used_and_the_script_says_why(
    termux: Termux, files: Serving, serve: Serve, code: str, why: str
) -> None:
    server = serve()
    termux.broken_onnxruntime(code)
    done = termux.sh(files.command(server.address) + " --unmeasured")
    assert done.returncode == 0, done.stdout
    assert "self-test: NumPy is used; not ONNX Runtime: " in done.stdout
    assert why in done.stdout
    assert server.wait_for_devices(1, 10.0)
    Multiplication(server, (1, 40, 30, 20)).check()


def test_without_an_onnx_runtime_package_numpy_is_used(termux: Termux, files: Serving, serve: Serve) -> None:
    server = serve()
    done = termux.sh(files.command(server.address) + " --unmeasured")
    assert done.returncode == 0, done.stdout
    assert "ONNX Runtime could not be installed: E: Unable to locate package python-onnxruntime" in done.stdout
    assert server.wait_for_devices(1, 10.0)


def test_without_a_pyzmq_wheel_it_is_built(termux: Termux, files: Serving, serve: Serve) -> None:
    server = serve()
    (termux.standin / "no-wheel").touch()
    for tool in ("libzmq", "clang", "cmake", "ninja"):
        termux.repository(tool, "")
    done = termux.sh(files.command(server.address) + " --unmeasured")
    assert done.returncode == 0, done.stdout
    assert "no ready-made pyzmq for this Python: building it" in done.stdout
    assert server.wait_for_devices(1, 10.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "missing_from"),
    [("dash", "pkg"), ("dash", "pip"), ("dash", "server"), ("bash", "server")],
)
def test_a_broken_network_is_named_and_a_second_run_continues(
    termux: Termux, files: Serving, serve: Serve, missing_from: str
) -> None:
    server = serve()
    script = termux.home / "bootstrap.sh"
    script.write_bytes(files.script)
    command = f"sh bootstrap.sh {server.address} --kernel numpy --unmeasured"
    if missing_from == "server":
        gone = files.script.replace(files.url.encode(), b"http://127.0.0.1:9")  # no server listens there
        script.write_bytes(gone)
    else:
        (termux.standin / "no-network").touch()
    if missing_from == "pip":  # the network breaks once Python and NumPy are installed
        for package in ("python", "python-numpy"):
            (termux.standin / "no-network").unlink(missing_ok=True)
            termux.sh(f"pkg install -y {package}")
            (termux.standin / "no-network").touch()
    broken = termux.sh(command)
    assert broken.returncode == 1
    assert broken.stdout.splitlines()[-1].startswith("cleave: no network, or it broke off: "), broken.stdout
    assert broken.stdout.rstrip().endswith("run the same command again.")
    assert server.devices == 0
    (termux.standin / "no-network").unlink(missing_ok=True)
    script.write_bytes(files.script)
    mended = termux.sh(command)
    assert mended.returncode == 0, mended.stdout
    assert server.wait_for_devices(1, 10.0)


def test_a_bundle_with_another_checksum_is_discarded(termux: Termux, files: Serving) -> None:
    wrong = files.script.replace(files.bundle.sha256.encode(), b"0" * 64)
    (termux.home / "bootstrap.sh").write_bytes(wrong)
    done = termux.sh("sh bootstrap.sh tcp://127.0.0.1:9")
    assert done.returncode == 1
    assert "wrong checksum" in done.stdout
    assert not list((termux.home / ".cleave").glob("agent.zip*"))


def test_a_script_changed_in_transit_is_not_run(termux: Termux, files: Serving) -> None:
    command = files.command("tcp://127.0.0.1:9")
    files.script += b"\necho mischief\n"
    files._files.files["/bootstrap.sh"] = files.script
    done = termux.sh(command)
    assert done.returncode != 0
    assert "mischief" not in done.stdout
    assert "bootstrap.sh: FAILED" in done.stdout


@pytest.mark.slow
@BOTH_SHELLS
def test_a_full_disk_is_named_and_a_second_run_continues(termux: Termux, files: Serving, serve: Serve) -> None:
    server = serve()
    script = termux.standin / "bootstrap.sh"
    script.write_bytes(files.script)
    words = (str(termux.prefix / "bin/sh"), str(script), server.address, "--kernel", "numpy", "--unmeasured")
    small = 'mount -t tmpfs -o size=48k none "$HOME" && cd "$HOME" && exec "$@"'  # gone with its namespace
    namespace = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
    try:
        subprocess.run([*namespace, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk needs root or user namespaces")
    before = ("/usr/bin/env", f"PATH={os.environ['PATH']}", *namespace, "/bin/sh", "-c")
    full = termux.run(small.replace('exec "$@"', 'PATH="$PREFIX/bin" exec "$@"'), "sh", *words, before=before)
    assert full.returncode == 1, full.stdout
    assert full.stdout.splitlines()[-1].startswith("cleave: the disk is full: fetching "), full.stdout
    assert server.devices == 0
    (termux.standin / "no-room").touch()  # apt's message for it
    (termux.prefix / "bin/python").unlink()
    full = termux.run(*words)
    assert full.returncode == 1
    assert full.stdout.splitlines()[-1].startswith("cleave: the disk is full: installing Python"), full.stdout
    (termux.standin / "no-room").unlink()
    mended = termux.run(*words)
    assert mended.returncode == 0, mended.stdout
    assert server.wait_for_devices(1, 10.0)


@pytest.mark.slow
@BOTH_SHELLS
def test_boot_and_wake_lock_on_request_and_uninstall_removes_everything(
    termux: Termux, files: Serving, serve: Serve, until: Until
) -> None:
    server = serve()
    command = files.command(server.address).replace("sh bootstrap.sh '", "sh bootstrap.sh --boot --wake-lock '")
    done = termux.sh(command + " --unmeasured")
    assert done.returncode == 0, done.stdout
    assert "termux-wake-lock" in termux.calls
    boot = termux.home / ".termux/boot/cleave-agent"
    assert os.access(boot, os.X_OK)
    assert "has left" in termux.sh("cleave-agent stop").stdout
    until(lambda: server.devices == 0, "the server knows that the phone has left")
    assert "this phone works now" in termux.run(str(boot)).stdout  # as Termux:Boot does
    assert server.wait_for_devices(1, 10.0)
    assert ": working, run" in termux.sh("cleave-agent status").stdout
    gone = termux.sh("cleave-agent uninstall")
    assert gone.returncode == 0, gone.stdout
    assert termux.calls[-1] == "termux-wake-unlock"
    assert termux.ours() == [".termux"]  # Termux's own folder
    until(lambda: server.devices == 0, "the server knows that the phone has left")
    assert "pkg uninstall python python-numpy" in gone.stdout


@pytest.mark.slow
def test_an_installation_killed_at_any_moment_is_repaired_by_the_next(
    termux: Termux, files: Serving, serve: Serve
) -> None:
    """Killed after each step in turn, with half a file in place of a whole one."""
    server = serve()
    (termux.home / "bootstrap.sh").write_bytes(files.script)
    steps = ("fetch_bundle", "install_command", "remember", "start_agent")
    for step in steps:
        text = files.script.decode().replace(f"\n    {step}", f"\n    kill -9 $$; {step}", 1)
        assert "kill -9 $$" in text
        (termux.home / "killed.sh").write_text(text)
        killed = termux.sh(f"exec sh killed.sh {server.address} --kernel numpy --unmeasured")
        assert killed.returncode == -9, killed.stdout
    (termux.standin / "half-installed").write_text("The following packages are only half configured: python\n")
    folder = termux.home / ".cleave"
    for name in ("agent.zip", "agent.zip.part", "agent.pid", "options.part"):
        (folder / name).write_bytes(b"half")
    mended = termux.sh(f"sh bootstrap.sh {server.address} --kernel numpy --unmeasured")
    assert mended.returncode == 0, mended.stdout
    assert "an earlier installation broke off: mending it" in mended.stdout
    assert server.wait_for_devices(1, 10.0)


def test_an_agent_that_ends_at_once_shows_its_last_output(termux: Termux, files: Serving) -> None:
    done = termux.sh(files.command("tcp://127.0.0.1:9") + " --memory nonsense")
    assert done.returncode == 1
    assert "the agent ended at once: agent: " in done.stdout, done.stdout


def test_outside_termux_the_script_needs_python_with_numpy_and_zmq(
    termux: Termux, files: Serving, serve: Serve
) -> None:
    """A proot Debian: no pkg, Debian's python3."""
    server = serve()
    (termux.prefix / "bin/pkg").unlink()
    without = termux.sh(files.command(server.address) + " --unmeasured")
    assert without.returncode == 1
    assert "apt install python3-numpy python3-zmq" in without.stdout
    shutil.copy(termux.standin / "python", termux.prefix / "bin/python3")
    for package in ("python-numpy", "pyzmq"):
        termux.run(str(termux.prefix / "bin/sh"), str(termux.standin / "repository" / package))
    done = termux.sh(f"curl -fsS {files.url}/bootstrap.sh | sh -s -- {server.address} --unmeasured")
    assert done.returncode == 0, done.stdout
    assert server.wait_for_devices(1, 10.0)


@pytest.mark.parametrize("words", ["", "http://somewhere", "boot", "start"])
def test_an_incomplete_command_gets_one_explanation(termux: Termux, files: Serving, words: str) -> None:
    (termux.home / "bootstrap.sh").write_bytes(files.script)
    done = termux.sh(f"sh bootstrap.sh {words}")
    assert done.returncode == 1
    assert done.stdout.startswith("cleave: what shall it do?")
    assert termux.ours() == ["bootstrap.sh"]
