"""Small private files, written atomically, and locks between processes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.protocol.errors import UserError

LOCK_S = 3.0  # a change takes milliseconds: a process that holds a lock for longer is stopped or hangs
LOCK_LOOK_S = 0.005


def state_folder(variable: str, name: str) -> Path:
    """This program's state folder: from the environment variable, or under the user's XDG state folder."""
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
    """Replace a file atomically: a reader finds the old or the new one; with `durable`, also after a power cut. A long
    text may come as lines, so that it is never in memory as a whole."""
    # not a Path: pathlib interns every name, and Python's intern table would grow in a server that writes often
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
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _sync_folder(folder: Path) -> None:
    """Make the new directory entry survive a power cut."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # the folder is writable but not readable
    try:
        with suppress(OSError):  # some phone file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(path: Path) -> None:
    """Remove what killed writers left behind. Call only while holding the file's lock."""
    for part in path.parent.glob(f".{path.name}.*.*"):
        with suppress(OSError):
            part.unlink()


class Busy(UserError):
    """Another process held the lock for longer than the wait limit."""


@contextmanager
def locked(path: Path, *, wait: bool = True, wait_s: float = LOCK_S) -> Iterator[bool]:
    """Hold this lock among all processes; it is released when the process ends. If another process has it: yield False
    at once with `wait=False`, otherwise raise Busy after `wait_s`."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                if time.monotonic() >= deadline:
                    raise Busy(f"{path} is locked by {_holder(descriptor)}; end it, or try again") from None
            except OSError as error:
                raise UserError(f"cannot lock {path}: {error.strerror}") from None
            time.sleep(LOCK_LOOK_S)
        with suppress(OSError):  # only for the error message above
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield True
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """The process that holds the lock, from the PID that it wrote into the file."""
    try:
        pid = int(os.pread(descriptor, 32, 0))
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "another process"
    name = status.partition("Name:")[2].split("\n", 1)[0].strip()
    stopped = ", which is stopped (kill -CONT resumes it)" if "\nState:\tT" in status else ""
    return f"process {pid} ({name}){stopped}"
