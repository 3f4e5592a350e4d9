"""Every number that steers planning or scheduling stands in one record per room, with its reason."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import ps.planning.settings
import ps.scheduling.settings

ROOT = Path(__file__).parents[2]
ROOMS = {"planning": ps.planning.settings, "scheduling": ps.scheduling.settings}
MOST = 40
# facts of the wire, the agent and the notation, guards of arithmetic, and the grid of a search
NOT_STEERING = {
    "BYTES",
    "CHUNKS_HELD",
    "ACCUMULATOR_BYTES",
    "SHAPES",
    "TINY",
    "LEAST",
    "RANGES",
    "FRESH",
    "UNKNOWN",
    "ROUNDING_S",
    "IDLE",
    "PENDING",
    "IN_FLIGHT",
    "DONE",
    "CUT",
    "WAITS",
    "NO_CAP",
    "NO_WORK",
    "NO_QUEUE",
}


def test_there_are_few_settings() -> None:
    assert sum(len(fields(room.Settings)) for room in ROOMS.values()) <= MOST


def test_every_setting_has_its_reason_beside_it() -> None:
    for room in ROOMS:
        lines = (ROOT / "ps" / room / "settings.py").read_text().splitlines()
        for number, line in enumerate(lines):
            if (line.startswith("    ") and ": float = " in line) or ": int = " in line:
                above = lines[number - 1].strip()
                assert "  # " in line or (above.startswith("# ") and not above.startswith("# ----")), line


def test_no_other_number_at_module_level_steers() -> None:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / "ps" / room).glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _has_number(node.value):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
                    found += [f"{path.name}: {name}" for name in sorted(names - NOT_STEERING)]
    assert not found


def _has_number(value: ast.expr) -> bool:
    """A number of its own; sizes of empty arrays are none."""
    if isinstance(value, ast.Call) and not isinstance(value.func, ast.Name):
        return isinstance(value.func, ast.Attribute) and value.func.attr not in ("empty", "zeros")
    return any(isinstance(node, ast.Constant) and type(node.value) in (int, float) for node in ast.walk(value))
