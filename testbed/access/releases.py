"""The server's releases of the agent, in its state folder: the signer that phones trust (`signer.pub`, a public key),
and the signed bundle that the server hands out (`release/`). Without a signer, phones install a build of this checkout
and get no updates. The signing key itself must not be here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent.identity.files import private_folder, write_private
from agent.identity.release import (
    MOST_BYTES,
    SUFFIX,
    Rejected,
    Release,
    check_bundle,
    check_signature,
    is_key,
    parse_release,
)
from agent.protocol.errors import UserError
from android.bundle import NAME, Bundle, build

SIGNER, RELEASE_FOLDER = "signer.pub", "release"


@dataclass(frozen=True, slots=True)
class HandedOut:
    """What phones get: the published release, or an unsigned build of this checkout."""

    bundle: Bundle
    release: Release | None


def trusted_signer(state: Path) -> str:
    """The trusted signer; empty if there is none."""
    path = state / SIGNER
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not is_key(text):
        raise UserError(f"{path} does not hold a signer's public key; set it again: cleave release trust FILE.pub")
    return text


def trust(state: Path, signer: str) -> None:
    write_private(private_folder(state) / SIGNER, f"{signer}\n")


def handed_out(state: Path) -> HandedOut:
    """UserError if the published release is not by the currently trusted signer, or has been changed."""
    path = state / RELEASE_FOLDER / NAME
    if not path.exists():
        return HandedOut(build(), None)
    bundle, release = read_signed(path)
    try:
        check_signature(release, trusted_signer(state))
        check_bundle(release, bundle.data)
    except Rejected as error:
        raise UserError(f"{path} is not handed out: {error}; publish one again: cleave release publish") from None
    return HandedOut(bundle, release)


def publish(state: Path, path: Path) -> Release:
    """Hand out this release from now on, if it is by the trusted signer and newer than the previous one."""
    if not (signer := trusted_signer(state)):
        raise UserError("no signer is trusted here yet: cleave release trust FILE.pub")
    bundle, release = read_signed(path)
    check_signature(release, signer)
    check_bundle(release, bundle.data)
    folder = private_folder(private_folder(state) / RELEASE_FOLDER)
    if (folder / NAME).exists() and (before := read_signed(folder / NAME)[1]).number >= release.number:
        raise UserError(f"release {before.number} is handed out already; phones take only a higher number")
    write_signed(folder / NAME, bundle, release)
    return release


def read_signed(path: Path) -> tuple[Bundle, Release]:
    """A bundle and the release file next to it, not yet checked."""
    beside = path.with_name(path.name + SUFFIX)
    try:
        return Bundle(path.read_bytes()), parse_release(beside.read_bytes()[: MOST_BYTES + 1])
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not there; make it: cleave release sign --key FILE") from None
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None


def write_signed(path: Path, bundle: Bundle, release: Release) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(bundle.data)
        part.replace(path)
        path.with_name(path.name + SUFFIX).write_text(release.dump(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
