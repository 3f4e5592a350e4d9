"""The tables of docs/benchmarks.md come from docs/benchmarks.json, in the format of this version."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path

from places import ROOT

from testbed.bench.__main__ import Row
from testbed.bench.tables.tables import FIELDS, FORMAT, filled, shown, table, write_docs
from testbed.bench.tables.where import where

WHERE = {"date": "2026-01-02", "commit": "abc", "machine": "2 cores"}
W1 = asdict(Row("(a) W1", "0.1 s", "raw 0.2 s", 2.0, "at least 0.9", True))
SLOW = asdict(Row("(d) W3", "9 s", "1 blocks/s", None, "40,000/s", False))
RAY = asdict(Row("W1 against ray", "0.1 s", "ray: 0.2 s", 2.0, "no slower", True))


def test_the_tables_of_the_page_are_those_of_its_json() -> None:
    told = json.loads((ROOT / "docs/benchmarks.json").read_text(encoding="utf-8"))
    assert told["format"] == FORMAT
    for part in told["parts"].values():
        assert {"date", "commit", "machine", "rows"} == set(part)
        assert all(tuple(row) == FIELDS for row in part["rows"])
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert filled(text, told["parts"]) == text, "written by hand? make bench DOCS=1"
    assert set(told["parts"]) <= set(shown(text))


def test_a_run_replaces_the_parts_that_it_measured_and_no_others(tmp_path: Path) -> None:
    page = (
        "# Page\n<!-- table ad -->\nold\n<!-- end of table -->\nprose\n<!-- table p -->\n<!-- end of table -->\nend\n"
    )
    (tmp_path / "benchmarks.md").write_text(page)
    write_docs([W1, SLOW], WHERE, tmp_path)
    write_docs([RAY], WHERE | {"commit": "def"}, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| (a) W1 | 0.1 s | raw 0.2 s | 2.00 | at least 0.9 | yes |" in text
    assert "| (d) W3 | 9 s | 1 blocks/s |  | 40,000/s | **no** |" in text
    assert "| W1 against ray |" in text
    assert text.count("commit abc; 2 cores.") == text.count("commit def; 2 cores.") == 1
    assert "old" not in text
    assert text.startswith("# Page\n")
    assert text.endswith("end\n")


def test_rows_without_a_table_are_named(tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text("<!-- table a -->\n<!-- end of table -->\n")
    assert "no table for part d, p" in write_docs([W1, SLOW, RAY], WHERE, tmp_path)


def test_a_table_says_what_was_not_measured_and_when_the_rest_was() -> None:
    told = table("ax", {"a": WHERE | {"rows": [W1]}})
    assert "Part x has not been measured" in told
    assert "2026-01-02, commit abc; 2 cores." in told


def test_where_names_no_host_and_no_path() -> None:
    told = json.dumps(where())
    assert socket.gethostname() not in told
    assert str(ROOT) not in told
    assert "/" not in told
