"""The real commands, from invitation to work: cleave run --listen, cleave invite, the agent, cleave devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import small_runs
from small_runs import RUN_LIMIT_S

from agent.identity.invitation import parse_link

if TYPE_CHECKING:
    from conftest import Start

SMALL = ("--devices", "4", "--steps", "6", *small_runs.SMALL)
FAST = ("--unmeasured", "--kernel", "numpy", "--down", "10 Gbit", "--up", "10 Gbit", "--latency", "0 ms")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_STATE", str(tmp_path / "server"))
    monkeypatch.setenv("CLEAVE_AGENT_STATE", str(tmp_path / "agent"))
    return tmp_path


def _json(start: Start, *command: str) -> Any:
    program = start("cleave", *command, "--format", "json")
    assert program.wait() == 0, program.output
    return json.loads(program.output)


@pytest.mark.slow
def test_a_device_is_invited_into_a_run_works_and_is_revoked(
    start_warm: Start, start_light: Start, state: Path
) -> None:
    waits = ("--set", "fleet.phones=1")  # the run begins when the device has joined
    run = start_warm("cleave", "run", "quickstart", *SMALL, *waits, "--listen", "tcp://127.0.0.1:0", cwd=state)
    address = run.expect("invited devices may join at", RUN_LIMIT_S).split(" at ")[1].split(",")[0]
    invited = _json(start_light, "invite", "--expires", "2 days")
    link = parse_link(invited["link"])
    assert link.endpoints == [address]
    agent = start_warm("agent", "--name", "my-phone", *FAST, "--invitation", invited["link"])
    agent.expect("joined", RUN_LIMIT_S)
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    (folder,) = (state / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["real_devices"]["my-phone"] > 0
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["flops_done"] == summary["flops_reference"]
    (device,) = _json(start_light, "devices")
    assert (device["name"], device["state"], device["invitation"]) == ("my-phone", "enrolled", invited["id"])
    (invitation,) = _json(start_light, "invitations")
    assert (invitation["state"], invitation["used"]) == ("used", "1 of 1")
    assert start_light("cleave", "devices", "revoke", device["fingerprint"]).wait() == 0
    assert _json(start_light, "devices")[0]["state"] == "revoked"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("invite",), "no server listens"),
        (("invite", "--address", "192.0.2.7:5555", "--uses", "0"), "between 1 and"),
        (("invite", "--address", "192.0.2.7:5555", "--expires", "never"), "not a duration"),
        (("invite", "--address", "192.0.2.7"), "has no port"),
        (("devices", "revoke", "unknown"), "no device 'unknown'"),
        (("invitations", "revoke", "nothing"), "no invitation 'nothing'"),
        (("run", "quickstart", "--set", "server.host=0.0.0.0"), "anyone could join there"),
        (("run", "quickstart", "--listen", "0.0.0.0"), "tcp://0.0.0.0:5555"),
    ],
)
def test_a_mistake_gets_one_clear_line(start_light: Start, state: Path, command: tuple[str, ...], words: str) -> None:
    program = start_light("cleave", *command)
    assert program.wait() == 2
    assert words in program.output
    assert "Traceback" not in program.output


def test_an_invitation_shows_a_link_a_command_and_a_code(start_light: Start, state: Path) -> None:
    program = start_light("cleave", "invite", "--address", "192.0.2.7:5555")
    assert program.wait() == 0
    link = next(line for line in program.said if line.startswith("cleave://"))
    assert parse_link(link).endpoints == ["tcp://192.0.2.7:5555"]
    assert f"python -m agent --invitation '{link}'" in program.output
    assert "█" in program.output
