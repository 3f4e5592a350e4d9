"""Promises of testbed.runs.scenario: a right file loads, and a mistake is reported with its place and its remedy."""

from __future__ import annotations

import contextlib
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from emulator.model.fleet import UNIFORM, draw_fleet, uniform_fleet
from testbed.runs.scenario import (
    Scenario,
    ScenarioError,
    dump_scenario,
    load_scenario,
    parse_assignments,
    scenario_names,
)
from testbed.runs.toml_lines import line_of_each_key, parse_key

QUICKSTART = (resources.files("testbed") / "scenarios" / "quickstart.toml").read_text(encoding="utf-8")


def write(folder: Path, old: str = "", new: str = "") -> Path:
    """The quickstart with one change, as mine.toml."""
    assert old in QUICKSTART
    path = folder / "mine.toml"
    path.write_text(QUICKSTART.replace(old, new, 1) if old else QUICKSTART, encoding="utf-8")
    return path


def line_of(text: str) -> int:
    """Number of the first line that begins with the text."""
    return f"\n{QUICKSTART}".split(f"\n{text}")[0].count("\n") + 1


@pytest.mark.parametrize("name", scenario_names())
def test_every_packaged_scenario_loads_and_its_fleet_can_be_drawn(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.fleet.devices >= (1000 if scenario.launch.kind == "processes" else 50)
    assert scenario.training.steps >= (2 if name == "opt-125m" else 5), "a step of a real model takes a minute"
    if scenario.fleet.uniform is None:
        draw_fleet(10, scenario.fleet.kinds, scenario.fleet.networks, scenario.seed)
    else:
        uniform_fleet(scenario.fleet.uniform, 10, scenario.seed)


@pytest.mark.parametrize("name", scenario_names())
def test_every_key_of_a_packaged_scenario_has_a_comment(name: str) -> None:
    text = (resources.files("testbed") / "scenarios" / f"{name}.toml").read_text(encoding="utf-8")
    bare = [line for line in text.splitlines() if re.match(r"\S+ = ", line) and " # " not in line]
    assert not bare


def test_a_scenario_is_found_by_its_path(tmp_path: Path) -> None:
    assert load_scenario(str(write(tmp_path))).fleet.devices == 1000


def test_for_an_unknown_scenario_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ScenarioError, match='unknown scenario "quikstart"; did you mean quickstart'):
        load_scenario("quikstart")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"there is no file nowhere/x\.toml"):
        load_scenario("nowhere/x.toml")


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ("devices = 1000", "devcies = 1000", "devices = ", 'unknown key "devcies" in [fleet]; did you mean "devices"?'),
        ("seed = 1", "devices = 1", "seed = ", 'unknown key "devices" at the top; it belongs in [fleet]'),
        ("[links]", "[lnks]", "[links]", 'unknown key "lnks" at the top; did you mean "links"?'),
        ("devices = 1000", "devices = 0", "devices = ", '"devices" in [fleet] is 0; it must be greater than or equal'),
        ("devices = 1000", 'devices = "10"', "devices = ", '"devices" in [fleet] is "10"; it must be a valid integer'),
        ("devices = 1000", "devices = ", "devices = ", "invalid value"),
        ('pods = "auto"', "pods = 0", "pods = ", 'it must be "auto" or a whole number'),
        ("steps = 5", "", "[training]", 'key "steps" is missing in [training]'),
        ("learning_rate = 1e-3", "learning_rate = nan", "learning_rate", "finite"),
        ("pixel-8 = 14", "pixel-88 = 14", "pixel-8 = ", 'unknown device "pixel-88"; nearest: pixel-8'),
        ("pixel-8 = 14", "pixel-8 = 0", "pixel-8 = ", "it must be greater than 0"),
        ("uk-ftth = 22", "uk-fth = 22", "uk-ftth", 'unknown network "uk-fth"; nearest: uk-ftth'),
        ('kind = "wall"', 'kind = "vrtual"', 'kind = "wall"', 'it must be "wall", "scaled", "virtual" or "auto"'),
        ('kind = "wall"', 'kind = "scaled"', "[clock]", "needs scale, for example scale = 4"),
        ('kind = "wall"', "scale = 0.5", 'kind = "wall"', "it must be greater than or equal to 1"),
        ('kind = "wall"', 'kind = "wall"\nscale = 4', "[clock]", 'scale belongs to kind = "scaled"'),
        ('kind = "wall"', 'kind = "auto"\narithmetic = false', "[clock]", 'belongs to kind = "virtual"'),
        ("port = 0", "port = 65536", "port = ", "less than or equal to 65535"),
        ('name = "quickstart"', 'name = "../x"', "name = ", "it names a folder"),
        ('text = "stdlib"', 'text = "no.txt"', "text = ", 'no such file; give the path of a text file, or "stdlib"'),
        ('name = "opt-tiny"', "", "[model]", "one of the two"),
        ("micro_batches = 1", "micro_batches = 0", "micro_batches", "greater than or equal to 1"),
        ('kind = "packed"', 'kind = "pcked"', 'kind = "packed"', 'it must be "packed" or "grid"'),
        ("keep = true", "keep = 1", "keep = ", "it must be a valid boolean"),
        (
            "devices = 1000",
            'devices = 1000\nuniform = "paper"',
            "[fleet]",
            "leave out [fleet.kinds] and [fleet.networks]",
        ),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_remedy(
    tmp_path: Path, old: str, new: str, place: str, message: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(str(write(tmp_path, old, new)))
    (told,) = str(caught.value).splitlines()  # one mistake, one line
    assert told.startswith(f"mine.toml, line {line_of(place)}: ")
    assert message in told


def traced(folder: Path, network: str = "uk-ftth", down: bytes | None = b"0\n1\n", up: bytes | None = b"2\n") -> str:
    """The quickstart with a link trace of these bytes beside it."""
    for way, data in (("down", down), ("up", up)):
        if data is not None:
            (folder / f"drive.{way}").write_bytes(data)
    heading = next(line for line in QUICKSTART.splitlines() if line.startswith("[links.traces]"))
    return str(write(folder, heading, f'{heading}\n{network} = "drive"'))


def test_a_networks_link_trace_is_found_beside_the_scenario_and_written_with_its_path(tmp_path: Path) -> None:
    scenario = load_scenario(traced(tmp_path))
    assert scenario.links.traces == {"uk-ftth": str(tmp_path / "drive")}
    assert scenario.links.effects == "full"
    (tmp_path / "again.toml").write_text(dump_scenario(scenario), encoding="utf-8")
    assert load_scenario(str(tmp_path / "again.toml")) == scenario


def test_a_link_trace_can_be_given_as_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(tmp_path)
    monkeypatch.chdir(tmp_path)
    scenario = load_scenario("quickstart", {"links.traces.uk-ftth": "drive", "links.effects": "rates"})
    assert scenario.links.traces == {"uk-ftth": str(tmp_path / "drive")}
    assert scenario.links.effects == "rates"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ({"down": None, "up": None}, "drive.down nor"),
        ({"up": None}, "there is drive.down but no drive.up; a link needs both directions"),
        ({"down": None}, "there is drive.up but no drive.down; a link needs both directions"),
        ({"down": b""}, "drive.down: it is empty"),
        ({"down": b"1\nfast\n"}, 'drive.down, line 2: "fast" is not an integer'),
        ({"up": b"5\n4\n"}, "drive.up, line 2: 4 comes after 5; the milliseconds must not fall"),
        ({"network": "uk-fth"}, 'unknown network "uk-fth"; nearest: uk-ftth'),
    ],
)
def test_a_mistake_in_a_link_trace_gets_one_line(tmp_path: Path, mistake: dict[str, Any], told: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(traced(tmp_path, **mistake))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"mine.toml, line {line_of('[links.traces]') + 1}: ")
    assert told in line


def test_a_link_trace_of_a_network_that_no_device_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r'\[links.traces\] names "uk-gfast", which no device has'):
        load_scenario(traced(tmp_path, network="uk-gfast"))
    with pytest.raises(ScenarioError, match=r"which no device has; \[fleet.networks\] has none"):
        load_scenario(traced(tmp_path), {"fleet.uniform": "paper"})


def test_unknown_link_effects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r'"effects" in .links. is "some"; it must be "rates" or "full"'):
        load_scenario(str(write(tmp_path)), {"links.effects": "some"})


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(str(write(tmp_path)), {"fleet.devices": "0", "training.stps": "4"})
    assert len(str(caught.value).splitlines()) == 2


def test_model_name_and_config_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    both = 'name = "opt-tiny"\nconfig = "config.json"'
    with pytest.raises(ScenarioError, match="one of the two"):
        load_scenario(str(write(tmp_path, 'name = "opt-tiny"', both)))


def test_a_path_in_a_file_is_relative_to_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("to be")
    scenario = load_scenario(str(write(tmp_path, '"stdlib"', '"mine.txt"')))
    assert scenario.data.text == str(tmp_path / "mine.txt")


def test_a_path_in_an_override_is_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text("to be")
    monkeypatch.chdir(tmp_path)
    assert load_scenario("quickstart", {"data.text": "mine.txt"}).data.text == str(tmp_path / "mine.txt")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="not a text file"):
        load_scenario(str(path))


def test_a_scenario_without_a_name_is_named_after_its_file(tmp_path: Path) -> None:
    assert load_scenario(str(write(tmp_path, 'name = "quickstart"', ""))).name == "mine"


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("training.steps", "10", {"training": {"steps": 10}}),
        ("training.learning_rate", "2e-4", {"training": {"learning_rate": 2e-4}}),
        ("model.name", "llama-tiny", {"model": {"name": "llama-tiny"}}),
        ("fleet.pods", "2", {"fleet": {"pods": 2}}),
        ("fleet.kinds.iphone-x", "5", {"fleet": {"kinds": {"iphone-x": 5.0}}}),
    ],
)
def test_an_override_is_read_as_toml_or_as_plain_text(key: str, text: str, expected: dict[str, object]) -> None:
    def contains(whole: object, part: object) -> bool:
        if isinstance(part, dict):
            return isinstance(whole, dict) and all(contains(whole[name], part[name]) for name in part)
        return whole == part

    assert contains(load_scenario("quickstart", {key: text}).model_dump(), expected)


def test_an_override_of_a_table_replaces_it() -> None:
    assert load_scenario("quickstart", {"fleet.kinds": "{ pixel-8 = 1 }"}).fleet.kinds == {"pixel-8": 1.0}


def test_naming_a_model_overrides_the_config_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = write(tmp_path, 'name = "opt-tiny"', 'config = "config.json"')
    assert load_scenario(str(path)).model.config == str(tmp_path / "config.json")
    assert load_scenario(str(path), {"model.name": "opt-tiny"}).model.config is None


# ---- a fleet of shares, or a uniform one

KINDS_AND_NETWORKS = QUICKSTART[QUICKSTART.index("[fleet.kinds]") : QUICKSTART.index("[planner]")]


@pytest.mark.parametrize("name", UNIFORM)
def test_a_uniform_fleet_needs_neither_kinds_nor_networks(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, KINDS_AND_NETWORKS, "")
    path.write_text(path.read_text().replace("devices = 1000", f'devices = 1000\nuniform = "{name}"', 1))
    fleet = load_scenario(str(path)).fleet
    assert (fleet.uniform, fleet.kinds, fleet.networks) == (name, {}, {})


def test_an_empty_fleet_is_reported_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"\[fleet\.kinds\] and of networks in \[fleet\.networks\], at least one"):
        load_scenario(str(write(tmp_path, KINDS_AND_NETWORKS, "")))


@pytest.mark.parametrize("missing", ["kinds", "networks"])
def test_a_fleet_needs_both_devices_and_networks(missing: str) -> None:
    with pytest.raises(ScenarioError, match="at least one each"):
        load_scenario("quickstart", {f"fleet.{missing}": "{}"})


def test_a_uniform_fleet_named_by_an_option_overrides_the_shares_of_the_file() -> None:
    fleet = load_scenario("quickstart", {"fleet.uniform": "extreme"}).fleet
    assert (fleet.uniform, fleet.kinds, fleet.networks) == ("extreme", {}, {})


def test_shares_named_by_an_option_override_the_uniform_fleet_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "uniform.toml"
    path.write_text(dump_scenario(load_scenario("quickstart", {"fleet.uniform": "paper", "planner.keep": "true"})))
    shares = {"fleet.kinds.pixel-8": "1", "fleet.networks": "{ uk-ftth = 1 }"}
    fleet = load_scenario(str(path), shares).fleet
    assert (fleet.uniform, fleet.kinds, fleet.networks) == (None, {"pixel-8": 1.0}, {"uk-ftth": 1.0})


def test_an_unknown_uniform_fleet_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match=r'--set fleet\.uniform: .* is "papre"; it must be "paper", "moderate" or'):
        load_scenario("quickstart", {"fleet.uniform": "papre"})


# ---- micro-batches


@pytest.mark.parametrize(("batch", "parts"), [(8, 3), (8, 16), (1, 2), (10, 4)])
def test_micro_batches_that_do_not_divide_the_batch_are_reported_with_both_numbers(batch: int, parts: int) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario("quickstart", {"data.batch": str(batch), "training.micro_batches": str(parts)})
    (told,) = str(caught.value).splitlines()
    assert f"training.micro_batches is {parts}" in told
    assert f"data.batch, which is {batch}" in told


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_micro_batches_that_divide_the_batch_are_accepted(parts: int) -> None:
    scenario = load_scenario("quickstart", {"data.batch": "8", "training.micro_batches": str(parts)})
    assert scenario.training.micro_batches == parts


def test_by_default_a_batch_is_undivided_plans_are_packed_and_weights_kept(tmp_path: Path) -> None:
    planner = QUICKSTART[QUICKSTART.index("[planner]") : QUICKSTART.index("[links]")]
    path = write(tmp_path, planner, "")
    path.write_text(re.sub(r"micro_batches = .*\n", "", path.read_text()))
    scenario = load_scenario(str(path))
    assert (scenario.training.micro_batches, scenario.planner.kind, scenario.planner.keep) == (1, "packed", True)


@pytest.mark.parametrize("keep", ["true", "false"])
@pytest.mark.parametrize("fleet", [{}, {"fleet.uniform": "moderate"}], ids=["shares", "uniform"])
def test_every_kind_of_scenario_survives_writing(tmp_path: Path, keep: str, fleet: dict[str, str]) -> None:
    scenario = load_scenario("quickstart", {"planner.keep": keep, "planner.kind": "grid", **fleet})
    path = tmp_path / "scenario.toml"
    path.write_text(dump_scenario(scenario), encoding="utf-8")
    assert load_scenario(str(path)) == scenario


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("fleet.devices", "0", '--set fleet.devices: "devices" in [fleet] is 0'),
        ("training.stps", "3", '--set training.stps: unknown key "stps" in [training]; did you mean "steps"?'),
        ("seed.x", "3", "--set seed.x: seed is a value"),
        ("a b", "3", "--set a b: this is not a key"),
        ("fleet.kinds", "{ pixel-88 = 1 }", '--set fleet.kinds: unknown device "pixel-88"'),
    ],
)
def test_a_wrong_override_is_reported_with_its_option(key: str, text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(message)):
        load_scenario("quickstart", {key: text})


def test_a_wrong_option_is_reported_as_the_user_spelled_it() -> None:
    with pytest.raises(ScenarioError, match=r"^--devices: "):
        load_scenario("quickstart", {"fleet.devices": "0"}, flags={"fleet.devices": "--devices"})


def test_assignments_are_split_at_the_first_equals_sign() -> None:
    assert parse_assignments(["a.b = 1", "c=x=y"]) == {"a.b": "1", "c": "x=y"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"links.kind": "kernel"}, 'only containers have interfaces of their own, set launch.kind = "docker"'),
        ({"launch.image": "mine"}, 'image belongs to kind = "docker"; kind is "processes"'),
        ({"launch.kind": "docker", "clock.kind": "virtual"}, "nothing is started"),
        ({"launch.kind": "docker", "links.kind": "kernel", "clock.kind": "auto"}, "bytes travel in real time"),
        ({"faults": '[{at = "1 s", do = "disconnect", seconds = 2}]'}, 'it needs launch.kind = "docker"'),
        ({"launch.kind": "docker", "faults": '[{at = "1 s", do = "disconnect"}]'}, '"disconnect" needs seconds'),
    ],
)
def test_settings_that_need_containers_say_so(overrides: dict[str, str], said: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(said)):
        load_scenario("quickstart", overrides)


@pytest.mark.parametrize("wrong", ["steps", "=3", ""])
def test_an_assignment_without_key_or_value_is_refused(wrong: str) -> None:
    with pytest.raises(ScenarioError, match="write key=value"):
        parse_assignments([wrong])


@pytest.mark.parametrize("name", scenario_names())
def test_a_written_scenario_loads_back_to_itself(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name, {"training.learning_rate": "1e-5"})
    path = tmp_path / "scenario.toml"
    path.write_text(dump_scenario(scenario), encoding="utf-8")
    assert load_scenario(str(path)) == scenario


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.floats(1e-300, 1e300), st.integers(0, 2**63 - 1)
)
@settings(deadline=None)
def test_any_text_and_number_survives_writing(model: str, learning_rate: float, seed: int) -> None:
    values = load_scenario("quickstart").model_dump(exclude_none=True)
    values["model"]["name"], values["training"]["learning_rate"], values["seed"] = model, learning_rate, seed
    scenario = Scenario.model_validate(values)
    assert Scenario.model_validate(tomllib.loads(dump_scenario(scenario))) == scenario


@given(st.text())
@settings(deadline=None)
def test_any_override_loads_or_gives_a_scenario_error(text: str) -> None:
    for key, value in (("training.steps", text), (text, "1")):
        with contextlib.suppress(ScenarioError):
            load_scenario("quickstart", {key: value})


def test_a_scenario_cannot_be_changed_after_loading() -> None:
    scenario = load_scenario("quickstart")
    with pytest.raises(ValidationError):
        scenario.seed = 5


def test_lines_of_keys_are_found_with_tables_quotes_and_dots() -> None:
    text = 'a = 1\n\n[t] # x\n"b c" = 2\nd.e = 3\n["f.g".h]\r\ni = 4\n'
    assert line_of_each_key(text) == {
        ("a",): 1,
        ("t",): 3,
        ("t", "b c"): 4,
        ("t", "d", "e"): 5,
        ("f.g", "h"): 6,
        ("f.g", "h", "i"): 7,
    }


def test_more_than_one_key_is_not_a_key() -> None:
    assert parse_key("a = 1\nb") is None


# ---- faults and churn

FAULTY = """
[churn]
kind = "poisson"
leave_per_minute = "30%"
mean_away = "20 s"
how = "leave"

[[faults]]
at = "20 s"
do = "vanish"
share = "10%"
seconds = 5.0

[[faults]]
at = "1 min"
do = "lie"
devices = 5
how = "noise"

[[faults]]
at = "90 s"
do = "kill"
pods = 1
"""


def faulty(folder: Path, old: str = "", new: str = "") -> tuple[str, str]:
    """The quickstart with faults and churn and one change: path and text."""
    assert old in FAULTY
    text = QUICKSTART + (FAULTY.replace(old, new, 1) if old else FAULTY)
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path), text


def test_by_default_there_are_neither_faults_nor_churn() -> None:
    scenario = load_scenario("quickstart")
    assert (scenario.churn, scenario.faults) == (None, [])


def test_faults_and_churn_load_and_survive_writing(tmp_path: Path) -> None:
    scenario = load_scenario(faulty(tmp_path)[0])
    assert scenario.churn is not None
    assert [(fault.at_s, fault.do) for fault in scenario.faults] == [(20.0, "vanish"), (60.0, "lie"), (90.0, "kill")]
    again = tmp_path / "again.toml"
    again.write_text(dump_scenario(scenario), encoding="utf-8")
    assert load_scenario(str(again)) == scenario


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ('at = "1 min"', "at = 60", "at = 60", '"at" in [[faults]] is 60; it must be a valid string'),
        ('at = "1 min"', 'at = "60"', 'at = "60"', "it has no unit"),
        ('at = "1 min"\n', "", '[[faults]]\ndo = "lie"', 'key "at" is missing in [[faults]]'),
        ('do = "lie"', 'do = "cheat"', 'do = "cheat"', 'it must be "leave", "vanish", "return"'),
        ("devices = 5", "device = 5", "device = 5", 'unknown key "device" in [[faults]]; did you mean "devices"?'),
        ("devices = 5\n", "", '[[faults]]\nat = "1 min"', 'give one of devices = 5, share = "10%" or network'),
        ("devices = 5", "pods = 5", '[[faults]]\nat = "1 min"', '"lie" is done to devices'),
        ('how = "noise"\n', "", '[[faults]]\nat = "1 min"', '"lie" needs how, for example how = "noise"'),
        ('how = "noise"', 'how = "loud"', 'how = "loud"', 'it must be "noise", "element"'),
        ("pods = 1", "devices = 1", '[[faults]]\nat = "90 s"', "write pods = 1 instead of devices"),
        ("pods = 1", "factor = 2.0", '[[faults]]\nat = "90 s"', '"kill" has no factor: leave it out'),
        ('share = "10%"', 'share = "110%"', "share = ", "no more than 100%"),
        ('share = "10%"', 'share = "ten"', "share = ", 'it must be a percentage above 0, for example "10%"'),
        ('share = "10%"', 'network = "uk-fth"', 'network = "uk-fth"', 'unknown network "uk-fth"; nearest: uk-ftth'),
        ("seconds = 5.0", "seconds = -1.0", "seconds = ", "it must be greater than 0"),
        ('kind = "poisson"', 'kind = "fish"', 'kind = "fish"', 'it must be "poisson", "flash" or "seti"'),
        ('kind = "poisson"\n', "", "[churn]", "one of the two"),
        ('kind = "poisson"', 'kind = "flash"', "[churn]", "leave_per_minute belongs to kind"),
        ('mean_away = "20 s"\n', "", "[churn]", 'needs mean_away, for example mean_away = "20 s"'),
        ('mean_away = "20 s"', 'mean_away = "20"', "mean_away", "it has no unit"),
        ('how = "leave"', 'how = "lie"', 'how = "lie"', 'it must be "vanish" or "leave"'),
        ('how = "leave"', "speed_up = 0", "speed_up", "it must be greater than 0"),
    ],
)
def test_a_mistake_in_faults_or_churn_is_reported_with_file_line_and_remedy(
    tmp_path: Path, old: str, new: str, place: str, message: str
) -> None:
    path, text = faulty(tmp_path, old, new)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    (told,) = str(caught.value).splitlines()
    assert told.startswith(f"mine.toml, line {text[: text.rindex(place)].count(chr(10)) + 1}: ")
    assert message in told


def test_a_fault_for_more_devices_than_the_fleet_has_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r'"lie" at 1 min, is for 5 devices; fleet.devices is 4'):
        load_scenario(faulty(tmp_path)[0], {"fleet.devices": "4"})


def test_churn_can_be_set_by_options() -> None:
    options = {"churn.kind": "poisson", "churn.leave_per_minute": "30%", "churn.mean_away": "20 s"}
    churn = load_scenario("quickstart", options).churn
    assert churn is not None
    assert (churn.kind, churn.leave_per_minute, churn.mean_away, churn.how) == ("poisson", "30%", "20 s", "vanish")


def test_a_trace_named_by_an_option_overrides_the_kind_of_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("device,start_s,end_s\na,0,1\n", encoding="utf-8")
    churn = load_scenario(faulty(tmp_path)[0], {"churn.trace": str(trace)}).churn
    assert churn is not None
    assert (churn.kind, churn.trace) == (None, str(trace))


def test_faults_can_be_set_by_an_option() -> None:
    (fault,) = load_scenario("quickstart", {"faults": '[{at = "1 s", do = "leave", devices = 3}]'}).faults
    assert (fault.at_s, fault.devices) == (1.0, 3)


def test_tables_of_a_list_have_their_own_lines() -> None:
    lines = line_of_each_key("[[faults]]\nat = 1\n[[faults]] # two\nat = 2\n[x]\nat = 3\n")
    assert lines == {
        ("faults",): 1, ("faults", "0"): 1, ("faults", "0", "at"): 2,
        ("faults", "1"): 3, ("faults", "1", "at"): 4, ("x",): 5, ("x", "at"): 6,
    }  # fmt: skip
