"""The access book on disk: one small JSON file, readable by its owner only.

`cleave invite` and a running server change it at the same time: a change is made under a lock, on what the file holds
at that moment, and written whole. A reader looks at the file's stamp and reads it again when it has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agent.errors import UserError
from agent.files import locked, private_folder, state_folder, write_private
from agent.keys import Keys
from ps.access import Book, Enrolled, Invitation

VERSION = 1
Answer = TypeVar("Answer")


def server_folder() -> Path:
    return state_folder("CLEAVE_STATE", "cleave")


class AccessFile:
    def __init__(self, folder: Path) -> None:
        """The server's keys are made if there are none."""
        self.path = private_folder(folder) / "access.json"
        self._lock = self.path.with_name("access.lock")
        self._stamp: tuple[int, int, int] | None = None
        self._book = Book()
        if not self.read().secret:
            self.change(lambda book: (book if book.secret else replace(book, secret=Keys.new().secret), None))

    @property
    def keys(self) -> Keys:
        return Keys.of(self.read().secret)

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
        return status.st_mtime_ns, status.st_ino, status.st_size

    def change(self, how: Callable[[Book], tuple[Book, Answer]], *, durable: bool = True) -> Answer:
        """Make the next book of the present one; what else `how` has to say. `durable`: so that not even a power cut
        undoes it, which takes a disk some milliseconds."""
        with locked(self._lock):
            book = self.read()
            following, answer = how(book)
            if following != book:
                write_private(self.path, _as_lines(following), durable=durable)
                self._book, self._stamp = following, self._look()  # nobody else writes while we have the lock
            return answer


def _as_lines(book: Book) -> Iterator[str]:
    """One for each invitation and each device: a server writes this whenever one of them comes or goes."""
    yield f'{{\n"version": {VERSION},\n"secret": {json.dumps(book.secret)},\n"listening": {json.dumps(book.listening)}'
    tables: dict[str, Sequence[Invitation | Enrolled]] = {"invitations": book.invitations, "enrolled": book.enrolled}
    for name, rows in tables.items():
        yield f',\n"{name}": ['
        for number, row in enumerate(rows):
            yield ("," if number else "") + "\n " + json.dumps({key: getattr(row, key) for key in row.__slots__})
        yield "]"
    yield "\n}\n"


def _from_text(path: Path) -> Book:
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("version") != VERSION:
            raise UserError(f"{path} was written by another version of this program; move it away to begin anew")
        book = Book(
            secret=saved["secret"],
            listening=tuple(saved["listening"]),
            invitations=tuple(Invitation(**row) for row in saved["invitations"]),
            enrolled=tuple(Enrolled(**row) for row in saved["enrolled"]),
        )
        if book.secret:
            Keys.of(book.secret)
        return book
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged; restore it, or move it away to begin anew without any device") from None
