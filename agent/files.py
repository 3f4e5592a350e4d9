"""Small files that only their owner may read, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.errors import UserError


def state_folder(variable: str, name: str) -> Path:
    """Where this program keeps what it must not forget: as the variable says, or among the user's other state."""
    if given := os.environ.get(variable):
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / name


def private_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; name another one with --state") from None
    return folder


def write_private(path: Path, text: str | Iterable[str], *, durable: bool = True) -> None:
    """A reader finds the old file or the new one; if it is durable, also after a power cut. A long text may come in
    lines, so that it is never in memory as a whole."""
    # not a Path: that interns each of these names, and a server that writes often makes Python's table of them grow
    part = f"{path.parent}{os.sep}.{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines([text] if isinstance(text, str) else text)
                file.flush()
                if durable:
                    os.fsync(descriptor)
            os.replace(part, path)  # noqa: PTH105
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(part)  # noqa: PTH108
            raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold this lock among all processes; False if another one has it and we do not wait. Ends with its process."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
