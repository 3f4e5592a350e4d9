"""The error for a scenario that needs a Docker engine where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.protocol.errors import UserError
from emulator.containers.engine import NoEngine
from testbed.launch.container_host import ContainerHost
from testbed.runs.scenario import Launch


def test_without_an_engine_the_error_is_one_line_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(NoEngine, match=r"no Docker engine answers at .*: start it, set DOCKER_HOST .* \"processes\"$"):
        ContainerHost(Launch(kind="docker"), 1)
    monkeypatch.setenv("DOCKER_HOST", "ssh://192.0.2.7")
    with pytest.raises(UserError, match=r"do not work over ssh: forward the engine's socket"):
        ContainerHost(Launch(kind="docker"), 1)
