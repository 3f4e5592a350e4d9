"""The owner's rules file, and `python -m agent rules` to show and change it.

The file is $CLEAVE_RULES, or ~/.config/cleave/owner.toml. A running agent rereads it when it changes. If the new file
is wrong, the agent logs why and keeps the last valid rules.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

from agent.identity.files import write_private
from agent.owner.rules import Rules, RulesError, parse_rule, parse_rules
from agent.protocol.errors import UserError

RULES = {
    "only_while_charging": ("true", "work only while it is plugged in"),
    "only_on_wifi": ("true", "work only on Wi-Fi or a wire, never on mobile data"),
    "battery_above": ("40", "percent; work stops below it and resumes 5 points above"),
    "temperature_below": ("38", "degrees Celsius, of the battery; work stops there and resumes 3 degrees below"),
    "hours": ('"22:00-07:00"', "work at these hours only; several with commas between"),
    "data_cap_a_day": ('"1 GB"', "bytes of messages, down and up together, from midnight to midnight"),
    "threads": ("2", "use at most this many cores"),
    "if_unknown": ('"work"', 'if a sensor is missing: "work" anyway, or "wait" for it'),
    "updates": ('"ask"', 'of the agent, signed: "ask" first (python -m agent update), "auto" or "never"'),
}


def rules_file() -> Path:
    if given := os.environ.get("CLEAVE_RULES"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "cleave" / "owner.toml"


def read_rules(path: Path) -> Rules:
    """The rules in this file; none if there is no file. RulesError says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Rules()
    except (OSError, UnicodeDecodeError) as error:
        raise RulesError(f"cannot read the rules in {path}: {error}; correct the file, or remove it") from None
    return _checked(text, path)


def _checked(text: str, path: Path) -> Rules:
    try:
        return parse_rules(tomllib.loads(text))
    except ValueError as error:  # includes TOMLDecodeError
        raise RulesError(f"{path}: {error}") from None


def set_rule(path: Path, key: str, value: str) -> None:
    """Change or add one line; "off" removes the rule. The rest of the file stays as it is."""
    if key not in RULES:
        raise RulesError(f'unknown rule "{key}"; there are: {", ".join(RULES)}')
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RulesError(f"cannot read {path}: {error}") from None
    lines = text.splitlines()
    at = next((i for i, line in enumerate(lines) if re.match(rf"\s*{key}\s*=", line)), None)
    if value == "off":
        if at is not None:
            del lines[at]
    else:
        line = f"{key} = {_literal(key, value)} # {RULES[key][1]}"
        if at is None:
            lines.append(line)
        else:
            lines[at] = line
    text = "\n".join([*lines, ""])
    _checked(text, path)  # never write a file that cannot be parsed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    write_private(path, text)


def _literal(key: str, value: str) -> str:
    """The value as a TOML literal; adds missing quotes to text."""
    for literal in (value, '"' + value.replace("\\", "").replace('"', "") + '"'):
        try:
            parse_rule(key, tomllib.loads(f"value = {literal}")["value"])
        except (ValueError, KeyError):
            continue
        return literal
    parse_rule(key, value)  # raises, saying what is wrong
    raise RulesError(f"{key} is {value!r}; write for example {RULES[key][0]}")


def describe(rules: Rules) -> list[str]:
    lines = []
    for field in fields(Rules):
        value = getattr(rules, field.name)
        if field.name == "hours" and value is not None:
            value = value.text
        shown = "off" if value is None or value is False else "on" if value is True else str(value)
        lines.append(f"{field.name:<20} {shown:<14} {RULES[field.name][1]}")
    return lines


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agent rules",
        description="The owner's rules of this device: when it may work. A running agent follows a change at once.",
        epilog="example: python -m agent rules set battery_above 40; to remove one: rules set battery_above off",
    )
    parser.add_argument("do", nargs="?", choices=("show", "set"), default="show")
    parser.add_argument("key", nargs="?", metavar="RULE", help=", ".join(RULES))
    parser.add_argument("value", nargs="?", help='as in the examples of `rules show`; "off" removes the rule')
    options = parser.parse_args(words)
    path = rules_file()
    try:
        if options.do == "set":
            if options.key is None or options.value is None:
                raise RulesError("name a rule and its value: python -m agent rules set battery_above 40")
            set_rule(path, options.key, options.value)
        rules = read_rules(path)
    except UserError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    print(f"rules in {path}" + ("" if path.exists() else ", which does not exist: it works whenever it is asked to"))
    print("\n".join(describe(rules)))
    return 0
