"""Only tests of the same room use private names: all others see a room as its users do, so that its inside can change.

A syntax tree has no types. A private name therefore belongs to every room that defines it, and a test may use it if its
own room is one of them, or if the test's file defines the name itself.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
from places import ROOT

PACKAGES = ("agent", "android", "cleave", "emulator", "ps", "testbed")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.isidentifier() and name != "_"


def defined_in(tree: ast.AST, in_class: bool = False) -> Iterator[str]:
    """Private functions, classes and variables, and the private attributes that methods set."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined = True
            case ast.Name(id=name, ctx=ast.Store()):
                defined = True
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                defined = in_class
            case _:
                defined, name = False, ""
        if defined and is_private(name):
            yield name
        yield from defined_in(node, in_class or isinstance(node, ast.ClassDef))


def used_in(tree: ast.AST, in_class: bool = False) -> Iterator[tuple[int, str]]:
    """Line and name of every use: an attribute, an import, or a name that is patched. What a class does with its own
    object is not counted, since it may inherit; a function outside of a class is no method, even if its argument is
    called `self`."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))) if in_class:
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, name
            case ast.ImportFrom(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases if is_private(alias.name))
            case ast.Constant(value=str(text)) if is_private(name := text.rpartition(".")[2]):
                yield node.lineno, name
        yield from used_in(node, in_class or isinstance(node, ast.ClassDef))


def owners() -> dict[str, set[str]]:
    """Private name -> rooms that define it: "ps.planning", or a package."""
    found = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            room = ".".join(path.relative_to(ROOT).parent.parts[:2])
            for name in defined_in(ast.parse(path.read_text(encoding="utf-8"))):
                found[name].add(room)
    return found


def foreign(source: str, room: str, owners: Mapping[str, set[str]]) -> list[str]:
    """`room`: that of the test; a package stands for all of its rooms."""
    tree = ast.parse(source)
    own = set(defined_in(tree))
    return [
        f"{line}: {name} is private to {', '.join(sorted(rooms))}"
        for line, name in used_in(tree)
        if name not in own
        and (rooms := owners.get(name))
        and not any(owner == room or owner.startswith(f"{room}.") for owner in rooms)
    ]


@pytest.mark.slow
def test_private_names_are_used_by_tests_of_their_room_only() -> None:
    names, found = owners(), []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        file = path.relative_to(ROOT)
        found += [
            f"{file}:{use}"
            for use in foreign(path.read_text(encoding="utf-8"), ".".join(file.parent.parts[1:3]), names)
        ]
    assert not found, "\n".join(found)


PLANTED = {"_planted": {"ps.scheduling"}}


@pytest.mark.parametrize(
    "source",
    [
        "dispatcher._planted.jobs",
        "world.dispatcher._planted = None",
        "def planted(self: Dispatcher) -> None:\n    self._planted = None",
        "from ps.scheduling.dispatcher import _planted",
        "patch.setattr(Dispatcher, '_planted', None)",
        "patch.setattr('ps.scheduling.dispatcher._planted', None)",
    ],
)
def test_a_private_name_of_another_room_is_noticed(source: str) -> None:
    assert foreign(source, "ps.planning", PLANTED) == [
        f"{len(source.splitlines())}: _planted is private to ps.scheduling"
    ]
    assert not foreign(source, "ps.scheduling", PLANTED)
    assert not foreign(source, "ps", PLANTED)


@pytest.mark.parametrize(
    "source",
    [
        "class World(Shell):\n    def f(self):\n        return self._planted",
        "class A:\n    _planted = 0\n\n\nA._planted",
        "dispatcher.inside",
    ],
)
def test_what_a_class_inherits_and_what_a_test_defines_is_its_own(source: str) -> None:
    assert not foreign(source, "ps.planning", PLANTED)
