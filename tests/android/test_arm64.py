"""A phone's processor in a run: the bundle on arm64 Python with the real aarch64 wheels, invited, encrypted, beside
emulated devices. The run trains with exactly the loss of plain PyTorch, and every block is verified."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import arm64
import pytest
from processes import free_port
from small_runs import MODEL

from android.bundle import build
from ps.access.access_file import AccessFile
from testbed.access.inviting import new_invitation

if TYPE_CHECKING:
    from conftest import Start

LIMIT_S = 150.0
CLEAVE = "from testbed.commands.cli import main; main()"


@pytest.fixture(scope="module")
def phone() -> Path:
    return arm64.rootfs()


@pytest.fixture
def home(phone: Path) -> Iterator[Path]:
    """A folder of this test inside the phone's root."""
    with tempfile.TemporaryDirectory(dir=phone / "tmp") as folder:
        yield Path(folder)


@pytest.mark.root("another processor's Python is entered with chroot")
@pytest.mark.slow
@pytest.mark.timeout(240)  # the first run fetches another processor's packages
def test_an_invited_arm64_device_trains_beside_emulated_ones_with_exact_loss(
    phone: Path, home: Path, start_warm: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEAVE_STATE", str(tmp_path / "server"))
    access, address = AccessFile(tmp_path / "server"), f"127.0.0.1:{free_port()}"
    link = new_invitation(access, uses=1, lifetime_s=600.0, given=[address]).link
    (home / "agent.zip").write_bytes(build().data)
    inside = f"/tmp/{home.name}"
    words = ["-m", "agent", "--invitation", link, "--state", f"{inside}/state", "--name", "arm-phone", "--once"]
    words += ["--unmeasured", "--down", "500 Mbit", "--up", "100 Mbit", "--latency", "1 ms"]
    agent = start_warm.command(*arm64.command(phone, f"{inside}/agent.zip:/opt/site", *words))
    small = ("data.batch=4", "data.sequence=32", "links.kind=off", "fleet.phones=1", "fleet.line_share=1.0")
    options = [*MODEL, *(word for setting in small for word in ("--set", setting))]
    options += ["--devices", "4", "--steps", "2", "--listen", f"tcp://{address}", "--results", str(tmp_path / "runs")]
    run = start_warm("-c", CLEAVE, "run", "quickstart", *options)

    assert run.wait(LIMIT_S) == 0, run.output
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["loss_max_abs_diff"] < 1e-5
    assert summary["flops_done"] == summary["flops_reference"]
    assert summary["verification"]["checked"] == summary["blocks"]
    assert summary["verification"]["wrong"] == 0
    assert summary["suspended"] == {}
    done = summary["real_devices"]["arm-phone"]
    assert 0 < done < summary["blocks"]  # some by it, some by emulated devices
    (enrolled,) = access.read().enrolled
    assert enrolled.name == "arm-phone"
    assert agent.wait(LIMIT_S) == 0, agent.output
    assert "kernel onnxruntime" in agent.output or "onnxruntime: measured" in agent.output  # both can be used
    assert int(agent.expect(" blocks in ").split()[1]) >= done  # some of its answers came after another device's
