"""Two kinds of trouble that are not bugs. Their text is all a person sees: what happened, to what, what to do next."""

from __future__ import annotations


class UserError(ValueError):
    """Something that was asked for is wrong or not there. Exit code 2."""


class Failure(RuntimeError):
    """What was asked for was right, but it could not be done. Exit code 1."""
