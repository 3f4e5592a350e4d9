"""The import rule, which is the architecture: agent <- ps, agent <- emulator, agent <- android, all <- testbed.

A phone installs `agent` with numpy and pyzmq alone, and the server cannot tell a phone from an emulated device; both
stay true only while nobody imports the other way.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("agent", "ps", "emulator", "android", "testbed")
MAY_IMPORT = {
    "agent": {"agent"},
    "ps": {"agent", "ps"},
    "emulator": {"agent", "emulator"},
    "android": {"agent", "android"},
    "testbed": set(ROOMS),
}
ON_A_PHONE = {"numpy", "zmq", "onnxruntime"}


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and top-level module of every import, also inside functions and by importlib.import_module("...")."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.partition(".")[0]) for alias in names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield node.lineno, module.partition(".")[0]
            case ast.ImportFrom():  # relative: stays in its room
                yield node.lineno, package
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]) if ast.unparse(func).endswith(
                ("import_module", "__import__")
            ):
                yield node.lineno, module.partition(".")[0]


def violations(room: str, source: str, file: str) -> list[str]:
    found = []
    for line, module in imports_of(source, room):
        if module in ROOMS and module not in MAY_IMPORT[room]:
            found.append(f"{file}:{line}: {room} must not import {module}")
        elif room == "agent" and module not in {*ROOMS, *sys.stdlib_module_names, *ON_A_PHONE}:
            found.append(f"{file}:{line}: agent must run on a phone, where {module} is not installed")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_architecture_allows(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = [
        violation
        for file in files
        for violation in violations(room, file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("agent", "import ps.server"),
        ("agent", "from testbed import cli"),
        ("agent", "import torch"),
        ("agent", "def f():\n    import scipy.linalg"),
        ("ps", "from emulator.link import Link"),
        ("emulator", "import ps"),
        ("emulator", "import importlib\nimportlib.import_module('ps.server')"),
        ("ps", "import testbed.run"),
        ("agent", "import android.bundle"),
        ("android", "import ps.server"),
    ],
)
def test_a_forbidden_import_is_noticed_with_its_line(room: str, source: str) -> None:
    (found,) = violations(room, source, f"{room}/x.py")
    assert found.startswith(f"{room}/x.py:{len(source.splitlines())}: ")


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("agent", "import numpy, zmq, json\nfrom agent import wire\nfrom . import wire"),
        ("agent", "try:\n    import onnxruntime\nexcept ImportError:\n    pass"),
        ("ps", "import torch\nfrom agent.wire import Work"),
        ("testbed", "import ps, emulator, agent"),
    ],
)
def test_an_allowed_import_is_not_reported(room: str, source: str) -> None:
    assert not violations(room, source, "x.py")
