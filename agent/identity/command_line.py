"""Hides an invitation's token: every user of the machine can read a process's command line.

On Linux (and so Android) the process can overwrite its arguments; elsewhere they stay visible. The shell's history is
out of reach; `--invitation-file` avoids both.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path


def hide_tokens() -> None:
    """Overwrite the tokens of links in this process's command line with dots."""
    try:
        words = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: fields 48 and 49 of proc(5)
    except (OSError, ValueError, IndexError):
        return
    if not begin or end - begin != len(words):
        return  # the arguments' place in memory is not known
    for found in re.finditer(rb"token=([A-Za-z0-9_-]+)", words):
        ctypes.memset(begin + found.start(1), ord("."), len(found[1]))


def without_invitation(words: Sequence[str]) -> list[str]:
    """The arguments without the invitation, to restart a device that has joined: it remembers the server."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == "--invitation":
            skip = True
        elif not word.startswith("--invitation="):
            kept.append(word)
    return kept
