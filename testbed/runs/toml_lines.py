"""Lines of TOML: the line number of each key, for error messages, because tomllib does not keep it; and tables as text.

Keys are found by a line scan, not by a second parser: the scan follows table headers and `key = value`, and silently
skips what it does not understand (keys inside inline tables, text inside multi-line strings). A missing or wrong line
number makes a message less helpful, never a result wrong.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

KeyPath = tuple[str, ...]

_HEADER = re.compile(r"\s*\[(?P<key>[^\[\]]+)\]\s*(#.*)?")
_LIST_HEADER = re.compile(r"\s*\[\[(?P<key>[^\[\]]+)\]\]\s*(#.*)?")
_ASSIGNMENT = re.compile(r"""\s*(?P<key>(?:[A-Za-z0-9_.\s-]|"[^"]*"|'[^']*')+?)\s*=""")
_PLACE = re.compile(r"\s*\(at (?:line (?P<line>\d+), column \d+|end of document)\)$")


def parse_key(text: str) -> KeyPath | None:
    """("fleet", "kinds") from "fleet.kinds", quoted parts allowed; None if the text is not a key."""
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path = []
    while isinstance(table, dict):
        if len(table) != 1:
            return None
        (part, table), *_ = table.items()
        path.append(part)
    return tuple(path)


def line_of_each_key(text: str) -> dict[KeyPath, int]:
    """Line number, from 1, of the first occurrence of every key and table header. Tables of a list, [[faults]], have
    their index in the key: ("faults", "0", "at")."""
    lines: dict[KeyPath, int] = {}
    tables: Counter[KeyPath] = Counter()
    table: KeyPath = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.fullmatch(line.rstrip("\r")):
            table = parse_key(header["key"]) or ()
            lines.setdefault(table, number)
        elif header := _LIST_HEADER.fullmatch(line.rstrip("\r")):
            name = parse_key(header["key"]) or ()
            table = (*name, str(tables[name]))
            tables[name] += 1
            lines.setdefault(name, number)
            lines.setdefault(table, number)
        elif (assignment := _ASSIGNMENT.match(line)) and (key := parse_key(assignment["key"])):
            lines.setdefault(table + key, number)
    lines.pop((), None)
    return lines


def split_syntax_error(error: tomllib.TOMLDecodeError, text: str) -> tuple[int, str]:
    """Line and reason of tomllib's error, which gives the line only in its message."""
    message = str(error)
    place = _PLACE.search(message)
    last_line = text.rstrip("\n").count("\n") + 1
    line = int(place["line"]) if place and place["line"] else last_line
    reason = _PLACE.sub("", message)
    return line, reason[:1].lower() + reason[1:]


def lines_of_table(table: Mapping[str, Any], path: KeyPath = ()) -> Iterable[str]:
    """A table as TOML, located at `path`."""
    for key, value in table.items():
        if not isinstance(value, Mapping | list):
            yield f"{_quote_key(key)} = {_quote(value)}"
    for key, value in table.items():
        name = ".".join(_quote_key(part) for part in (*path, key))
        if isinstance(value, Mapping):
            yield f"\n[{name}]"
            yield from lines_of_table(value, (*path, key))
        elif isinstance(value, list):  # of tables
            for item in value:
                yield f"\n[[{name}]]"
                yield from lines_of_table(item, (*path, key))


def _quote_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quote(key)


def _quote(value: str | float | bool) -> str:
    if isinstance(value, str):  # a JSON string is a TOML string, except that TOML requires DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
