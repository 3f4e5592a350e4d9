"""Limits of this process that thousands of connections run into."""

from __future__ import annotations

import contextlib
import sys


def raise_file_limit() -> None:
    """A connection is a file: allow as many as this user may have."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
