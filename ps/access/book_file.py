"""The access book on disk: one small JSON file, readable by its owner only.

`cleave invite` and a running server change it at the same time: a change is made under a lock, on what the file holds
at that moment, and written whole. A reader looks at the file's stamp and reads it again when it has changed.

Whoever holds the lock may be stopped (Ctrl-Z, a debugger, a full disk): a command waits for it for a few seconds and
then says which process it is. A running server does not wait (`impatient`): a change that is not urgent is made later,
together with the next one (`soon`).
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from agent.identity.files import LOCK_S, Busy, locked, private_folder, remove_parts, state_folder, write_private
from agent.identity.keys import Keys
from agent.protocol.errors import UserError
from ps.access.book import Book, Enrolled, Invitation
from ps.access.reputation import Standing

VERSION = 2  # 1: without standings; it is read, and written as 2
SERVER_WAIT_S = 0.004  # another process that is not stopped has it for about a millisecond
MOST_LATER = 1000  # changes that wait for the lock; then the oldest ones are given up
LAST_S = 1e11  # a moment in the year 5138: later ones are none
Answer = TypeVar("Answer")
Row = TypeVar("Row", Invitation, Enrolled, Standing)
Change = Callable[[Book], Book]


def server_folder() -> Path:
    return state_folder("CLEAVE_STATE", "cleave")


class AccessFile:
    def __init__(self, folder: Path, keys: bool = True, wait_s: float = LOCK_S) -> None:
        """The server's keys are made if there are none; without `keys` nothing is written before the first change.
        `wait_s`: for the lock, at most; then Busy is raised."""
        self.path = folder / "access.json"
        self._lock = self.path.with_name("access.lock")
        self._wait_s = wait_s
        self._stamp: tuple[int, int, int] | None = None
        self._book = Book()
        self._later: deque[Change] = deque(maxlen=MOST_LATER)
        self._later_durable = False
        if keys and not self.read().secret:
            self.change(lambda book: (book if book.secret else replace(book, secret=Keys.new().secret), None))

    @property
    def keys(self) -> Keys:
        return Keys.of(self.read().secret)

    def impatient(self) -> AccessFile:
        """The same file for a server's thread."""
        return AccessFile(self.path.parent, keys=False, wait_s=SERVER_WAIT_S)

    def read(self) -> Book:
        """What it holds now; costs next to nothing when nothing has changed."""
        stamp = self._look()
        if stamp is not None and stamp != self._stamp:
            self._book, self._stamp = _from_text(self.path), stamp
        return self._book

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def change(
        self, how: Callable[[Book], tuple[Book, Answer]], *, durable: bool = True, wait_s: float | None = None
    ) -> Answer:
        """Make the next book of the present one; what else `how` has to say. `durable`: so that not even a power cut
        undoes it, which takes a disk some milliseconds."""
        private_folder(self.path.parent)
        with locked(self._lock, wait_s=self._wait_s if wait_s is None else wait_s):
            book = before = self.read()
            for earlier in self._later:
                book = earlier(book)
            following, answer = how(book)
            if following != before:
                remove_parts(self.path)
                write_private(self.path, _as_lines(following), durable=durable or self._later_durable)
                self._book, self._stamp = following, self._look()  # nobody else writes while we have the lock
            self._later.clear()
            self._later_durable = False
            return answer

    def soon(self, how: Change, *, durable: bool = False) -> bool:
        """The same for what need not be answered: False if the lock is not to be had now. Then it is made with the
        next change, or by `retry`."""
        self._later.append(how)
        self._later_durable |= durable
        return self.retry()

    def retry(self) -> bool:
        """Make the changes that wait, if there are any."""
        if not self._later:
            return True
        try:
            self.change(lambda book: (book, None), durable=False, wait_s=0.0)
        except Busy:
            return False
        return True


def _as_lines(book: Book) -> Iterator[str]:
    """One for each invitation and each device: a server writes this whenever one of them comes or goes."""
    yield f'{{\n"version": {VERSION},\n"secret": {json.dumps(book.secret)},\n"listening": {json.dumps(book.listening)}'
    yield f',\n"enrolling": {book.enrolling}'
    tables: dict[str, Sequence[Invitation | Enrolled | Standing]] = {
        "invitations": book.invitations,
        "enrolled": book.enrolled,
        "standings": book.standings,
    }
    for name, rows in tables.items():
        yield f',\n"{name}": ['
        for number, row in enumerate(rows):
            yield ("," if number else "") + "\n " + json.dumps({key: getattr(row, key) for key in row.__slots__})
        yield "]"
    yield "\n}\n"


def _from_text(path: Path) -> Book:
    """Every value is looked at: one of another kind would end a server when it is used, much later."""
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("version") not in (1, VERSION):
            raise UserError(f"{path} was written by another version of this program; move it away to begin anew")
        book = Book(
            secret=_checked("secret", "str", saved["secret"]),
            listening=tuple(_checked("listening", "str", address) for address in saved["listening"]),
            enrolling=_checked("enrolling", "int", saved.get("enrolling", 0)),
            invitations=tuple(_row(Invitation, row) for row in saved["invitations"]),
            enrolled=tuple(_row(Enrolled, row) for row in saved["enrolled"]),
            standings=tuple(_row(Standing, row) for row in saved.get("standings", ())),
        )
        if book.secret:
            Keys.of(book.secret)
        return book
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
    """`kind`: as the field is declared. Numbers are finite, and moments are such as a calendar has."""
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
