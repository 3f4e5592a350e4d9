"""The link model: when a transfer over a link arrives.

A plain link is a rate and a latency in each direction, one transfer after the other:

    sent out  = max(ready, link free) + bits / rate
    arrives   = sent out + latency

Effects of real lines come on top. Each only adds time and none takes capacity away, because the profiles' rates
were measured as throughput over lines that have these effects.

- Changing rate: with a trace (`emulator.links.rate_trace`) packets pass at the trace's times. The profile's rate is the
  trace's mean; where the rate is lower (part of the line is lent, or the device was slowed down) every packet of the
  trace is smaller.
- Jitter: a message is late by a uniform time from 0 to twice the jitter, as under netem with `delay` latency + jitter.
- Loss: selective repeat. All n packets of the last round trip have arrived after r repetitions with probability (1 -
  p^(r+1))^n, and each repetition costs a round trip; packets lost earlier are repeated meanwhile.
- Bufferbloat: a busy direction fills the buffer in front of the line. The round trip, measured idle and under load,
  gives its length: queue = min(how long the direction has been busy or will be, loaded - idle). Packets lost in this
  direction are repeated behind the queue. The queue delays transfers in the other direction once, because their
  acknowledgements wait in it. A transfer sees the transfers that were handed to the other direction before the time at
  which it would arrive.
- Order: transfers in one direction never overtake each other.

For each device, the arrival times depend only on its transfers, in their order, and on the time each was handed over.
They do not depend on how transfers are grouped into messages or calls, nor on other devices. All terms above but one
look back, at earlier transfers. The exception is an answer behind a busy downlink: it sees downloads that were sent
while it was computed and uploaded. So the arrival of an answer is known in two parts: `send` says when it would arrive,
and `queued_s`, called at that time, by how much downloads delay it.

Random numbers come from one splitmix64 sequence per device (Steele, Lea and Flood, OOPSLA 2014); transfer i has its own
numbers in it. Pure, and vectorised over devices, each used at most once per call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.links.rate_trace import PACKET_BYTES, LinkTrace, RateTrace

Seconds = NDArray[np.float64]
Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

# effects beyond rate and latency; all zero and no trace is a plain link
LINK = np.dtype(
    [
        ("key", "<u8"),  # start of the device's random sequence
        ("jitter_down_s", "<f8"),
        ("jitter_up_s", "<f8"),
        ("loss_down", "<f8"),  # share of packets, 0 to 1
        ("loss_up", "<f8"),
        ("queue_down_s", "<f8"),  # how much a full downlink lengthens the round trip
        ("queue_up_s", "<f8"),
        ("trace", "<i4"),  # index into the traces; NO_TRACE: constant rate
        ("offset_s", "<f8"),  # where in its trace a device starts
    ]
)
NO_TRACE = -1
MOST_REPETITIONS = 15  # as in Linux, before it gives up a connection
_DRAWS = 4  # random numbers per transfer and device: jitter and loss, down and up
_GAMMA = 0x9E3779B97F4A7C15  # of splitmix64


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class Links:
    """The effects of a fleet's links beyond rate and latency, one row of `table` per device."""

    table: NDArray[np.void]  # dtype LINK
    traces: tuple[LinkTrace, ...] = ()

    def __len__(self) -> int:
        return len(self.table)

    def take(self, devices: Sequence[int] | slice) -> Links:
        """The links of some devices; -1 stands for a plain link."""
        if isinstance(devices, slice):
            return Links(self.table[devices], self.traces)
        with_plain = np.concatenate([self.table, plain_links(1).table])
        return Links(with_plain[list(devices)], self.traces)


def plain_links(count: int) -> Links:
    table = np.zeros(count, dtype=LINK)
    table["trace"] = NO_TRACE
    return Links(table)


def links_to_json(links: Links) -> dict[str, Any]:
    """Links as sent to a pod."""
    return {
        "links": links.table.tolist(),
        "traces": [{"down_ms": trace.down.at_ms.tolist(), "up_ms": trace.up.at_ms.tolist()} for trace in links.traces],
    }


def links_from_json(told: Mapping[str, Any], count: int) -> Links:
    """The inverse of `links_to_json`; plain links if none are given."""
    if "links" not in told:
        return plain_links(count)
    pairs = [[np.array(trace[way], np.int64) for way in ("down_ms", "up_ms")] for trace in told["traces"]]
    table = np.array([tuple(row) for row in told["links"]], dtype=LINK)
    return Links(table, tuple(LinkTrace(RateTrace(down), RateTrace(up)) for down, up in pairs))


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One device's link in the units of the kernel's htb and netem."""

    rate_down_bps: float
    rate_up_bps: float
    delay_down_s: float  # mean; netem draws uniformly from delay - jitter to delay + jitter
    delay_up_s: float
    jitter_down_s: float
    jitter_up_s: float
    loss_down: float  # share of packets, 0 to 1
    loss_up: float
    buffer_down_bytes: float  # capacity of the queue in front of the line; 0: unknown, or never full
    buffer_up_bytes: float


def link_specs(profiles: NDArray[np.void], links: Links) -> list[LinkSpec]:
    """The links of a fleet in the kernel's units; a changing rate is given as its mean."""
    columns = {}
    for way in ("down", "up"):
        rate, jitter = profiles[f"{way}_bps"], links.table[f"jitter_{way}_s"]
        columns[f"rate_{way}_bps"] = rate
        columns[f"delay_{way}_s"] = profiles["latency_s"] + jitter
        columns[f"jitter_{way}_s"] = jitter
        columns[f"loss_{way}"] = links.table[f"loss_{way}"]
        columns[f"buffer_{way}_bytes"] = links.table[f"queue_{way}_s"] * rate / 8
    rows = zip(*(columns[field.name].tolist() for field in fields(LinkSpec)), strict=True)
    return [LinkSpec(*row) for row in rows]


# ---- chance


def device_keys(seed: int, devices: Indices) -> Words:
    """The start of each device's random sequence."""
    return _mix(_mix(np.uint64(seed % 2**64) + _steps(np.ones(1))) + _steps(devices))


def uniforms(key: Words, number: Indices) -> Seconds:
    """Element `number` of each sequence, at least 0 and less than 1."""
    return (_mix(key + _steps(number)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _steps(count: NDArray[np.generic]) -> Words:
    return (count.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)  # wraps, as intended


def _mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# ---- time


def transfer(ready_s: Seconds, free_s: Seconds, size_bytes: Indices, rate_bps: Seconds) -> Seconds:
    """When the last bit leaves the sender: sending starts when the data is ready and the link is free."""
    return np.maximum(ready_s, free_s) + 8 * size_bytes / rate_bps


def repetitions(uniform: Seconds, packets: Seconds, loss: Seconds) -> Seconds:
    """The smallest r with (1 - loss^(r+1))^packets > uniform: rounds until nothing is missing."""
    with np.errstate(divide="ignore"):  # no loss: log 0 gives 0 rounds
        missing = -np.expm1(np.log(uniform) / np.maximum(packets, 1.0))  # 1 - uniform^(1/packets)
        rounds = np.ceil(np.log(missing) / np.log(loss)) - 1
    return np.where((loss > 0) & (packets > 0), np.clip(rounds, 0.0, MOST_REPETITIONS), 0.0)


class Lines:
    """The links of many devices in use: their state, and when transfers arrive."""

    def __init__(self, links: Links) -> None:
        table = links.table
        effects = [name for name in LINK.names or () if name not in ("key", "trace", "offset_s")]
        self._plain = not any(table[name].any() for name in effects) and (table["trace"] == NO_TRACE).all()
        self._traces = [(number, trace) for number, trace in enumerate(links.traces) if number in table["trace"]]
        self._table = table
        self._begun_s = np.full(len(table), np.nan)  # when a device's trace started: at its first transfer
        self.down = _Way(self, "down", 0)
        self.up = _Way(self, "up", 2)

    def forget(self, devices: list[int]) -> None:
        """Drop all transfers in flight of these devices."""
        for way in (self.down, self.up):
            for state in (way.free_s, way.busy_since_s, way.arrived_s, way.packets):
                state[devices] = 0.0
            way.forget(devices)


class _Way:
    """One direction of all links."""

    def __init__(self, lines: Lines, name: str, draw: int) -> None:
        self._lines, self._draw = lines, draw
        table = lines._table
        self._jitter_s, self._loss = table[f"jitter_{name}_s"], table[f"loss_{name}"]
        self._queue_s = table[f"queue_{name}_s"]
        self.bloats = bool(self._queue_s.any())
        # device whose buffer can fill -> (handed over at, line busy since, line busy until) per transfer
        self._handed: dict[int, list[tuple[float, float, float]]] = {}
        self._rates: list[tuple[int, RateTrace]] = [(number, getattr(trace, name)) for number, trace in lines._traces]
        self.free_s, self.busy_since_s, self.arrived_s = (np.zeros(len(table)) for _ in range(3))
        self.packets = np.zeros(len(table))  # trace opportunities used
        self._count = np.zeros(len(table), np.int64)  # transfers so far

    def send(
        self, device: Indices, ready_s: Seconds, size_bytes: Indices, rate_bps: Seconds, latency_s: Seconds
    ) -> Seconds:
        """When each transfer arrives if the other direction is idle (see `queued_s`); each device at most once. A
        transfer of 0 bytes takes only its turn and the latency."""
        free_s = self.free_s[device]
        out_s = transfer(ready_s, free_s, size_bytes, rate_bps)
        if self._lines._plain:
            self.free_s[device] = out_s
            return out_s + latency_s
        for number, trace in self._rates:
            on = np.flatnonzero((self._lines._table["trace"][device] == number) & (size_bytes > 0))
            if len(on):
                out_s[on] = self._over(trace, device[on], ready_s[on], size_bytes[on], rate_bps[on])
        self.free_s[device] = out_s
        if self.bloats:
            self.busy_since_s[device] = np.where(ready_s > free_s, ready_s, self.busy_since_s[device])
            self._note(device, ready_s, out_s)
        late_s = self._late_s(device, out_s, size_bytes, rate_bps, latency_s)
        arrived_s: Seconds = np.maximum(out_s + latency_s + late_s, self.arrived_s[device])
        self.arrived_s[device] = arrived_s
        return arrived_s

    def _note(self, device: Indices, ready_s: Seconds, out_s: Seconds) -> None:
        since_s = self.busy_since_s[device]
        for d, ready, since, out in zip(*(a.tolist() for a in (device, ready_s, since_s, out_s)), strict=True):
            if self._queue_s[d]:
                handed = self._handed.setdefault(d, [])
                if handed and ready <= handed[-1][0]:
                    handed[-1] = (handed[-1][0], since, out)
                else:
                    handed.append((ready, since, out))

    def queued_s(self, device: int, at_s: float) -> float:
        """The delay in this direction's buffer at that time, to be added to a transfer that would arrive then in the
        other direction. Call in order of time per device: past entries are dropped."""
        handed = self._handed.get(device, [])
        known = bisect_right(handed, at_s, key=lambda entry: entry[0])
        if not known:
            return 0.0
        del handed[: known - 1]
        _, since_s, free_s = handed[0]
        return max(0.0, min(at_s - since_s, free_s - at_s, float(self._queue_s[device])))

    def forget(self, devices: list[int]) -> None:
        for device in devices:
            self._handed.pop(device, None)

    def _over(
        self, trace: RateTrace, device: Indices, ready_s: Seconds, size_bytes: Indices, rate_bps: Seconds
    ) -> Seconds:
        """When the last bit leaves the sender over a changing rate."""
        begun_s = self._lines._begun_s
        begun_s[device] = np.where(np.isnan(begun_s[device]), ready_s, begun_s[device])
        zero_s = begun_s[device] - self._lines._table["offset_s"][device]
        packet_bytes = PACKET_BYTES * rate_bps / trace.mean_bps
        packets = np.maximum(self.packets[device], trace.passed(ready_s - zero_s)) + size_bytes / packet_bytes
        self.packets[device] = packets
        out_s: Seconds = np.maximum(zero_s + trace.moment(packets), ready_s)
        return out_s

    def _late_s(
        self, device: Indices, out_s: Seconds, size_bytes: Indices, rate_bps: Seconds, latency_s: Seconds
    ) -> Seconds:
        """The delay from jitter and loss."""
        key, first = self._lines._table["key"][device], _DRAWS * self._count[device] + self._draw
        self._count[device] += 1
        for_jitter, for_loss = uniforms(key, np.stack([first, first + 1]))
        late_s: Seconds = 2 * self._jitter_s[device] * for_jitter
        loss, packets = self._loss[device], np.ceil(size_bytes / PACKET_BYTES)
        some = np.flatnonzero(for_loss > 1 - loss * packets)  # (1 - loss)^packets is no less: the rest lose nothing
        if len(some):
            busy_s = np.minimum(out_s[some] - self.busy_since_s[device[some]], self._queue_s[device[some]])
            round_trip_s = 2 * latency_s[some] + busy_s
            in_flight = np.ceil(rate_bps[some] * round_trip_s / (8 * PACKET_BYTES))
            at_stake = np.minimum(packets[some], np.maximum(in_flight, 1.0))
            late_s[some] += round_trip_s * repetitions(for_loss[some], at_stake, loss[some])
        return np.where(size_bytes > 0, late_s, 0.0)
