"""What the README tells people to type must work: every command in it is parsed by the program it is for."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from agent.__main__ import _measure_parser, _parser
from ps.models import check_name
from testbed.cli import app
from testbed.plan import fleet_profiles
from testbed.scenario import load_scenario, parse_assignments

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split("   #")[0].split("    #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_a_make_command_of_the_readme_is_one(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if "cleave run" in c])
def test_a_scenario_of_the_readme_loads(command: str) -> None:
    words = shlex.split(command)
    name = words[words.index("run") + 1]
    if name == "my-scenario.toml":
        name = str(ROOT / "testbed" / "scenarios" / "quickstart.toml")  # a reader's own
    load_scenario(name, parse_assignments([words[i + 1] for i, word in enumerate(words) if word == "--set"]))


@pytest.mark.parametrize("command", [c for c in commands() if "-m agent" in c])
def test_an_agent_command_of_the_readme_is_understood(command: str) -> None:
    words = shlex.split(command)
    _parser().parse_args(words[words.index("agent") + 1 :])


def test_every_command_of_the_readme_is_looked_at() -> None:
    assert len(commands()) >= 6
    assert all(re.match(r"make |\.venv/bin/cleave (run|plan|doctor) |python -m agent ", c) for c in commands())


@pytest.mark.parametrize("command", [c for c in commands() if "cleave plan" in c])
def test_a_plan_of_the_readme_names_what_there_is(command: str) -> None:
    words = shlex.split(command)
    check_name(words[words.index("--model") + 1])
    fleet_profiles(words[words.index("--fleet") + 1], 4, seed=0)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_a_link_to_a_file_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


PAGES = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("emulation.md", "containers.md"))


@pytest.mark.parametrize("command", re.findall(r"^(?:\.venv/bin/cleave|python -m) .*$", PAGES, flags=re.MULTILINE))
def test_a_command_of_a_page_is_understood(command: str) -> None:
    words = shlex.split(command)
    if words[:4] == ["python", "-m", "agent", "measure"]:
        _measure_parser().parse_args(words[4:])
        return
    if words[1] == "-m":
        pytest.skip("a benchmark of its own")
    name, arguments = words[1], words[2:]
    commands: Any = typer.main.get_command(app)
    commands.commands[name].make_context(name, arguments)  # parses, and does not run
