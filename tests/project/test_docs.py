"""Commands in the README and the docs must work: each is parsed by the program it belongs to."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from places import ROOT

from agent.__main__ import lend_parser, measure_parser
from agent.owner.rules import parse_rules
from agent.owner.rules_file import RULES, set_rule
from ps.graph.models import check_name
from testbed.commands.cli import app
from testbed.runs.scenario import load_scenario, parse_assignments
from testbed.virtual.plan import fleet_profiles

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split("   #")[0].split("    #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_a_make_command_of_the_readme_exists(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if "cleave run" in c])
def test_a_scenario_of_the_readme_loads(command: str) -> None:
    words = shlex.split(command)
    name = words[words.index("run") + 1]
    if name == "my-scenario.toml":
        name = str(ROOT / "testbed" / "scenarios" / "quickstart.toml")  # the reader's own file
    load_scenario(name, parse_assignments([words[i + 1] for i, word in enumerate(words) if word == "--set"]))


@pytest.mark.parametrize("command", [c for c in commands() if "-m agent" in c])
def test_an_agent_command_of_the_readme_is_understood(command: str) -> None:
    words = shlex.split(command)
    lend_parser().parse_args(words[words.index("agent") + 1 :])


def test_every_command_of_the_readme_is_checked() -> None:
    assert len(commands()) >= 6
    assert all(
        re.match(r"make |\.venv/bin/cleave (run|plan|doctor|invite|devices)\b|python -m agent ", c) for c in commands()
    )


@pytest.mark.parametrize("command", [c for c in commands() if "cleave plan" in c])
def test_a_plan_command_of_the_readme_names_existing_things(command: str) -> None:
    words = shlex.split(command)
    check_name(words[words.index("--model") + 1])
    fleet_profiles(words[words.index("--fleet") + 1], 4, seed=0)


DOCS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", DOCS)
def test_a_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "agent|android|cleave|emulator|examples|netem_profiles|ps|testbed|tests"
    named = re.findall(rf"(?<![\w./~])(?:{folders})/[a-z0-9_/]+\.(?:py|toml|sh)\b", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", DOCS)
def test_a_link_to_a_file_has_a_target(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


PAGES = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("emulation.md", "containers.md"))


@pytest.mark.parametrize("command", re.findall(r"^(?:\.venv/bin/cleave|python -m) .*$", PAGES, flags=re.MULTILINE))
def test_a_command_of_a_page_is_understood(command: str) -> None:
    words = shlex.split(command)
    if words[:4] == ["python", "-m", "agent", "measure"]:
        measure_parser().parse_args(words[4:])
        return
    if words[1] == "-m":
        pytest.skip("a benchmark of its own")
    name, arguments = words[1], words[2:]
    commands: Any = typer.main.get_command(app)
    commands.commands[name].make_context(name, arguments)  # parses, and does not run


def test_the_rules_on_the_page_for_owners_can_be_set(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "owner.md").read_text(encoding="utf-8")
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^python -m agent .*$", page, re.MULTILINE)]
    assert len(commands) >= 6
    for words in commands:
        match words[3:]:
            case ["rules", "set", key, value]:
                set_rule(tmp_path / "owner.toml", key, value)
            case rest:
                assert rest in (["rules"], ["status"])
    examples = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert {rule for rule, _ in examples} == set(RULES)
    parse_rules(tomllib.loads("\n".join(f"{rule} = {value}" for rule, value in examples)))


PHONES = (ROOT / "docs" / "phones.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", re.findall(r"^(?:cleave|make|cleave-agent) .*$", PHONES, flags=re.MULTILINE))
def test_a_command_about_phones_is_understood(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        done = subprocess.run(["make", *words, "-n"], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    elif program == "cleave-agent":  # on the phone this is the script itself
        script = (ROOT / "android" / "bootstrap.sh").read_text(encoding="utf-8")
        assert re.search(rf"^        (?:\w+ \| )*{words[0]}(?: \| \w+)*\) ", script, flags=re.MULTILINE), command
    else:
        group: Any = typer.main.get_command(app)
        while hasattr(group, "commands"):
            name, *words = words
            group = group.commands[name]
        group.make_context(name, words)  # parses, and does not run


def test_every_message_on_the_page_about_phones_is_in_the_script() -> None:
    script = (ROOT / "android" / "bootstrap.sh").read_text(encoding="utf-8")
    shown = re.findall(r"^cleave: (.{12})", PHONES, flags=re.MULTILINE)
    assert len(shown) >= 10
    spoken = [line for line in shown if not line.startswith(("my-phone", "joined", "installing"))]
    assert [line for line in spoken if line not in script] == []
