"""The import rule, which is the architecture: agent <- ps, agent <- emulator, agent <- android, all <- testbed, and
inside a package only the arrows between rooms that the table below allows.

A phone installs `agent` with only numpy and pyzmq, and the server cannot tell a phone from an emulated device; both
stay true only while no import points the other way.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

PACKAGES = ("agent", "ps", "emulator", "android", "testbed")
MAY_IMPORT = {
    "agent": {"agent"},
    "ps": {"agent", "ps"},
    "emulator": {"agent", "emulator"},
    "android": {"agent", "android"},
    "testbed": set(PACKAGES),
}
# room -> the other rooms of its package that it may import
ARROWS = {
    "agent.protocol": {"identity"},
    "agent.identity": {"protocol", "owner", "measure"},
    "agent.owner": {"protocol", "identity"},
    "agent.compute": {"protocol", "identity", "owner"},
    "agent.measure": {"protocol", "identity", "compute"},
    "ps.planning": set(),
    "ps.scheduling": {"planning"},
    "ps.verification": {"planning"},
    "ps.access": set(),
    "ps.transport": {"scheduling", "planning", "verification", "access"},
    "ps.graph": {"transport", "planning"},
    "emulator.availability": set(),
    "emulator.model": {"links"},
    "emulator.links": {"model"},
    "emulator.containers": set(),
    "emulator.pods": {"model", "containers"},
}
ON_A_PHONE = {"numpy", "zmq", "onnxruntime"}


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import, also inside functions and by importlib.import_module("...")."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.ImportFrom():  # relative: stays in its package
                yield node.lineno, package
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]) if ast.unparse(func).endswith(
                ("import_module", "__import__")
            ):
                yield node.lineno, module


def violations(room: str, source: str, file: str) -> list[str]:
    """`room`: a package, or a room of one ("ps.planning")."""
    package, _, own = room.partition(".")
    found = []
    for line, module in imports_of(source, package):
        top, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if top in PACKAGES and top not in MAY_IMPORT[package]:
            found.append(f"{file}:{line}: {package} must not import {top}")
        elif package == "agent" and top not in {*PACKAGES, *sys.stdlib_module_names, *ON_A_PHONE}:
            found.append(f"{file}:{line}: agent must run on a phone, where {top} is not installed")
        elif top == package and room in ARROWS and f"{top}.{other}" in ARROWS and other not in {own, *ARROWS[room]}:
            found.append(f"{file}:{line}: {room} must not import {top}.{other}")
    return list(dict.fromkeys(found))


def room_of(path: Path) -> str:
    package, *inside = path.relative_to(ROOT).with_suffix("").parts
    return f"{package}.{inside[0]}" if len(inside) > 1 else package


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_imports_only_what_the_architecture_allows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        violation
        for file in files
        for violation in violations(room_of(file), file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


def test_every_room_of_the_server_and_the_device_is_in_the_table() -> None:
    rooms = {f"{package}.{path.parent.name}" for package in ("agent", "ps") for path in ROOT.glob(f"{package}/*/*.py")}
    assert rooms == {room for room in ARROWS if room.startswith(("agent.", "ps."))}


def test_no_folder_has_too_many_files() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    crowded = {str(f.relative_to(ROOT)): n for f in folders if (n := len(list(f.glob("*.py")))) > 16}
    assert not crowded


ROOMS_OF_THE_SERVER = sorted(room for room in ARROWS if room.startswith("ps."))


@pytest.mark.parametrize("room", ROOMS_OF_THE_SERVER)
@pytest.mark.parametrize("other", ROOMS_OF_THE_SERVER)
def test_a_planted_arrow_between_rooms_of_the_server_is_noticed(room: str, other: str) -> None:
    """In each direction; the table's arrows are allowed, and a room may import itself."""
    name = other.partition(".")[2]
    allowed = room == other or name in ARROWS[room]
    for source in (f"from {other}.x import y", f"import {other}.x", f"from ps import {name}", f"from {other} import x"):
        assert bool(violations(room, source, "x.py")) is not allowed


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("agent", "import ps.server"),
        ("agent", "from testbed import cli"),
        ("agent", "import torch"),
        ("agent.compute", "def f():\n    import scipy.linalg"),
        ("ps.graph", "from emulator.link import Link"),
        ("emulator", "import ps"),
        ("emulator.pods", "import importlib\nimportlib.import_module('ps.server')"),
        ("ps", "import testbed.run"),
        ("agent", "import android.bundle"),
        ("android", "import ps.server"),
        ("agent.protocol", "from agent.compute.worker import Worker"),
    ],
)
def test_a_forbidden_import_is_noticed_with_its_line(room: str, source: str) -> None:
    (found,) = violations(room, source, "x.py")
    assert found.startswith(f"x.py:{len(source.splitlines())}: ")


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("agent.compute", "import numpy, zmq, json\nfrom agent.protocol import wire\nfrom . import wire"),
        ("agent", "try:\n    import onnxruntime\nexcept ImportError:\n    pass"),
        ("ps.transport", "import torch\nfrom agent.protocol.wire import Work"),
        ("testbed.runs", "import ps, emulator, agent"),
    ],
)
def test_an_allowed_import_is_not_reported(room: str, source: str) -> None:
    assert not violations(room, source, "x.py")
