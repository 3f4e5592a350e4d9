"""Writes the tables of docs/benchmarks.md from the rows of a benchmark run, and keeps these rows beside it as JSON.

A table stands between two markers, `<!-- table abc -->` and `<!-- end of table -->`, which name the parts of `make
bench` that it shows. A run replaces the parts that it measured; the others keep their date and commit. Nothing else in
the file changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.protocol.errors import UserError

FORMAT = 1
FOLDER = Path(__file__).resolve().parents[3] / "docs"
PEERS = "p"  # the part of rows that compare with other systems
MARKED = re.compile(r"(<!-- table ([a-z]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
FIELDS = ("what", "measured", "compared", "ratio", "goal", "met")
HEADINGS = ("", "measured", "compared with", "ratio", "goal", "met")

Row = Mapping[str, Any]
Data = dict[str, Any]  # part -> date, commit, machine, rows


def part_of(row: Row) -> str:
    found = re.match(r"\((\w)\)", row["what"])
    return found[1] if found else PEERS


def merged(known: Data, rows: Sequence[Row], where: Mapping[str, Any]) -> Data:
    """The known parts, those of `rows` replaced."""
    new: Data = {}
    for row in rows:
        new.setdefault(part_of(row), {**where, "rows": []})["rows"].append({name: row[name] for name in FIELDS})
    return dict(sorted((known | new).items()))


def table(parts: str, data: Data) -> str:
    """The parts' rows as Markdown, under where and when they were measured."""
    known = [part for part in parts if part in data]
    lines = []
    for part in parts:
        if part not in data:
            lines.append(f"Part {part} has not been measured with this version: `make bench DOCS=1`.\n")
    origins: dict[str, list[str]] = {}
    for part in known:
        of = data[part]
        origins.setdefault(f"{of['date']}, commit {of['commit']}; {of['machine']}.", []).append(part)
    for origin, those in origins.items():
        lines.append((f"Parts {', '.join(those)}: " if len(origins) > 1 else "") + f"{origin}\n")
    if known:
        lines += [_line(HEADINGS), "|" + "---|" * len(HEADINGS)]
        lines += [_line(_cells(row)) for part in known for row in data[part]["rows"]]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    ratio, met = row["ratio"], "yes" if row["met"] else "**no**"
    return [
        row["what"],
        row["measured"],
        row["compared"],
        "" if ratio is None else f"{ratio:.2f}",
        row["goal"],
        met if row["goal"] else "",
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def filled(text: str, data: Data) -> str:
    """The text with every table made from the data."""
    return MARKED.sub(lambda found: found[1] + table(found[2], data) + found[3], text)


def shown(text: str) -> str:
    """The parts that have a table in the text."""
    return "".join(found[2] for found in MARKED.finditer(text))


def read_data(path: Path) -> Data:
    if not path.exists():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    if told.get("format") != FORMAT:
        return {}  # of an older version: all parts have to be measured again
    parts: Data = told["parts"]
    return parts


def write_docs(rows: Sequence[Row], where: Mapping[str, Any], folder: Path = FOLDER) -> str:
    """Update benchmarks.json and benchmarks.md. Returns what was done, for people."""
    text_path, data_path = folder / "benchmarks.md", folder / "benchmarks.json"
    try:
        text = text_path.read_text(encoding="utf-8")
        visible = shown(text)
        data = merged(read_data(data_path), [row for row in rows if part_of(row) in visible], where)
        data_path.write_text(json.dumps({"format": FORMAT, "parts": data}, indent=1) + "\n", encoding="utf-8")
        text_path.write_text(filled(text, data), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the tables to {folder}: {error}") from None
    hidden = sorted({part_of(row) for row in rows} - set(visible))
    more = f"; no table for part {', '.join(hidden)}" if hidden else ""
    return f"wrote the tables of {text_path.name} and {data_path.name}{more}"
