"""A phone's processor in a run: the bundle on arm64 Python with the real aarch64 wheels, invited, encrypted, beside
emulated devices. It trains with exactly the loss of plain PyTorch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arm64
import numpy as np
import pytest
import torch
import transformers
from processes import Multiplication, grid, pod

from android.bundle import build
from ps.access_file import AccessFile
from ps.capture import distribute
from ps.executor import Executor
from ps.models import build_model
from ps.server import Server
from ps.trainer import train
from testbed.inviting import new_invitation

if TYPE_CHECKING:
    from conftest import Start

LIMIT_S = 80.0
SETTINGS: dict[str, Any] = {"seed": 5, "learning_rate": 1e-2, "weight_decay": 0.01}


@pytest.fixture(scope="module")
def phone() -> Path:
    if os.geteuid() != 0:
        pytest.skip("another processor's Python is entered with chroot, which only root may")
    return arm64.rootfs()


@pytest.fixture
def home(phone: Path) -> Iterator[Path]:
    """A folder of this test's own in there."""
    with tempfile.TemporaryDirectory(dir=phone / "tmp") as folder:
        yield Path(folder)


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    built: torch.nn.Module = build_model(
        transformers.OPTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=36,
            word_embed_proj_dim=16,
            vocab_size=29,
            max_position_embeddings=16,
        )
    )
    return built


@pytest.mark.timeout(180)  # the first time another processor's packages are fetched
def test_an_invited_arm64_device_trains_beside_emulated_ones_with_exact_loss(
    phone: Path, home: Path, start_module: Start, tmp_path: Path
) -> None:
    access = AccessFile(tmp_path / "server")
    server = Server(listen=["tcp://127.0.0.1:0"], access=access).start()
    (home / "agent.zip").write_bytes(build().data)
    inside = f"/tmp/{home.name}"
    link = new_invitation(access, uses=1, lifetime_s=600.0, given=[]).link
    words = ["-m", "agent", "--invitation", link, "--state", f"{inside}/state", "--name", "arm-phone", "--once"]
    words += ["--unmeasured", "--down", "1 Gbit", "--up", "1 Gbit", "--latency", "0 ms"]
    try:
        agent = start_module.command(*arm64.command(phone, f"{inside}/agent.zip:/opt/site", *words))
        agent.expect("joined", LIMIT_S)
        pod(start_module, server, 4)
        assert server.labels[0] == "arm-phone"
        Multiplication(server, (1, 48, 24, 48), grid(48, 48, 16, [0, 1, 2, 3, 4])).check(LIMIT_S)

        batches = [torch.randint(0, 29, (4, 7), generator=torch.Generator().manual_seed(i)) for i in range(3)]
        plain = model()
        expected = train(plain, plain, batches, **SETTINGS)
        trained = model()
        executor = Executor(server)
        steps = train(trained, distribute(trained, executor.run), batches, **SETTINGS)
        np.testing.assert_allclose([s.loss for s in steps], [s.loss for s in expected], rtol=0, atol=1e-5)

        columns = server.records.columns()
        done = int((columns["device"] == 0).sum())
        assert done > 2  # more than its share of the first product
        assert server.totals.checked_blocks == server.totals.blocks
        assert server.totals.wrong_blocks == server.totals.lost_devices == 0
        assert server.suspended == {}
        (enrolled,) = access.read().enrolled
        assert enrolled.name == "arm-phone"
    finally:
        server.stop()
    assert agent.wait(LIMIT_S) == 0, agent.output
    assert f"{done} blocks in" in agent.output
    assert "kernel onnxruntime" in agent.output or "onnxruntime: measured" in agent.output  # both could be used
