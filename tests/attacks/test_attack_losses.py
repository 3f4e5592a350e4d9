"""Verdicts after losses, and joins that cost next to nothing: work done in place of a lost fleet makes no run VALID,
and the host is not blamed for it; a device that joins nine times is fitted once, after the results are safe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import testbed.runs.real_devices
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.fidelity import DEGRADED, STEPS_AT_LEAST, VALID, HostLoad, Worked, judge
from emulator.model.samples import ProfileError, Samples
from ps.transport.attendance import LEFT, LOST, SUSPENDED, Attendance
from testbed.launch.pods import Death
from testbed.results.fleet_at_work import Begun, worked
from testbed.results.keeping import Keeping
from testbed.runs.display import Display
from testbed.runs.real_devices import MOST_FITS, write_devices
from testbed.runs.scenario import load_scenario

NO_OVERRIDES: dict[str, Any] = {}


def blocks(late_s: float = 0.0) -> dict[str, Any]:
    """A hundred modelled blocks, one second each."""
    sent_s = np.arange(100.0)
    due_s = sent_s + 1.0
    return {"sent_s": sent_s, "due_s": due_s, "received_s": due_s + late_s, "left_s": due_s + late_s / 2}


def there(emulated: int, real: int = 0) -> Attendance:
    attendance = Attendance()
    attendance.joined(range(emulated), ["e"] * emulated, {"kind": "pod"}, 0.0)
    for device in range(emulated, emulated + real):
        attendance.joined([device], [f"phone {device}"], {}, 0.0)
    attendance.mark()
    return attendance


def told(attendance: Attendance, begun: Begun, **given: Any) -> Worked:
    scenario = load_scenario("quickstart", given.pop("scenario", NO_OVERRIDES))
    asked = {"suspended": [], "deaths": [], "stood_still_s": []} | given
    return worked(scenario, 200, begun, attendance, **asked)


# ---- which devices did the work


def test_a_run_whose_whole_fleet_was_killed_and_replaced_by_a_laptop_is_not_valid() -> None:
    attendance = there(200)
    begun = Begun.of(attendance, 0)
    attendance.joined([200], ["laptop"], {}, 1.0)
    attendance.gone(range(200), LOST)
    deaths = [Death(pod, 100, "SIGKILL, not by us", restarted=False) for pod in range(2)]
    fleet = told(attendance, begun, deaths=deaths)
    found = judge(**blocks(), step_stretch=0.33, fleet=fleet)
    assert found.verdict == DEGRADED
    assert found.step_stretch is None, "the prediction is for another fleet"
    assert found.causes == [f"pod {pod} with 100 devices ended (SIGKILL, not by us)" for pod in range(2)]
    assert "200 of 200 emulated devices at the beginning, 0 at the end, at least 0" in found.reason
    assert "real ones 0, 1 and 0" in found.reason
    assert "too slow" not in found.reason


def test_half_a_fleet_killed_is_the_cause_and_not_the_host() -> None:
    attendance = there(200)
    begun = Begun.of(attendance, 0)
    attendance.gone(range(100), LOST)
    fleet = told(attendance, begun, deaths=[Death(0, 100, "SIGSEGV, not by us", restarted=True)])
    found = judge(**blocks(late_s=0.9), step_stretch=2.0, host=HostLoad(busy=1.0, own=1.0), fleet=fleet)
    assert found.verdict == DEGRADED
    assert "SIGSEGV" in found.reason
    assert "was started again" in found.reason
    assert "too slow" not in found.reason
    assert found.scale_suggested is None, "a slower clock brings no device back"


def test_silent_and_suspended_devices_are_named_as_causes() -> None:
    attendance = there(200)
    begun = Begun.of(attendance, 0)
    attendance.gone(range(30), LOST)
    attendance.gone([50, 51], SUSPENDED)
    fleet = told(attendance, begun, suspended=["what it returned was wrong"] * 2)
    assert fleet.unasked == (
        "30 devices fell silent or lost their connection",
        "2 devices were suspended: what it returned was wrong",
    )
    assert judge(**blocks(), fleet=fleet).verdict == DEGRADED
    assert (fleet.began, fleet.ended, fleet.least) == (200, 168, 168)


def test_losses_that_the_scenario_asks_for_are_no_reason() -> None:
    attendance = there(200)
    begun = Begun.of(attendance, 0)
    attendance.gone(range(30), LOST)
    attendance.gone([50], SUSPENDED)
    faults = {"faults": '[{at = "1 s", do = "kill"}, {at = "1 s", do = "lie", how = "noise", devices = 1}]'}
    scenario = load_scenario("quickstart").model_copy(update={"faults": load_scenario("quickstart", faults).faults})
    fleet = worked(scenario, 200, begun, attendance, ["what it returned was wrong"], [], [])
    assert fleet.unasked == ()
    assert judge(**blocks(), fleet=fleet).verdict == VALID


def test_expected_phones_that_left_are_named_and_unexpected_ones_are_not() -> None:
    for phones, unasked in ((2, ("of 2 phones at times only 1 were there",)), (0, ())):
        attendance = there(200, real=2)
        begun = Begun.of(attendance, 0)
        attendance.gone([200], LEFT)
        fleet = told(attendance, begun, scenario={"fleet.phones": str(phones)})
        assert fleet.unasked == unasked
        assert fleet.changed
        found = judge(**blocks(), step_stretch=3.0, fleet=fleet)
        assert found.step_stretch is None, "another fleet than the predicted one"
        assert found.verdict == (DEGRADED if unasked else VALID)


def test_a_complete_fleet_is_judged_by_the_host() -> None:
    attendance = there(200)
    fleet = told(attendance, Begun.of(attendance, 0))
    assert judge(**blocks(), step_stretch=1.02, fleet=fleet).verdict == VALID
    slow = judge(**blocks(), step_stretch=1.2, fleet=fleet)
    assert "the host was too slow" in slow.reason


@pytest.mark.parametrize("stretch", [0.33, STEPS_AT_LEAST - 0.01])
def test_a_step_much_shorter_than_predicted_is_as_invalid_as_a_longer_one(stretch: float) -> None:
    found = judge(**blocks(), step_stretch=stretch)
    assert found.verdict == DEGRADED
    assert "shorter than predicted" in found.reason
    assert judge(**blocks(), step_stretch=STEPS_AT_LEAST + 0.01).verdict == VALID


def test_a_server_that_stood_still_is_named_as_the_cause() -> None:
    attendance = there(200)
    fleet = told(attendance, Begun.of(attendance, 0), stood_still_s=[4.0, 2.0])
    found = judge(**blocks(late_s=0.5), step_stretch=1.6, fleet=fleet)
    assert found.verdict == DEGRADED
    assert "the run was interrupted: the server's process stood still for 6.0 s" in found.reason


# ---- joining is cheap


def fitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the profiles that are fitted from now on. None of them can be read."""
    found: list[str] = []

    def unreadable(path: Path) -> Samples:
        found.append(path.name)
        raise ProfileError("nothing that was measured")

    monkeypatch.setattr(testbed.runs.real_devices, "read_samples", unreadable)
    return found


def written(
    folder: Path, joins: list[tuple[str, str]], display: Display, now_s: Callable[[], float] = lambda: 0.0
) -> list[str]:
    """Real devices, each with a name and a profile, in the order of their joins."""
    attendance = Attendance()
    for device, (name, profile) in enumerate(joins):
        attendance.joined([device], [name], {"profile": profile}, 0.0)
    rows = pack_profiles([Profile(5e9, 1e-4, 1e6, 1e6, 0.01, 256_000_000, 4)] * len(joins))
    return write_devices(folder, attendance, [name for name, _ in joins], rows, display, Keeping(display.say), now_s)


def test_a_device_that_joins_nine_times_is_fitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, quiet = fitted(monkeypatch), Display(Console(quiet=True))
    assert written(tmp_path, [("phone", "its profile")] * 9, quiet) == ["phone"]
    assert fits == ["phone.json"]
    assert (tmp_path / "devices" / "phone.json").read_text(encoding="utf-8") == "its profile\n"


def test_the_same_profile_under_many_names_is_fitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, quiet = fitted(monkeypatch), Display(Console(quiet=True))
    assert len(written(tmp_path, [(f"phone-{n}", "the same") for n in range(9)], quiet)) == 9
    assert len(fits) == 1


@pytest.mark.parametrize(("seconds", "most"), [(0.0, MOST_FITS), (10.0, 7)])
def test_fitting_is_bounded_in_number_and_time_and_says_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    fits = fitted(monkeypatch)
    joins = [(f"phone-{n}", f"profile {n}") for n in range(20)]
    with (tmp_path / "said").open("w", encoding="utf-8") as file:
        names = written(tmp_path, joins, Display(Console(file=file)), lambda: seconds * len(fits))
    assert len(fits) == most
    assert len(names) == 20
    assert all((tmp_path / "devices" / f"{name}.toml").exists() for name in names), "with the figures it reported"
    assert f"{20 - most} real devices were not fitted" in (tmp_path / "said").read_text(encoding="utf-8")


@pytest.mark.slow
def test_results_are_on_disk_before_anything_is_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt during the fitting does not lose the results."""
    from testbed.runs import run as running

    seen: list[set[str]] = []

    def fitting(folder: Path, *rest: Any) -> list[str]:
        seen.append({path.name for path in folder.iterdir()})
        told = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        assert told["verdict"]
        return []

    monkeypatch.setattr(running, "write_devices", fitting)
    overrides = {"clock.kind": "virtual", "fleet.devices": "8", "data.batch": "2", "data.sequence": "16"}
    overrides |= {"training.steps": "1", "fleet.line_share": "1.0"}
    running.run(load_scenario("quickstart", overrides), tmp_path, Display(Console(quiet=True)))
    assert {"summary.json", "summary.txt", "steps.csv", "blocks.parquet", "ledger.parquet"} <= seen[0]
