"""Process limits that thousands of connections run into."""

from __future__ import annotations

import contextlib
import sys


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit: each connection is a file."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
