"""The access list on disk: one small JSON file, readable by its owner only.

`cleave invite` and a running server may change it at the same time. A change is made under a lock, to what the file
holds at that moment, and the whole file is written. A reader checks the file's stamp and reads it again if it changed.

The process that holds the lock may be stopped (Ctrl-Z, a debugger, a full disk). A command waits a few seconds for the
lock and then names that process. A running server does not wait (`impatient`): a change that can wait is made later,
together with the next one (`soon`).
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agent.identity.files import LOCK_S, Busy, locked, private_folder, remove_parts, state_folder, write_private
from agent.identity.keys import Keys
from agent.protocol.errors import UserError
from ps.access.access_list import AccessList, Enrolled, Invitation
from ps.access.reputation import Standing

VERSION = 2  # version 1 had no standings; it is read, and written as 2
SERVER_WAIT_S = 0.004  # a process that is not stopped holds the lock for about a millisecond
MOST_LATER = 1000  # changes that wait for the lock; beyond this, the oldest are dropped
LAST_S = 1e11  # a time in the year 5138: later values are invalid
Answer = TypeVar("Answer")
Row = TypeVar("Row", Invitation, Enrolled, Standing)
Change = Callable[[AccessList], AccessList]


def server_folder() -> Path:
    return state_folder("CLEAVE_STATE", "cleave")


class Disk(Protocol):
    """The disk that holds the file. UserError: the file cannot be written, or is locked by another process (Busy)."""

    def stamp(self, path: Path) -> tuple[int, int, int]:
        """Differs after each change; FileNotFoundError if there is no such file."""
        ...

    def read(self, path: Path) -> str: ...

    def locked(self, path: Path, wait_s: float) -> AbstractContextManager[object]: ...

    def write(self, path: Path, lines: Iterable[str], durable: bool) -> None:
        """Replace the file, atomically, while holding its lock."""
        ...


class RealDisk:
    def stamp(self, path: Path) -> tuple[int, int, int]:
        status = path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def read(self, path: Path) -> str:
        return path.read_text(encoding="utf-8")

    def locked(self, path: Path, wait_s: float) -> AbstractContextManager[object]:
        private_folder(path.parent)
        return locked(path, wait_s=wait_s)

    def write(self, path: Path, lines: Iterable[str], durable: bool) -> None:
        remove_parts(path)
        write_private(path, lines, durable=durable)


class AccessFile:
    def __init__(self, folder: Path, keys: bool = True, wait_s: float = LOCK_S, disk: Disk | None = None) -> None:
        """Creates the server's keys if there are none. Without `keys` nothing is written before the first change.
        `wait_s`: longest wait for the lock; then Busy is raised. `disk`: replaces this machine's disk."""
        self._disk: Disk = disk or RealDisk()
        self.path = folder / "access.json"
        self._lock = self.path.with_name("access.lock")
        self._wait_s = wait_s
        self._stamp: tuple[int, int, int] | None = None
        self._access_list = AccessList()
        self._later: deque[Change] = deque(maxlen=MOST_LATER)
        self._later_durable = False
        if keys and not self.read().secret:
            self.change(
                lambda access_list: (
                    access_list if access_list.secret else replace(access_list, secret=Keys.new().secret),
                    None,
                )
            )

    @property
    def keys(self) -> Keys:
        return Keys.of(self.read().secret)

    def impatient(self) -> AccessFile:
        """The same file, for a thread of the server that must not wait."""
        return AccessFile(self.path.parent, keys=False, wait_s=SERVER_WAIT_S, disk=self._disk)

    def read(self) -> AccessList:
        """The present contents. Costs almost nothing if the file has not changed."""
        stamp = self._look()
        if stamp is not None and stamp != self._stamp:
            self._access_list, self._stamp = _from_text(self.path, self._disk), stamp
        return self._access_list

    def _look(self) -> tuple[int, int, int] | None:
        try:
            return self._disk.stamp(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None

    def change(
        self,
        how: Callable[[AccessList], tuple[AccessList, Answer]],
        *,
        durable: bool = True,
        wait_s: float | None = None,
    ) -> Answer:
        """Replace the access list by the one that `how` makes of it, and return what else `how` returns. `durable`: the
        change survives a power cut, which takes a disk some milliseconds."""
        with self._disk.locked(self._lock, self._wait_s if wait_s is None else wait_s):
            access_list = before = self.read()
            for earlier in self._later:
                access_list = earlier(access_list)
            following, answer = how(access_list)
            if following != before:
                self._disk.write(self.path, _as_lines(following), durable or self._later_durable)
                self._access_list, self._stamp = following, self._look()  # no other process writes meanwhile
            self._later.clear()
            self._later_durable = False
            return answer

    def soon(self, how: Change, *, durable: bool = False) -> bool:
        """Like `change`, without a return value. False if the lock is held by another process: the change is then made
        with the next one, or by `retry`."""
        self._later.append(how)
        self._later_durable |= durable
        return self.retry()

    def retry(self) -> bool:
        """Make the changes that are waiting, if any."""
        if not self._later:
            return True
        try:
            self.change(lambda access_list: (access_list, None), durable=False, wait_s=0.0)
        except Busy:
            return False
        return True


def _as_lines(access_list: AccessList) -> Iterator[str]:
    """One line per invitation and per device: a server writes this whenever a device joins or leaves."""
    yield f'{{\n"version": {VERSION},\n"secret": {json.dumps(access_list.secret)}'
    yield f',\n"listening": {json.dumps(access_list.listening)},\n"enrolling": {access_list.enrolling}'
    tables: dict[str, Sequence[Invitation | Enrolled | Standing]] = {
        "invitations": access_list.invitations,
        "enrolled": access_list.enrolled,
        "standings": access_list.standings,
    }
    for name, rows in tables.items():
        yield f',\n"{name}": ['
        for number, row in enumerate(rows):
            yield ("," if number else "") + "\n " + json.dumps({key: getattr(row, key) for key in row.__slots__})
        yield "]"
    yield "\n}\n"


def _from_text(path: Path, disk: Disk) -> AccessList:
    """Checks every value: a value of the wrong type would stop a server much later, when it is used."""
    try:
        saved: dict[str, Any] = json.loads(disk.read(path))
        if saved.pop("version") not in (1, VERSION):
            raise UserError(f"{path} was written by another version of this program; move it away to begin anew")
        access_list = AccessList(
            secret=_checked("secret", "str", saved["secret"]),
            listening=tuple(_checked("listening", "str", address) for address in saved["listening"]),
            enrolling=_checked("enrolling", "int", saved.get("enrolling", 0)),
            invitations=tuple(_row(Invitation, row) for row in saved["invitations"]),
            enrolled=tuple(_row(Enrolled, row) for row in saved["enrolled"]),
            standings=tuple(_row(Standing, row) for row in saved.get("standings", ())),
        )
        if access_list.secret:
            Keys.of(access_list.secret)
        return access_list
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{path} is damaged; restore it, or move it away to begin anew without any device") from None


def _row(kind: type[Row], row: dict[str, Any]) -> Row:
    kinds = {field.name: str(field.type) for field in fields(kind)}
    return kind(**{name: _checked(name, kinds[name], value) for name, value in row.items()})


def _checked(name: str, kind: str, value: Any) -> Any:
    """`kind`: the declared type of the field. Numbers must be finite, and times must be in the calendar's range."""
    if value is None and kind == "float | None":
        return None
    if kind == "str":
        good = isinstance(value, str)
    elif kind == "int":
        good = type(value) is int and 0 <= value < 1 << 53
    else:
        most = LAST_S if name.endswith("_s") else sys.float_info.max
        good = type(value) in (int, float) and 0 <= value <= most
    if not good:
        raise ValueError(f"{name} is no {kind}")
    return value
