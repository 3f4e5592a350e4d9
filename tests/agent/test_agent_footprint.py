"""The agent's footprint on a phone: the packages it needs, and the memory it holds. With real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from processes import FAST, LIMIT_S, Multiplication

from agent.measure.known import is_current, know
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Program, Serve, Start, Until

MIB = 1 << 20
LINES = ("--down", "1 Gbit", "--up", "1 Gbit", "--latency", "0 ms")
# `python -m agent` with nothing else installed: other imports are reported and fail
BARE = """
import sys
ALLOWED = {"agent", "numpy", "zmq", *sys.argv.pop(1).split(","), *sys.stdlib_module_names, *sys.builtin_module_names}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED:
            print("asked for", top, flush=True)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kernel", ["numpy", "onnxruntime"])
def test_the_agent_needs_only_numpy_and_pyzmq_and_uses_onnx_runtime_if_present(
    start: Start, serve: Serve, kernel: str
) -> None:
    server = serve()
    extra = "onnxruntime" if kernel == "onnxruntime" else ""
    bare = start("-c", BARE, extra, "--ps", server.address, "--unmeasured", "--kernel", kernel, *LINES, "--once")
    bare.expect(f"kernel {kernel}")
    Multiplication(server, (1, 120, 90, 110)).check()
    server.stop()
    assert bare.wait() == 0
    asked = {line.removeprefix("asked for ") for line in bare.said if line.startswith("asked for ")}
    assert not asked & {"torch", "scipy", "pydantic", "rich", "psutil", "ps", "emulator", "testbed"}


@pytest.mark.slow
def test_rules_status_and_updates_need_no_other_package(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEAVE_RULES", str(tmp_path / "owner.toml"))
    for words in (("rules", "set", "battery_above", "40"), ("status",), ("measure", "--help")):
        program = start("-c", BARE, "", *words)
        assert program.wait() == 0, program.output
    assert start("-c", BARE.replace("sys.exit(main(sys.argv[1:]))", "import agent.identity.update"), "").wait() == 0


def most_ever(pid: int) -> int:
    """Peak resident bytes of a process; the current ones where the kernel does not report a peak."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kib = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    return 1024 * kib if kib is not None else int(psutil.Process(pid).memory_info().rss)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "most"), [("numpy", 70 * MIB), ("onnxruntime", 120 * MIB)])
def test_an_agent_holds_little_beside_its_budget(start: Start, serve: Serve, kernel: str, most: int) -> None:
    budget = 64_000_000
    server = serve()
    agent = start("agent", "--ps", server.address, "--unmeasured", "--kernel", kernel, *LINES, "--memory", "64 MB")
    agent.expect("joined")
    idle = psutil.Process(agent.pid).memory_info().rss
    assert idle <= most
    for seed in range(3):
        Multiplication(server, (1, 1500, 1500, 1500), seed=seed).check()
    peak = most_ever(agent.pid)
    print(f"{kernel}: {idle / MIB:.1f} MiB when it has joined, {peak / MIB:.1f} MiB at most while it worked")
    assert peak <= most + budget


def test_an_agent_takes_no_more_than_its_budget_whatever_the_server_sends(
    start: Start, serve: Serve, until: Until
) -> None:
    """The server counts on 1 GB, the device lends 1 MB: it holds no more, and says so."""
    code = """
import sys
import agent.compute.session
from agent.compute.memory_budget import MemoryBudget
agent.compute.session.MemoryBudget = lambda lent_bytes, credit_blocks: MemoryBudget(1_000_000, credit_blocks)
from agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    server = serve()
    server.notice = lambda text: None
    agent = start("-c", code, "--ps", server.address, *FAST, "--memory", "1 GB")
    agent.expect("joined")
    Multiplication(server, (1, 600, 600, 600))
    assert "joining again" in agent.expect("1 MB are lent")


# ---- its own profile


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_AGENT_STATE", str(tmp_path))
    return tmp_path


def first_start(start: Start, server: Server) -> Program:
    there = server.devices
    program = start("agent", "--ps", server.address, "--kernel", "numpy", *LINES, "--name", "phone")
    program.expect("joined", 2 * LIMIT_S)
    assert server.wait_for_devices(there + 1, LIMIT_S)
    return program


@pytest.mark.slow
def test_a_device_measures_itself_once_and_sends_what_it_found(start: Start, serve: Serve, own_state: Path) -> None:
    server = serve()
    first = first_start(start, server)
    assert any("measuring this device, once" in line for line in first.said)
    profile = json.loads(server.attendance.about["phone"]["profile"])
    assert profile["complete"] is True
    assert profile["device"]["name"] == "phone"
    assert server.profiles["flops"][0] == profile["picked"]["flops"]
    kept = json.loads((own_state / "profile-1-numpy.json").read_text())
    assert kept == profile
    again = first_start(start, server)
    assert not any("measuring" in line for line in again.said)
    assert server.profiles["flops"][1] == profile["picked"]["flops"]

    renamed = know(own_state, "tablet", threads=1, kernel="numpy", memory="64 MB", measure=True).profile
    assert renamed is not None
    assert json.loads(renamed)["device"]["name"] == "tablet"
    assert is_current(kept, threads=1)  # until it is too old:
    assert not is_current(kept, threads=2)
    assert not is_current(kept | {"versions": kept["versions"] | {"numpy": "0.1"}}, threads=1)
    assert not is_current(kept | {"complete": False}, threads=1)
    assert not is_current({}, threads=1)


@pytest.mark.slow
def test_a_device_that_cannot_be_measured_joins_anyway(start: Start, serve: Serve, own_state: Path) -> None:
    (own_state / "profile-1-numpy.json").mkdir()  # cannot be written
    server = serve()
    program = first_start(start, server)
    assert any("could not be measured" in line for line in program.said)
    assert "profile" not in server.attendance.about["phone"]
    Multiplication(server, (1, 60, 70, 80)).check()


def test_the_slower_kernel_is_not_loaded(start: Start, serve: Serve, own_state: Path) -> None:
    """It would waste 45 MiB."""
    code = (
        "import sys\nfrom agent.__main__ import main\ncode = main(sys.argv[1:])\nprint('onnxruntime' in sys.modules)\n"
    )
    server = serve()
    program = start("-c", code, "--ps", server.address, *FAST, "--once")
    program.expect("joined")
    server.stop()
    assert program.wait() == 0
    assert program.said[-1] == "False"


@pytest.mark.parametrize(("module", "package"), [("zmq", "pyzmq"), ("numpy", "numpy")])
@pytest.mark.parametrize("words", [["--ps", "tcp://127.0.0.1:1"], ["measure", "--name", "mine"]])
def test_a_python_without_the_packages_says_what_to_install(module: str, package: str, words: list[str]) -> None:
    program = f"import sys; sys.modules[{module!r}] = None; from agent.__main__ import main; sys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 2
    assert f"has no {package}:" in done.stderr
    assert "pip install numpy pyzmq" in done.stderr
    assert "Traceback" not in done.stderr
