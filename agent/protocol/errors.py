"""Two kinds of error that are not bugs. The text is all the user sees: what happened, to what, what to do next."""

from __future__ import annotations


class UserError(ValueError):
    """The request is wrong, or names something missing. Exit code 2."""


class Failure(RuntimeError):
    """The request was right, but could not be carried out. Exit code 1."""
