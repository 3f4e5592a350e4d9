"""The bundle that this agent runs from: how a new one replaces it, and how the launcher learns whether that worked.

The launcher is the shell loop of `cleave-agent` (android/bootstrap.sh). It is installed by hand and runs no code from
the bundle, so it can restore the previous bundle however broken the new one is. Agent and launcher communicate through
files beside agent.zip:

    agent.zip.previous   the previous bundle
    agent.zip.trial      NUMBER SHA256 of a new bundle on trial; written before it is put in place
    agent.zip.started    NUMBER of the bundle whose agent got as far as joining; written by the agent on trial
    agent.zip.bad        one NUMBER per line: bundles that did not start and were rolled back; written by the launcher
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import agent
from agent.identity.files import write_private
from agent.identity.release_number import RELEASE
from agent.protocol.errors import UserError

LAUNCHED = "CLEAVE_LAUNCHER"  # set in the environment of an agent that the launcher supervises


def bundle_place() -> Path | None:
    """The bundle that this agent runs from. None: a checkout or an installed package, which the owner updates."""
    place = Path(agent.__file__).parents[1]
    return place if place.is_file() else None


def is_launched() -> bool:
    return LAUNCHED in os.environ


def beside(place: Path, what: str) -> Path:
    return place.with_name(f"{place.name}.{what}")


def bad_releases(place: Path) -> frozenset[int]:
    """Releases that did not start here and were rolled back."""
    try:
        text = beside(place, "bad").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(int(line) for line in text.splitlines() if line.isdigit())


def install(place: Path, data: bytes, number: int, sha256: str) -> None:
    """Put a verified bundle in place, on trial. If interrupted at any point, either the old or the new bundle is there,
    complete, and the trial file of a bundle that was not put in place is ignored."""
    try:
        _write(beside(place, "new"), data)
        _write(beside(place, "previous"), place.read_bytes())
        write_private(beside(place, "trial"), f"{number} {sha256}\n")
        beside(place, "new").replace(place)
        _sync_folder(place.parent)
    except OSError as error:
        raise UserError(f"release {number} cannot be written to {place.parent}: {error.strerror}; make room") from None
    finally:
        with contextlib.suppress(OSError):
            beside(place, "new").unlink(missing_ok=True)


def report_start() -> None:
    """Record that the agent on trial got as far as joining. Does nothing without a trial."""
    place = bundle_place()
    if place is not None and beside(place, "trial").exists():
        with contextlib.suppress(UserError):  # full disk: the launcher then assumes that the bundle did not start
            write_private(beside(place, "started"), f"{RELEASE}\n")


def _write(path: Path, data: bytes) -> None:
    """Write the whole file durably, or nothing. No hard links: Android forbids them to apps."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
