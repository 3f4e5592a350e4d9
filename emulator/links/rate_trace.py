"""Links whose rate changes: traces in mahimahi's format, one file per direction.

Each line of a file is an integer: the millisecond at which one packet of 1,500 bytes may pass. Lines never decrease; a
millisecond may occur several times. After the last line the trace starts over; the last millisecond is its length.

A transfer takes opportunities one after the other: with `passed(t)` opportunities before t, a transfer that finds the
line free at t ends with opportunity passed(t) + packets. Both are looked up in the sorted times, for any number of
transfers at once. A transfer that needs part of a packet leaves the rest to the next transfer.

`RateTrace` is pure; `read_link_trace` reads a pair of files, plain or compressed (.gz).
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.protocol.errors import UserError

PACKET_BYTES = 1500
LONGEST_MS = 10**10  # four months; longer means another format
LONGEST_LINE = 24
ROUNDING_PACKETS = 1e-6  # of sums of fractional packets

Floats = NDArray[np.float64]


class LinkTraceError(UserError):
    """A link trace that cannot be read or is invalid; the message says where, what, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class RateTrace:
    """One direction."""

    at_ms: NDArray[np.int64]  # the opportunities, in order; the last one is also the length of the trace

    def __post_init__(self) -> None:
        if not len(self.at_ms):
            raise LinkTraceError("it is empty; write one integer per line, the milliseconds at which a packet may pass")
        falls = np.flatnonzero(np.diff(self.at_ms) < 0)
        if falls.size:
            before, after = self.at_ms[falls[0] : falls[0] + 2].tolist()
            raise LinkTraceError(f"line {falls[0] + 2}: {after} comes after {before}; the milliseconds must not fall")
        if self.at_ms[0] < 0:
            raise LinkTraceError(f"line 1: {self.at_ms[0]} is negative; a trace begins at millisecond 0 or later")
        if not 0 < self.at_ms[-1] <= LONGEST_MS:
            raise LinkTraceError(
                f"line {len(self.at_ms)}: the trace ends at millisecond {self.at_ms[-1]}; its last line is its length "
                f"and must be more than 0 and at most {LONGEST_MS}"
            )

    def __repr__(self) -> str:
        return f"<RateTrace of {self.length_s:g} s, {self.mean_bps / 1e6:.2f} Mbit/s on average>"

    @property
    def length_s(self) -> float:
        return float(self.at_ms[-1]) / 1e3

    @property
    def mean_bps(self) -> float:
        return 8 * PACKET_BYTES * len(self.at_ms) / self.length_s

    def passed(self, at_s: Floats) -> Floats:
        """Number of opportunities before these times, counted from 0."""
        rounds, within_ms = np.divmod(1e3 * at_s, float(self.at_ms[-1]))
        counted: Floats = rounds * len(self.at_ms) + np.searchsorted(self.at_ms, within_ms, side="left")
        return counted

    def moment(self, packets: Floats) -> Floats:
        """When this many packets, at least one, have passed since 0; a fraction of a packet passes with the whole
        packet."""
        last = np.maximum(np.ceil(packets - ROUNDING_PACKETS).astype(np.int64) - 1, 0)
        rounds, within = np.divmod(last, len(self.at_ms))
        moments: Floats = (rounds * self.at_ms[-1] + self.at_ms[within]) / 1e3
        return moments

    def rates_bps(self, window_s: float) -> Floats:
        """Mean rate in each whole window of the trace, or of the whole trace if that is shorter than one window."""
        count = int(self.length_s / window_s)
        if count < 1:
            return np.array([self.mean_bps])
        edges_ms = 1e3 * window_s * np.arange(count + 1)
        edges_ms[0] = -1.0  # an opportunity at 0 belongs to the first window, one on an edge to the window before it
        packets = np.diff(np.searchsorted(self.at_ms, edges_ms, side="right"))
        rates: Floats = 8 * PACKET_BYTES * packets / window_s
        return rates


@dataclass(frozen=True, slots=True, eq=False)
class LinkTrace:
    """Both directions, recorded together: they stay aligned as long as they have the same length."""

    down: RateTrace
    up: RateTrace


def read_link_trace(prefix: str) -> LinkTrace:
    """The pair PREFIX.down and PREFIX.up, or the same with .gz."""
    found = {way: _file(prefix, way) for way in ("down", "up")}
    missing = [way for way, path in found.items() if path is None]
    if len(missing) == 2:
        raise LinkTraceError(f"{prefix}: there is neither {prefix}.down nor {prefix}.up, nor the same with .gz")
    if missing:
        other = next(path for path in found.values() if path is not None)
        raise LinkTraceError(
            f"{prefix}: there is {other.name} but no {Path(prefix).name}.{missing[0]}; a link needs both directions"
        )
    down, up = (read_rate_trace(path) for path in found.values() if path is not None)
    return LinkTrace(down, up)


def read_rate_trace(path: Path) -> RateTrace:
    """One direction; errors name the file and the line."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise LinkTraceError(f"{path}: there is no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise LinkTraceError(f"{path}: it cannot be unpacked: {error}") from None
    except OSError as error:
        raise LinkTraceError(f"{path}: it cannot be read: {error.strerror}") from None
    lines = data.rstrip().split(b"\n") if data.strip() else []
    try:
        if any(len(line) > LONGEST_LINE for line in lines):
            raise ValueError("a line too long for an integer")
        return RateTrace(np.array(lines, dtype=f"S{LONGEST_LINE}").astype(np.int64))
    except LinkTraceError as error:
        raise LinkTraceError(f"{path}{', ' if str(error).startswith('line') else ': '}{error}") from None
    except (ValueError, OverflowError):
        number, line = next((i, each) for i, each in enumerate(lines, start=1) if not _is_integer(each))
        shown = line.decode(errors="replace").strip()[:40]
        raise LinkTraceError(
            f'{path}, line {number}: "{shown}" is not an integer; write one per line, the milliseconds at which '
            "a packet may pass"
        ) from None


def _file(prefix: str, way: str) -> Path | None:
    return next((path for path in (Path(f"{prefix}.{way}"), Path(f"{prefix}.{way}.gz")) if path.is_file()), None)


def _is_integer(line: bytes) -> bool:
    try:
        return abs(int(line)) < 2**63 and len(line) <= LONGEST_LINE
    except ValueError:
        return False
