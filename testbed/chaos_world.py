"""Worlds for `testbed.chaos`: lists of plain operations, made from a seed and lived step by step.

An operation means something wherever it stands: devices and blocks are given as numbers that are counted round
(the k-th of those there are), so that any operation can be left out and the rest still is a world. The world keeps
books of its own, computes every block in whole numbers, and believes nothing that the dispatcher says.

    ("planner", kind)                   "packed" or "grid", for the whole world; packed without
    ("join", [profile, ...])            a profile: the fields of agent.profile.Profile in their order
    ("leave", [k, ...])                 they are gone and the server knows; what they had under way still arrives
    ("submit", [product, ...])          batch, rows, inner, columns, urgent, weight: all ready at the same moment;
                                        those of one weight (odd: the right operand) share it, and its slabs are kept
    ("forget", [weight, ...])           these weights have changed
    ("run", n)                          the next n answers arrive
    ("late", k, seconds)                an answer under way is delayed
    ("twice", k, seconds)               it arrives once more, so much later
    ("lost", k)                         it never arrives; its device is found out and taken for dead
    ("vanish", k)                       a device falls silent, is sent work all the same, and then found out
    ("refuse", k)                       a device cannot compute a block
    ("stray", device, job, block)       an answer that nobody asked for
    ("stray refusal", device, job, block)
    ("swap", k, device)                 an answer from a device that was never asked
    ("slow", k, factor)                 a device is slower than it said
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.profile import Profile, pack_profiles
from ps.cost import least_bytes
from ps.planner import Planner, Shape
from testbed.virtual import Key, Outcome, Sent, VirtualFleet, Work

Operation = tuple[Any, ...]
FAULTS = ("leave", "late", "twice", "lost", "vanish", "refuse", "stray", "stray refusal", "swap", "slow")
TOGETHER_S = 0.0005  # answers this near to each other are one event, as they are in a pod
DETECTED_S = 4.0  # after so long a silent device is taken for dead
HUGE = 1 << 40
COMMON = (1e9, 1e-4, 1e7, 1e7, 0.01, HUGE, 2)  # a profile that can do everything


class ChaosError(AssertionError):
    """The dispatcher did not keep a promise; the text says which."""


@dataclass(slots=True)
class Flight:
    """A block that was sent: its true answer, and when that arrives."""

    tile: tuple[int, ...]
    cells: NDArray[np.int64]
    due_s: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """An operand that several products share; whoever needs it needs it always as urgently."""

    inner: int
    extent: int
    urgent: bool


class Truth:
    """A product in whole numbers, and what has been accepted of it."""

    def __init__(self, shape: Shape, job: int) -> None:
        self.shape = shape
        b, r, n, c = (np.arange(size) for size in (shape.batch, shape.rows, shape.inner, shape.columns))
        self._left = (3 * b[:, None, None] + 5 * r[:, None] + 7 * n + job) % 11 - 5
        self._right = (2 * b[:, None, None] + 7 * n[:, None] + 3 * c + job) % 13 - 6
        self._out = np.zeros((shape.batch, shape.rows, shape.columns), np.int64)
        self._times = np.zeros_like(self._out)

    def block(self, tile: tuple[int, ...]) -> NDArray[np.int64]:
        b, bs, r, rs, c, cs = tile
        cells: NDArray[np.int64] = self._left[b : b + bs, r : r + rs] @ self._right[b : b + bs, :, c : c + cs]
        return cells

    def accept(self, flight: Flight) -> None:
        b, bs, r, rs, c, cs = flight.tile
        self._times[b : b + bs, r : r + rs, c : c + cs] += 1
        self._out[b : b + bs, r : r + rs, c : c + cs] = flight.cells

    def verdict(self) -> str:
        """What is wrong with it; nothing if each cell was accepted once and is right."""
        if (self._times != 1).any():
            return "some cells were not accepted exactly once"
        return "" if np.array_equal(self._out, self._left @ self._right) else "the result is wrong"


class World:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._told = [Profile(*p) for o in operations if o[0] == "join" for p in o[1]] + [Profile(*COMMON)]
        kinds = [o[1] for o in operations if o[0] == "planner"] or ["packed"]
        self._fleet = VirtualFleet(pack_profiles(self._told), Planner(kinds[0]))
        self.faults: Counter[str] = Counter()  # that met something to harm
        self.events = 0
        self.trace: list[tuple[float, str, Outcome]] = []
        self._alive: set[int] = set()
        self._silent: set[int] = set()
        self._open: dict[int, Truth] = {}
        self._jobs = 0
        self._weights: dict[int, Weight] = {}
        self._flying: dict[Key, Flight] = {}
        self._past: list[tuple[float, int, Key | int]] = []  # heap: due, sequence, answer or a device found out
        self._sequence = itertools.count()

    def live(self) -> World:
        """All operations, and then on until everything that can end has ended. Raises at the first broken promise."""
        for operation in self._operations:
            self._do(operation)
        while self._past:
            self._run(1)
        if self._open:  # nobody who is there can do these
            stuck = [j for j, t in self._open.items() if any(self._can(d, t.shape) for d in self._alive)]
            if stuck:
                raise ChaosError(f"jobs {stuck} do not end although an able device lives")
            self._alive.add(self._fleet.joined)
            self._event("join", self._fleet.join(1))
            while self._past:
                self._run(1)
        self._event("forget", self._fleet.forget(list(self._weights)))
        if self._open:
            raise ChaosError(f"jobs {list(self._open)} do not end although an able device has joined")
        if rest := self._fleet.left_behind():
            raise ChaosError(f"all is over, and this is left behind: {rest}")
        return self

    # ---- operations

    def _do(self, operation: Operation) -> None:
        match operation:
            case ("join", profiles):
                first = self._fleet.joined
                self._alive |= set(range(first, first + len(profiles)))
                self._event("join", self._fleet.join(len(profiles)))
            case ("submit", products):
                self._submit(products)
            case ("forget", weights):
                self._event("forget", self._fleet.forget(weights))
            case ("run", count):
                self._run(count)
            case ("stray", *key):
                self._fault("stray")
                self._answers([(key[0], key[1], key[2])])
            case ("stray refusal", *key):
                self._fault("stray refusal")
                self._refusals([(key[0], key[1], key[2])])
            case ("leave", chosen):
                if self._fleet.joined:
                    self._leave(sorted({k % self._fleet.joined for k in chosen}))
            case ("vanish" | "slow", k, *more) if self._fleet.joined:
                self._trouble(operation[0], k % self._fleet.joined, more)
            case (kind, k, *more) if self._flying:
                self._mishap(kind, list(self._flying)[k % len(self._flying)], more)

    def _trouble(self, kind: str, device: int, more: list[Any]) -> None:
        if kind == "slow":
            self._fault(kind)
            self._fleet.slow(device, more[0])
        elif device in self._alive - self._silent:
            self._fault(kind)
            self._silence(device)

    def _mishap(self, kind: str, key: Key, more: list[Any]) -> None:
        """Something happens to an answer that is under way."""
        flight = self._flying[key]
        self._fault(kind)
        match kind:
            case "late":
                flight.due_s = max(flight.due_s, self._fleet.now_s) + more[0]
                self._expect(flight.due_s, key)
            case "twice":
                self._expect(flight.due_s + more[0], key)
            case "lost":
                flight.lost = True
                self._silence(key[0], silent=False)
            case "refuse":
                self._refusals([key])
            case "swap":
                self._answers([(more[0] % self._fleet.joined, key[1], key[2])], misleading=True)
            case _:
                raise ValueError(f"there is no operation {kind!r}")

    def _submit(self, products: Sequence[tuple[int, int, int, int, bool, int | None]]) -> None:
        works = []
        for batch, rows, inner, columns, urgent, weight in products:
            kept: list[int | None] = [None, None]
            if weight is not None:
                side = weight % 2
                own = self._weights.setdefault(weight, Weight(inner, (rows, columns)[side], urgent))
                batch, inner, urgent, kept[side] = 1, own.inner, own.urgent, weight
                rows, columns = (rows, own.extent) if side else (own.extent, columns)
            shape = Shape(batch, rows, inner, columns)
            works.append(Work(self._jobs, shape, urgent, (kept[0], kept[1])))
            self._open[self._jobs] = Truth(shape, self._jobs)
            self._jobs += 1
        self._event("submit", self._fleet.submit(works))

    def _leave(self, devices: list[int], fault: bool = True) -> None:
        """What is under way is of no use any more; most of it arrives all the same."""
        for device in devices:
            if fault and device in self._alive:
                self._fault("leave")
            self._gone(device)
        self._event("leave", self._fleet.leave(devices))

    def _silence(self, device: int, silent: bool = True) -> None:
        if silent:
            self._silent.add(device)
        self._expect(self._fleet.now_s + DETECTED_S, device)

    def _run(self, count: int) -> None:
        """The next answers, those that come together in one event; and devices that are found out."""
        while count > 0 and self._past:
            until_s = self._past[0][0] + TOGETHER_S
            keys: list[Key] = []
            while self._past and self._past[0][0] <= until_s and count > 0:
                due_s, _, what = heapq.heappop(self._past)
                self._fleet.now_s = max(self._fleet.now_s, due_s)
                if isinstance(what, int):
                    count -= 1
                    if what in self._alive:
                        self._leave([what], fault=False)
                    continue
                flight = self._flying.get(what)
                silent = what[0] in self._silent
                if not silent and not (flight and (flight.lost or flight.due_s > due_s)):
                    keys.append(what)
                    count -= 1
            if keys:
                self._answers(keys)

    # ---- the world's own books

    def _answers(self, keys: list[Key], misleading: bool = False) -> None:
        """`misleading`: even if such a block is under way, this is not its answer."""
        due, seen = [], set()
        for position, key in enumerate(keys):
            if key in self._flying and key not in seen:
                due.append(position)
                seen.add(key)
        if misleading and due:
            return
        landed = [(keys[position], self._flying.pop(keys[position])) for position in due]
        for key, flight in landed:
            self._open[key[1]].accept(flight)
        outcome = self._fleet.answer(keys)
        if outcome.accepted != due:
            raise ChaosError(f"of the answers {keys} these count: {due}; accepted were {outcome.accepted}")
        self._event("answer", outcome)

    def _refusals(self, keys: list[Key]) -> None:
        for key in keys:
            self._flying.pop(key, None)
        self._event("refuse", self._fleet.refuse(keys))

    def _event(self, name: str, outcome: Outcome) -> None:
        self.events += 1
        self.trace.append((self._fleet.now_s, name, outcome))
        for device in outcome.suspended:
            self._gone(device)
        for sent in outcome.sent:
            self._sent(sent)
        for job in outcome.finished:
            truth = self._open.pop(job, None)
            if verdict := truth.verdict() if truth else "it had ended before":
                raise ChaosError(f"job {job} ended: {verdict}")
        self._fleet.check()

    def _sent(self, sent: Sent) -> None:
        device, job, block = sent.key
        if device not in self._alive:
            raise ChaosError(f"device {device} is not there and was sent block {block} of job {job}")
        if any(key[1:] == sent.key[1:] for key in self._flying):
            raise ChaosError(f"block {block} of job {job} was sent twice")
        self._flying[sent.key] = Flight(sent.tile, self._open[job].block(sent.tile), sent.due_s)
        if sum(key[0] == device for key in self._flying) > self._told[device].credit_blocks:
            raise ChaosError(f"device {device} was sent more blocks than its credit")
        self._expect(sent.due_s, sent.key)

    def _expect(self, due_s: float, what: Key | int) -> None:
        heapq.heappush(self._past, (due_s, next(self._sequence), what))

    def _gone(self, device: int) -> None:
        self._alive.discard(device)
        for key in [key for key in self._flying if key[0] == device]:
            del self._flying[key]

    def _can(self, device: int, shape: Shape) -> bool:
        return self._told[device].memory_bytes // 2 >= least_bytes(shape.inner)

    def _fault(self, kind: str) -> None:
        self.faults[kind] += 1


def replay(operations: Sequence[Operation]) -> World:
    """Live these operations again; raises what they broke."""
    return World(operations).live()


# ---- worlds from a seed


def generate(seed: int, length: int = 120) -> list[Operation]:
    rng = random.Random(seed)
    churn = rng.choice([1, 4])  # a world of little churn lets queues grow, one of much keeps cutting
    weights = {"join": 2, "submit": 3, "forget": 1, "run": 18, "leave": churn, "vanish": 1, "slow": 2}
    weights |= {"late": 8, "twice": 8, "lost": 2, "refuse": rng.choice([0, 2, 6])}
    weights |= {"stray": 3, "stray refusal": 2, "swap": 4}
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    # the same products again and again, as in training: plans are kept, and adapted to those who have left and joined
    groups = [[_product(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))] for _ in range(3)]
    planner = rng.choice(["packed", "grid", "grid", "grid"])  # packing takes longest
    begin: list[Operation] = [("planner", planner), ("join", [_profile(rng) for _ in range(rng.randint(1, 8))])]
    return begin + [("submit", rng.choice(groups)) if kind == "submit" else _operation(kind, rng) for kind in kinds]


def _operation(kind: str, rng: random.Random) -> Operation:
    any_of = rng.randrange(1000)
    match kind:
        case "join":
            return kind, [_profile(rng) for _ in range(rng.randint(1, 3))]
        case "leave":
            return kind, [rng.randrange(1000) for _ in range(rng.choice([1, 1, 2]))]
        case "forget":
            return kind, [rng.randrange(6) for _ in range(rng.randint(1, 2))]
        case "run":
            return kind, rng.randint(1, 8)
        case "late" | "twice":
            return kind, any_of, rng.choice([0.0, 0.01, 1.0, 10.0])
        case "slow":
            return kind, any_of, rng.choice([2.0, 10.0, 100.0])
        case "stray" | "stray refusal":
            return kind, rng.randint(-2, 12), rng.randint(-1, 20), rng.randint(-1, 12)
        case "swap":
            return kind, any_of, rng.randrange(1000)
        case _:
            return kind, any_of


def _profile(rng: random.Random) -> tuple[float, ...]:
    rates = (round(10 ** rng.uniform(low, high)) for low, high in ((6, 12), (4, 9), (4, 9)))
    flops, down_bps, up_bps = (float(rate) for rate in rates)
    memory_bytes = rng.choice([8, 60, 200, 1600, 2500, 8000, HUGE])
    return (
        flops,
        rng.choice([0.0, 1e-3]),
        down_bps,
        up_bps,
        rng.choice([0.0, 0.05]),
        memory_bytes,
        rng.choice([1, 2, 4]),
    )


def _product(rng: random.Random) -> tuple[int, int, int, int, bool, int | None]:
    inner = rng.choice([rng.randint(1, 6), rng.randint(1, 6), rng.randint(90, 400)])  # little memory: in chunks
    weight = rng.choice([None, rng.randrange(6)])
    return rng.choice([1, 1, 1, 3]), rng.randint(1, 6), inner, rng.randint(1, 6), rng.random() < 0.5, weight
