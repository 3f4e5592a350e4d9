"""From a profile to a device file: `cleave calibrate`, and its messages for profiles that cannot be used."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from made_profile import TRUTH, profile, written

from agent.measure.shapes import shapes
from agent.protocol.errors import UserError
from agent.protocol.profile import pack_profiles
from emulator.model.calibration import Calibration, calibrate, drift
from emulator.model.fleet import draw_fleet
from emulator.model.samples import ProfileError, Samples, read_samples
from emulator.model.zoo import load_device, parse_device, read_device
from ps.planning.planner import Planner
from testbed.launch.processes import models_of
from testbed.runs.scenario import load_scenario, parse_assignments
from testbed.twins import calibrate as calibration
from testbed.virtual.predict import ModelledFleet

if TYPE_CHECKING:
    from conftest import Program, Start


# ---- fitting


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return read_samples(written(tmp_path_factory.mktemp("samples"), profile()))


@pytest.fixture(scope="module")
def found(samples: Samples) -> Calibration:
    """Shared and not changed: a fit takes most of a second."""
    return calibrate(samples)


@pytest.mark.slow
def test_the_faster_kernel_is_fitted_and_the_error_is_that_of_held_out_shapes(found: Calibration) -> None:
    assert found.kernel == "numpy"
    assert found.median_error < 0.05
    assert found.median_error == pytest.approx(np.median(np.abs(found.error)))
    fresh = np.array(shapes(50, 9, 1e9, 1 << 25))
    assert found.model.seconds(fresh) == pytest.approx(TRUTH.seconds(fresh), rel=0.15)
    assert found.model.spread[0] < 1 < found.model.spread[-1]
    assert found.model.rested == 1.0


@pytest.mark.slow
def test_a_kernel_can_be_chosen(samples: Samples, found: Calibration) -> None:
    slow = calibrate(samples, "onnxruntime")
    assert slow.large_flops == pytest.approx(found.large_flops / 2, rel=0.1)
    with pytest.raises(ProfileError, match="abacus"):
        calibrate(samples, "abacus")


@pytest.mark.slow
def test_a_disturbance_by_another_process_does_not_change_the_typical_time(tmp_path: Path) -> None:
    document = profile(40, 3)
    document["device"]["cpu_quota"] = {"quota_us": 2500, "period_us": 10000}
    quiet = calibrate(read_samples(written(tmp_path, document)))
    for sample in document["samples"][::2]:
        sample[6] += 5 * sample[6]  # one of its calls: the median stays the same
    busy = calibrate(read_samples(written(tmp_path, document)))
    assert busy.measured_s.tolist() == quiet.measured_s.tolist()


@pytest.mark.slow
def test_a_profile_of_version_1_is_still_read(tmp_path: Path, found: Calibration) -> None:
    document = profile()
    document["version"], document["samples"] = 1, [sample[:7] for sample in document["samples"]]
    old = calibrate(read_samples(written(tmp_path, document)))
    assert old.measured_s == pytest.approx(found.measured_s)


def test_a_processor_clock_too_coarse_for_one_call_is_read_over_all_of_them(tmp_path: Path) -> None:
    document = profile(24, 1)
    for sample in document["samples"]:
        sample[8] = [0.0, 0.0, 0.0]
    for sample in read_samples(written(tmp_path, document)).samples:
        assert sample.typical_processor_s == sample.processor_s / sample.calls


@pytest.mark.slow
def test_pauses_count_only_under_a_quota(tmp_path: Path) -> None:
    document = profile()
    document["pauses"]["ran_and_away_s"] = [[0.004, 0.012]] * 50
    assert calibrate(read_samples(written(tmp_path, document))).model.pause_s == 0.0
    document["device"]["cpu_quota"] = {"quota_us": 2500, "period_us": 10000}
    model = calibrate(read_samples(written(tmp_path, document))).model
    assert [model.run_s, model.pause_s] == pytest.approx([0.004, 0.012])
    assert [model.down_s, model.up_s] == pytest.approx([4e-8, 8e-8])  # processor time, stretched four times


def test_the_link_time_is_the_transfer_time_beyond_a_round_trip(tmp_path: Path) -> None:
    link = calibration.link_figures(read_samples(written(tmp_path, profile())))
    assert link == pytest.approx({"down_bps": 8e7, "up_bps": 4e7, "latency_s": 0.01})


@pytest.mark.slow
def test_a_device_file_states_its_source_and_can_be_read_back(samples: Samples, found: Calibration) -> None:
    device = parse_device("my-phone", calibration.device_file(samples, found, "phone"))
    assert (device.basis, device.kind, device.budget_bytes) == ("measured", "phone", 256_000_000)
    assert device.flops == pytest.approx(found.large_flops, rel=1e-3)
    assert "2026-01-01" in device.source
    assert 'a "chip"' in device.source
    fresh = np.array(shapes(50, 9, 1e9, 1 << 25))
    assert device.performance is not None
    assert device.performance.seconds(fresh) == pytest.approx(found.model.seconds(fresh), rel=1e-3)


def test_a_temporary_slowdown_of_all_shapes_is_divided_out() -> None:
    rng = np.random.default_rng(0)
    shape = np.concatenate([rng.permutation(40) for _ in range(5)])
    truth, slower = rng.uniform(-9, -5, 40), np.zeros(200)
    slower[60:140] = np.log(1.5)  # for two of five rounds
    logs = truth[shape] + slower + rng.normal(0, 0.01, 200)
    cleaned = logs - drift(shape, logs)
    off = np.array([np.median(cleaned[shape == number]) for number in range(40)]) - truth
    assert np.abs(off - np.median(off)).max() < 0.03
    assert np.abs(drift(shape[:40], logs[:40])).max() == 0.0  # measured once each: no drift can be found


# ---- a fleet of such devices


@pytest.fixture
def device_path(tmp_path: Path, samples: Samples, found: Calibration) -> Path:
    path = tmp_path / "my-phone.toml"
    path.write_text(calibration.device_file(samples, found, "phone"), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_scenario_may_name_a_device_file_and_its_devices_count_as_measured(device_path: Path) -> None:
    kinds = f'fleet.kinds={{"{device_path}" = 1.0, "pixel-8" = 1.0}}'
    scenario = load_scenario("quickstart", parse_assignments([kinds]))
    fleet = draw_fleet(50, scenario.fleet.kinds, scenario.fleet.networks, seed=3)
    mine = np.array([name == str(device_path) for name in fleet.device_names])
    assert fleet.models is not None
    assert (fleet.models.of >= 0).tolist() == mine.tolist()
    assert fleet.basis == {"measured": int(mine.sum()), "estimate": int((~mine).sum())}
    assert fleet.profiles["flops"][mine] == pytest.approx(load_device(str(device_path)).flops)
    joined = models_of(fleet, ["a real one", f"{fleet.device_names[7]}/{fleet.network_names[7]}/7"])
    assert joined is not None
    assert joined.of.tolist() == [-1, fleet.models.of[7]]
    assert joined.seeds[1] == (3, 7)
    ModelledFleet(pack_profiles([]), Planner(), models=joined)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("work_s = ", "work_s = -", "work_s"),
        ('basis = "measured"', 'basis = "estimate"', "basis"),
        ("[performance]", "[performance]\ncolour = 1.0", "colour"),
        ("[performance]", "performance = 3\n[rest]", "performance"),
    ],
)
def test_a_damaged_device_file_is_refused_with_its_name(device_path: Path, old: str, new: str, said: str) -> None:
    device_path.write_text(device_path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=said) as raised:
        read_device(device_path)
    assert str(device_path) in str(raised.value)


def test_a_missing_device_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_device(str(tmp_path / "missing.toml"))


# ---- profiles that cannot be used


def spoil(**changes: Any) -> dict[str, Any]:
    return profile(24, 1) | changes


def with_sample(at: int, value: Any) -> dict[str, Any]:
    document = profile(24, 1)
    document["samples"][5][at] = value
    return document


BAD = {
    "another version": (json.dumps(spoil(version=3)), "version 3, this release reads version 1 and 2"),
    "no version": (json.dumps(spoil(version=None)), "version None, this release reads version 1 and 2"),
    "version 1 that calls itself 2": (json.dumps(spoil(samples=[s[:7] for s in profile(24, 1)["samples"]])), "damaged"),
    "a quartile of zero": (json.dumps(with_sample(7, [0.0, 0.0, 1.0])), "took 0.0 seconds"),
    "a quartile that is NaN": (json.dumps(with_sample(8, [1.0, float("nan"), 1.0])), "took nan seconds"),
    "another format": (json.dumps({"format": "cookies"}), "not a device profile"),
    "a list": ("[1, 2]", "not a device profile"),
    "truncated": (json.dumps(profile(24, 1))[:-500], "only the beginning"),
    "empty": ("", "not JSON"),
    "zeros": (json.dumps(with_sample(5, [0.0])), "took 0.0 seconds"),
    "a zero total": (json.dumps(with_sample(4, 0)), "took 0 seconds"),
    "NaN": (json.dumps(with_sample(4, float("nan"))), "took nan seconds"),
    "infinite": (json.dumps(with_sample(5, [float("inf")])), "took inf seconds"),
    "negative": (json.dumps(with_sample(4, -1.0)), "took -1.0 seconds"),
    "no such shape": (json.dumps(with_sample(1, 99)), "sample 5"),
    "no number": (json.dumps(with_sample(4, "long")), "took 'long' seconds"),
    "a sample cut short": (json.dumps(spoil(samples=[[0, 0, 0, 1, 1.0]])), "damaged"),
    "rounds without time": (json.dumps(spoil(rounds=[[0.0, 0.0]])), "all rounds took 0.0 seconds"),
    "an empty shape": (json.dumps(spoil(shapes=[[1, 0, 1, 1]])), "shape"),
    "no samples": (json.dumps({k: v for k, v in profile(24, 1).items() if k != "samples"}), "damaged"),
    "nothing measured": (json.dumps(spoil(samples=[])), "no samples"),
    "few shapes": (json.dumps(profile(5, 1)), "5 shapes, at least 20"),
    "nonsense pauses": (json.dumps(spoil(pauses={"ran_and_away_s": [[1, float("nan")]]})), "pause"),
    "a dead link": (
        json.dumps(spoil(link={"round_trip_s": [0.0], "down": [], "up": []})),
        "the link took 0.0 seconds",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_profile_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    text, said = BAD[case]
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError) as raised:
        calibrate(read_samples(path))
    assert said in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_profile_is_refused() -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        read_samples(Path("nowhere.json"))


# ---- the command


@pytest.mark.slow
def test_the_command_prints_the_error_draws_and_writes(start_light: Start, tmp_path: Path) -> None:
    path = written(tmp_path, profile())
    out, svg = tmp_path / "phone.toml", tmp_path / "phone.svg"
    options = ("--out", str(out), "--svg", str(svg), "--kind", "phone")
    table = start_light("cleave", "calibrate", str(path), *options)
    as_json = start_light("cleave", "calibrate", str(path), *options, "--format", "json")
    assert table.wait() == 0, table.output
    titles = ("error on held-out shapes", "drift while measuring", "worst shapes", "predicted (up) against measured")
    for said in (*titles, "phone.toml"):
        assert said in table.output
    assert read_device(out).basis == "measured"
    assert len(xml.etree.ElementTree.parse(svg).findall(".//{http://www.w3.org/2000/svg}circle")) == 60
    assert as_json.wait() == 0, as_json.output
    found = json.loads("\n".join(as_json.said))
    assert 0 < found["median_error"] <= found["p95_error"]
    assert len(found["held_out"]) == 60


def refused(program: Program) -> str:
    assert program.wait() == 2, program.output
    assert len(program.errors) == 1, program.output
    return program.errors[0]


@pytest.mark.slow
def test_a_mistake_gets_one_line_and_exit_code_2(start_light: Start, tmp_path: Path) -> None:
    good, bad = written(tmp_path, profile(24, 1)), tmp_path / "bad.json"
    bad.write_text(json.dumps(profile(24, 1))[:1000], encoding="utf-8")
    programs = {
        "only the beginning": start_light("cleave", "calibrate", str(bad)),
        "--kind is toaster": start_light("cleave", "calibrate", str(good), "--kind", "toaster"),
        "cannot write": start_light("cleave", "calibrate", str(good), "--out", str(tmp_path / "no" / "x.toml")),
        "cannot read": start_light("cleave", "twin", str(tmp_path / "missing.json")),
    }
    for said, program in programs.items():
        assert said in refused(program)
