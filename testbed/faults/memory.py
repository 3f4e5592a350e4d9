"""What the memory of this process consists of, by glibc's own account (mallinfo2).

Resident memory alone cannot show a leak of a few bytes per message: malloc keeps freed memory, as fragmented as the
busiest moments left it, and reuses it. So three parts are reported: memory in use, memory that malloc holds free, and
memory of the process outside malloc.

In an environment with `EXACT`, malloc also allocates all Python objects, and freed memory counts as free at once.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

# Python's own allocator takes arenas of 1 MiB and does not say how much of them is used; and mallinfo2 counts each
# thread's cache of freed memory, up to 0.2 MiB, as in use.
EXACT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


@dataclass(frozen=True, slots=True)
class Memory:
    in_use_bytes: int  # allocated and not freed
    free_bytes: int  # held by malloc for reuse
    outside_bytes: int  # outside malloc: stacks, mappings; below zero if some of malloc's pages were never touched
    resident_bytes: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def memory() -> Memory | None:
    """Memory of this process, after a garbage collection; None without glibc 2.33 or later."""
    gc.collect()
    sys._clear_type_cache()  # holds up to 4,096 attribute names, and fills slowly
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except (AttributeError, OSError):
        return None
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    kib = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    return Memory(
        in_use_bytes=found.uordblks + found.hblkhd,
        free_bytes=found.fordblks,
        outside_bytes=1024 * kib["Anonymous:"] - found.arena - found.hblkhd,
        resident_bytes=1024 * kib["Rss:"],
    )
