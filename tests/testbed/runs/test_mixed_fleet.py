"""Phones among emulated devices, in real runs: waited for, marked in every table, and available as emulated devices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet
import pytest
import small_runs
from rich.console import Console
from small_runs import CLEAVE, RUN_LIMIT_S

from agent.protocol.profile import Profile, pack_profiles
from emulator.model.zoo import load_device
from ps.transport.attendance import MOST, MOST_DEVICE, Attendance
from testbed.results.keeping import Keeping
from testbed.runs.display import Display
from testbed.runs.fleets import make_fleet
from testbed.runs.real_devices import write_devices
from testbed.runs.scenario import ScenarioError, load_scenario

if TYPE_CHECKING:
    from conftest import Program, Start

SMALL = (*small_runs.SMALL, "--steps", "2")
FAST = ("--kernel", "numpy", "--down", "10 Gbit", "--up", "10 Gbit", "--latency", "0 ms", "--once")


def run_with(start_warm: Start, folder: Path, *options: str, phones: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """A complete run, with the phones started when it waits for them; its summary."""
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, "--results", str(folder), *options)
    address = re.search(r"--ps (tcp://\S+) ", run.expect("waiting for", RUN_LIMIT_S))
    assert address is not None
    agents: list[Program] = []
    for name, more in phones.items():
        agents.append(start_warm("agent", "--ps", address[1], "--name", name, *FAST, *more))
    assert run.wait(RUN_LIMIT_S) in (0, 3), run.output
    for agent in agents:
        assert agent.wait() == 0
    (results,) = folder.iterdir()
    summary: dict[str, Any] = json.loads((results / "summary.json").read_text(encoding="utf-8"))
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["flops_done"] == summary["flops_reference"]
    return summary | {"folder": results, "output": run.output}


@pytest.mark.slow
def test_a_run_waits_for_its_phones_and_marks_them_in_every_table(start_warm: Start, tmp_path: Path) -> None:
    summary = run_with(
        *(start_warm, tmp_path, "--devices", "6", "--set", "fleet.phones=2"),
        phones={"Pixel 8": (), "<old> phone": ("--unmeasured",)},
    )
    folder = summary["folder"]
    assert summary["devices"] == 6
    assert sorted(summary["real_devices"]) == ["<old> phone", "Pixel 8"]
    assert sum(summary["real_devices"].values()) > 0
    assert "phones: 2 of 2 (<old> phone, Pixel 8)" in summary["output"]
    assert "8 devices, 2 of them real" in summary["output"]
    assert "real devices" in (folder / "summary.txt").read_text(encoding="utf-8")
    blocks = pyarrow.parquet.read_table(folder / "blocks.parquet").to_pylist()
    marked = {block["device_name"] for block in blocks if block["real"]}
    assert marked == {name for name, count in summary["real_devices"].items() if count}
    assert not any("/" in name for name in marked)  # no emulated device among them
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert any(f"{name.replace('<', '&lt;').replace('>', '&gt;')} (real)" in page for name in marked)
    assert (folder / "steps.csv").read_text().splitlines()[1].split(",")[4] == "2"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {event["name"] for event in events if event["event"] == "real"} == set(summary["real_devices"])

    # and they can be emulated: one from its measurement, one from its own figures
    assert summary["device_files"] == ["old-phone", "pixel-8"]
    measured, said = (load_device(str(folder / "devices" / f"{name}.toml")) for name in ("pixel-8", "old-phone"))
    assert (measured.basis, said.basis) == ("measured", "estimate")
    assert measured.performance is not None
    assert measured.budget_bytes == said.budget_bytes == 512_000_000
    profile = json.loads((folder / "devices" / "pixel-8.json").read_text())
    assert profile["device"]["name"] == "Pixel 8"
    kinds = f'{{"{folder / "devices" / "pixel-8.toml"}" = 1.0}}'
    twins = load_scenario("quickstart", {"fleet.kinds": kinds, "fleet.devices": "4"})
    assert make_fleet(twins.fleet, twins.links, 1).models is not None


@pytest.mark.slow
def test_phones_alone_train_too(start_warm: Start, tmp_path: Path) -> None:
    summary = run_with(
        *(start_warm, tmp_path, "--devices", "0", "--set", "fleet.phones=1"), phones={"phone": ("--unmeasured",)}
    )
    assert summary["real_devices"] == {"phone": summary["blocks"]}


@pytest.mark.slow
def test_a_run_without_its_phones_says_how_a_phone_joins_and_ends(start_warm: Start, tmp_path: Path) -> None:
    options = ("--devices", "3", "--set", "fleet.phones=2", "--set", "fleet.phones_wait=200 ms")
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, *options, "--results", str(tmp_path))
    assert run.wait(RUN_LIMIT_S) == 1
    said = run.expect("0 of 2 phones joined within 200 ms")
    assert "python -m agent --ps tcp://" in said
    assert "--set fleet.phones=0" in said
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"fleet.devices": "0"}, "unless phones = 2 says how many real ones train"),
        ({"fleet.phones": "1", "clock.kind": "virtual"}, "real devices work in real time"),
        ({"fleet.phones": "-1"}, "phones"),
        ({"fleet.phones_wait": "soon"}, "phones_wait"),
    ],
)
def test_impossible_settings_of_phones_are_refused(overrides: dict[str, str], words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        load_scenario("quickstart", overrides)


# ---- data from unknown devices


@pytest.mark.parametrize(
    "profile",
    [
        "",
        "nonsense",
        '{"format": "cleave-profile", "version": 1}',
        json.dumps({"format": "cleave-profile", "version": 1, "shapes": [[1, 1, 1, 1]] * 2000, "samples": []}),
    ],
)
def test_for_an_invalid_profile_the_figures_of_the_join_are_used(tmp_path: Path, profile: str) -> None:
    attendance = Attendance()
    about = {"profile": profile, "system": "Android"}
    attendance.joined([0], ["../../my/phone"], about, 0.0)
    row = pack_profiles([Profile(5e9, 1e-4, 1e6, 1e6, 0.01, 256_000_000, 4)])
    quiet = Display(Console(quiet=True))
    found = write_devices(tmp_path, attendance, ["../../my/phone"], row, quiet, Keeping(quiet.say))
    assert found == ["my-phone"]
    kind = load_device(str(tmp_path / "devices" / "my-phone.toml"))
    assert (kind.kind, kind.flops, kind.overhead_s, kind.budget_bytes) == ("phone", 5e9, 1e-4, 256_000_000)


def test_records_of_a_device_that_joins_and_leaves_for_ever_are_bounded() -> None:
    attendance = Attendance()
    for number in range(3 * MOST):
        name = f"device {number}"
        about = {"device": name, "profile": "x" * 10**6}
        assert attendance.moved(about, b"%d" % number) == b""
        attendance.joined([number], [name], about, float(number))
        assert attendance.present == {number}
        attendance.left(number, name, "why not", None, 0, float(number))
        attendance.gone([number])
        attendance.stays_away(f"other {number}", "why not", None)
    assert len(attendance.departures) == len(attendance.about) == len(attendance.away) == MOST
    assert sum(len(text) for about in attendance.about.values() for text in about.values()) < 10**6
    assert not attendance.present
    assert attendance.count == 0


def test_pods_are_not_real_devices_and_are_not_recorded() -> None:
    attendance = Attendance()
    attendance.joined(range(5), ["e"] * 5, {"kind": "pod"}, 0.0)
    assert attendance.count == 5
    assert attendance.left(3, "e", "it left (emulated)", None, 2, 1.0) == ""
    assert (attendance.real, attendance.departures) == (set(), [])
    assert np.array_equal(list(attendance.present), [])


def test_a_device_that_joins_on_another_connection_names_its_old_one() -> None:
    attendance, about = Attendance(), {"device": "mine"}
    assert [attendance.moved(about, connection) for connection in (b"one", b"one", b"two")] == [b"", b"", b"one"]
    assert attendance.moved(about | {"kind": "pod"}, b"three") == b"", "a pod is not one device"
    assert attendance.moved({}, b"four") == b""
    assert attendance.moved(about, b"five") == b"two"
    long = {"device": "x" * (MOST_DEVICE + 1)}
    assert [attendance.moved(long, connection) for connection in (b"one", b"two")] == [b"", b""], "it is not kept"
