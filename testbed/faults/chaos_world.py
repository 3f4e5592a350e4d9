"""Worlds for `testbed.faults.chaos`: lists of plain operations, executed one by one (`testbed/faults/chaos_seeds.py`
makes them).

An operation is valid at any position: it names devices and blocks by number, modulo how many exist (k is the k-th), so
that any operation can be left out and the rest is still a world. The world keeps its own record, computes every block
in integers, and trusts nothing that the dispatcher says.

    ("planner", kind)                   "packed" or "grid", for the whole world; default grid
    ("history", ratio)                  enough blocks have already taken `ratio` times the expected time for the
                                        dispatcher to judge what is overdue; without it, only the cost model does
    ("join", [profile, ...])            a profile: the fields of agent.protocol.profile.Profile in their order
    ("newcomers", [profile, ...])       the same, but the profiles are not trusted until the devices have proved them
    ("leave", [k, ...])                 devices leave and the server knows; their answers under way still arrive
    ("submit", [product, ...])          batch, rows, inner, columns, critical, weight: all ready at the same time;
                                        products with the same weight (odd: the right operand) share it, and devices
                                        keep its slabs
    ("begin", [product, ...])           the same, and as many more critical products come before any product waits for
                                        the deferred ones
    ("forget", [weight, ...])           these weights have changed
    ("run", n)                          the next n answers arrive
    ("late", k, seconds)                an answer under way is delayed
    ("twice", k, seconds)               an answer arrives a second time, this much later
    ("lost", k)                         an answer never arrives; its device is detected and declared dead
    ("vanish", k)                       a device falls silent, is still sent work, and is then detected
    ("mute", [k, ...])                  devices stay connected but never answer again, and are never detected
    ("refuse", k)                       a device cannot compute a block
    ("stray", device, job, block)       an unrequested answer
    ("stray refusal", device, job, block)
    ("swap", k, device)                 an answer from a device that was never asked
    ("slow", k, factor)                 a device is slower than its profile
    ("overdue", k, seconds)             an answer under way arrives 1 s after everything that other devices return in
                                        this time; before it arrives, the server checks for overdue blocks
    ("lie", k)                          an answer under way is wrong
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import Profile, pack_profiles
from ps.planning.cost import least_bytes
from ps.planning.planner import Planner
from ps.planning.plans import Shape
from ps.scheduling import settings
from testbed.virtual.world import Key, Outcome, Sent, VirtualFleet, Work

Operation = tuple[Any, ...]
FAULTS = ("leave", "late", "twice", "lost", "vanish", "mute", "refuse", "swap", "slow", "overdue", "lie")
STRAYS = ("stray", "stray refusal")  # also faults, but weak ones: most are discarded at once
TOGETHER_S = 0.0005  # answers this close together are one event, as in a pod
DETECTED_S = 4.0  # silence after which a device is declared dead
MOST_LOOKS = 5000  # checks for overdue blocks until all work must have ended; a few per block are enough
HUGE = 1 << 40
COMMON = (1e9, 1e-4, 1e7, 1e7, 0.01, HUGE, 2)  # a profile that can do everything


class ChaosError(AssertionError):
    """The dispatcher broke a promise; the message says which."""


@dataclass(slots=True)
class Flight:
    """A block that was sent: its true answer, and when the answer arrives."""

    box: tuple[int, ...]
    cells: NDArray[np.int64]
    due_s: float
    lost: bool = False
    looked_at: bool = False  # was under way, or sent, when the server checked for overdue blocks

    def overlaps(self, other: Flight) -> bool:
        """Blocks of the same job with cells in common."""
        return all(
            self.box[i] < other.box[i] + other.box[i + 1] and other.box[i] < self.box[i] + self.box[i + 1]
            for i in (0, 2, 4)
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """An operand shared by several products, all of them critical or all deferred."""

    inner: int
    extent: int
    critical: bool


class Truth:
    """A product in integers, and which blocks were accepted from which devices."""

    def __init__(self, shape: Shape, job: int) -> None:
        self.shape = shape
        b, r, n, c = (np.arange(size) for size in (shape.batch, shape.rows, shape.inner, shape.columns))
        self._left = (3 * b[:, None, None] + 5 * r[:, None] + 7 * n + job) % 11 - 5
        self._right = (2 * b[:, None, None] + 7 * n[:, None] + 3 * c + job) % 13 - 6
        self._out = np.zeros((shape.batch, shape.rows, shape.columns), np.int64)
        self._times = np.zeros_like(self._out)
        self._accepted: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> device, box

    def block(self, box: tuple[int, ...]) -> NDArray[np.int64]:
        b, bs, r, rs, c, cs = box
        cells: NDArray[np.int64] = self._left[b : b + bs, r : r + rs] @ self._right[b : b + bs, :, c : c + cs]
        return cells

    def accept(self, device: int, block: int, flight: Flight) -> None:
        self._accepted[block] = device, flight.box
        b, bs, r, rs, c, cs = flight.box
        self._times[b : b + bs, r : r + rs, c : c + cs] += 1
        self._out[b : b + bs, r : r + rs, c : c + cs] = flight.cells

    def wrong(self) -> dict[int, int]:
        """Accepted blocks with a wrong result, each with the device that returned it."""
        found = {}
        for block, (device, box) in self._accepted.items():
            b, bs, r, rs, c, cs = box
            if not np.array_equal(self._out[b : b + bs, r : r + rs, c : c + cs], self.block(box)):
                found[block] = device
        return found

    def reject(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            b, bs, r, rs, c, cs = self._accepted.pop(block)[1]
            self._times[b : b + bs, r : r + rs, c : c + cs] -= 1

    def has(self, box: tuple[int, ...]) -> bool:
        """Was any of these cells accepted?"""
        b, bs, r, rs, c, cs = box
        return bool(self._times[b : b + bs, r : r + rs, c : c + cs].any())

    def complete(self) -> bool:
        return bool((self._times == 1).all())

    def verdict(self) -> str:
        """What is wrong with the product; empty if each cell was accepted once and is right."""
        if not self.complete():
            return "some cells were not accepted exactly once"
        return "" if np.array_equal(self._out, self._left @ self._right) else "the result is wrong"


class World:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._told = [Profile(*p) for o in operations if o[0] in ("join", "newcomers") for p in o[1]] + [
            Profile(*COMMON)
        ]
        kinds = [o[1] for o in operations if o[0] == "planner"] or ["grid"]
        history = [o[1] for o in operations if o[0] == "history" and o[1]][:1] * settings.NOW.enough
        self._fleet = VirtualFleet(pack_profiles(self._told), Planner(kinds[0]), verify=True, history=history)
        self.faults: Counter[str] = Counter()  # only faults that had a target
        self.seen: Counter[str] = Counter()  # the dispatcher's reactions
        self.events = 0
        self.trace: list[tuple[float, str, Outcome]] = []
        self._alive: set[int] = set()
        self._silent: set[int] = set()
        self._mute: set[int] = set()
        self._open: dict[int, Truth] = {}
        self._jobs = 0
        self._weights: dict[int, Weight] = {}
        self._refused: Counter[int] = Counter()  # blocks that a device could not compute
        self._flying: dict[Key, Flight] = {}
        self._past: list[tuple[float, int, Key | int]] = []  # heap: due, sequence, answer or detected device
        self._sequence = itertools.count()

    def live(self) -> World:
        """Execute all operations, then go on until everything that can end has ended. Raises at the first broken
        promise."""
        for operation in self._operations:
            self._do(operation)
        self._event("submit", self._fleet.submit([]))  # nothing more is to come: the pass ends
        self._run_out()
        if self._open:  # must be jobs that no present device can do
            raise_if(self._stuck(), "do not end although an able device lives and answers")
            self._alive.add(self._fleet.joined)
            self._event("join", self._fleet.join(1))
            self._run_out()
        self._event("forget", self._fleet.forget(list(self._weights)))
        self.seen["profiles corrected"] += self._fleet.corrected
        if self._open:
            raise ChaosError(f"jobs {list(self._open)} do not end although an able device has joined")
        if rest := self._fleet.left_behind():
            raise ChaosError(f"all is over, and this is left behind: {rest}")
        return self

    def _run_out(self) -> None:
        """Run until nothing is under way. Checks for overdue blocks find answers that never arrive."""
        for _ in range(MOST_LOOKS):
            while self._past:
                self._run(1)
            if not self._stuck() or self._fleet.next_look_s == math.inf:
                return
            self._look(max(self._fleet.now_s, self._fleet.next_look_s))
        raise ChaosError(f"jobs {list(self._open)} do not end however often the server looks at the clock")

    def _stuck(self) -> list[int]:
        """Jobs that have not ended although they could."""
        answering = self._alive - self._mute
        return [job for job, truth in self._open.items() if any(self._can(d, truth.shape) for d in answering)]

    # ---- operations

    def _do(self, operation: Operation) -> None:
        match operation:
            case ("join" | "newcomers" as kind, profiles):
                first = self._fleet.joined
                self._alive |= set(range(first, first + len(profiles)))
                self._event("join", self._fleet.join(len(profiles), newcomers=kind == "newcomers"))
            case ("mute", chosen):
                for device in {k % self._fleet.joined for k in chosen if self._fleet.joined} - self._mute:
                    self._fault("mute")
                    self._mute.add(device)
            case ("submit" | "begin" as submitted, products):
                self._submit(submitted, products)
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
        """Something happens to an answer under way."""
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
            case "overdue":
                self._overdue(key, flight, self._fleet.now_s + more[0])
            case "lie":
                flight.cells = flight.cells + 1  # two lies about one answer must not add up to the truth
            case "swap":
                self._answers([(more[0] % self._fleet.joined, key[1], key[2])], misleading=True)
            case _:
                raise ValueError(f"there is no operation {kind!r}")

    def _submit(self, kind: str, products: Sequence[tuple[int, int, int, int, bool, int | None]]) -> None:
        works = []
        for batch, rows, inner, columns, critical, weight in products:
            kept: list[int | None] = [None, None]
            if weight is not None:
                side = weight % 2
                own = self._weights.setdefault(weight, Weight(inner, (rows, columns)[side], critical))
                batch, inner, critical, kept[side] = 1, own.inner, own.critical, weight
                rows, columns = (rows, own.extent) if side else (own.extent, columns)
            shape = Shape(batch, rows, inner, columns)
            works.append(Work(self._jobs, shape, critical, (kept[0], kept[1])))
            self._open[self._jobs] = Truth(shape, self._jobs)
            self._jobs += 1
        self._event(kind, self._fleet.submit(works, more_to_come=kind == "begin"))

    def _leave(self, devices: list[int], fault: bool = True) -> None:
        """The devices' answers under way no longer count; most still arrive."""
        for device in devices:
            if fault and device in self._alive:
                self._fault("leave")
            self._gone(device)
        self._event("leave", self._fleet.leave(devices))

    def _silence(self, device: int, silent: bool = True) -> None:
        if silent:
            self._silent.add(device)
        self._expect(self._fleet.now_s + DETECTED_S, device)

    def _overdue(self, key: Key, flight: Flight, until_s: float) -> None:
        flight.due_s = max(flight.due_s, until_s) + 1.0
        self._expect(flight.due_s, key)
        self._run(len(self._past), until_s)
        self._look(until_s)

    def _look(self, at_s: float) -> None:
        self._fleet.now_s = max(self._fleet.now_s, at_s)
        for under_way in self._flying.values():
            under_way.looked_at = True
        self._event("overdue", self._fleet.look())

    def _run(self, count: int, until_s: float = math.inf) -> None:
        """The next answers, and detections of dead devices; answers that arrive together form one event."""
        while count > 0 and self._past and self._past[0][0] <= until_s:
            together_s = min(self._past[0][0] + TOGETHER_S, until_s)
            keys: list[Key] = []
            while self._past and self._past[0][0] <= together_s and count > 0:
                due_s, _, what = heapq.heappop(self._past)
                self._fleet.now_s = max(self._fleet.now_s, due_s)
                if isinstance(what, int):
                    count -= 1
                    if what in self._alive:
                        self._leave([what], fault=False)
                    continue
                flight = self._flying.get(what)
                silent = what[0] in self._silent or what[0] in self._mute
                if not silent and not (flight and (flight.lost or flight.due_s > due_s)):
                    keys.append(what)
                    count -= 1
            if keys:
                self._answers(keys)

    # ---- the world's own record

    def _answers(self, keys: list[Key], misleading: bool = False) -> None:
        """`misleading`: not a real answer, so it is dropped if such a block is under way."""
        due: list[int] = []
        landed: dict[Key, Flight] = {}
        for position, key in enumerate(keys):  # if two devices have the same cells under way, the first answer counts
            if key in self._flying and key not in landed and not self._rivals(key, landed):
                due.append(position)
                landed[key] = self._flying[key]
        if misleading and due:
            return
        losers = [key for key in self._flying if key not in landed and self._rivals(key, landed)]
        for key, flight in landed.items():
            del self._flying[key]
            self._open[key[1]].accept(key[0], key[2], flight)
        outcome = self._fleet.answer(keys)
        if outcome.accepted != due:
            raise ChaosError(f"of the answers {keys} these count: {due}; accepted: {outcome.accepted}")
        if sorted(outcome.cancelled) != sorted(losers):
            raise ChaosError(f"the blocks {losers} were returned by others; cancelled: {outcome.cancelled}")
        self._event("answer", outcome)

    def _rivals(self, key: Key, among: Mapping[Key, Flight]) -> list[Flight]:
        """Other copies that share cells with this block."""
        flight = self._flying[key]
        return [f for k, f in among.items() if k[1] == key[1] and k != key and f.overlaps(flight)]

    def _refusals(self, keys: list[Key]) -> None:
        for key in keys:
            self._refused[key[0]] += self._flying.pop(key, None) is not None
        outcome = self._fleet.refuse(keys)
        if sound := [d for d in outcome.suspended if self._refused[d] <= settings.NOW.refusals]:
            raise ChaosError(f"devices {sound} were suspended, and have not failed more blocks than is allowed")
        self._event("refuse", outcome)

    def _check(self, job: int) -> None:
        """All blocks of a job have returned: look for wrong ones, as the server would."""
        if job not in self._open or not self._open[job].complete():
            raise ChaosError(f"job {job} is to be checked but is not complete")
        wrong = self._open[job].wrong()
        liars = set(wrong.values()) & self._alive
        self._open[job].reject(wrong)
        self.seen["wrong blocks found"] += len(wrong)
        outcome = self._fleet.checked(job, list(wrong))
        if set(outcome.suspended) != liars:
            raise ChaosError(f"of job {job} blocks {wrong} were wrong; suspended were {outcome.suspended}")
        if outcome.finished != ([] if wrong else [job]):
            raise ChaosError(f"of job {job} {len(wrong)} blocks were wrong; finished jobs: {outcome.finished}")
        self._event("check", outcome)

    def _event(self, name: str, outcome: Outcome) -> None:
        self.events += 1
        self.trace.append((self._fleet.now_s, name, outcome))
        if name not in ("refuse", "check") and outcome.suspended:
            raise ChaosError(f"devices {outcome.suspended} were suspended, and have neither failed nor lied")
        if name != "check" and outcome.finished:
            raise ChaosError(f"jobs {outcome.finished} ended and were not checked")
        self.seen["devices suspended"] += len(outcome.suspended)
        for device in outcome.suspended:
            self._gone(device)
        for key in outcome.cancelled:
            self._cancelled(key, answered=name == "answer")
        for sent in outcome.sent:
            self._sent(sent, looked_at=name == "overdue")
        for job in outcome.finished:
            truth = self._open.pop(job, None)
            if verdict := truth.verdict() if truth else "it had ended before":
                raise ChaosError(f"job {job} ended: {verdict}")
        self._fleet.check()
        for job in outcome.to_check:
            self._check(job)

    def _cancelled(self, key: Key, answered: bool) -> None:
        """`answered`: another device was faster. Otherwise the block must have been overdue; its device may be gone."""
        flight = self._flying.pop(key, None)
        if flight is None and key[0] in self._alive:
            raise ChaosError(f"block {key[2]} of job {key[1]} was cancelled and is not under way on device {key[0]}")
        if flight is not None and not answered and not flight.looked_at:
            raise ChaosError(f"block {key[2]} of job {key[1]} was cancelled and cannot have been overdue")
        self.seen["blocks cancelled"] += 1

    def _sent(self, sent: Sent, looked_at: bool) -> None:
        device, job, block = sent.key
        if device not in self._alive:
            raise ChaosError(f"device {device} is not there and was sent block {block} of job {job}")
        if sent.key in self._flying or self._open[job].has(sent.box):
            raise ChaosError(f"block {block} of job {job} was sent again")
        truth = self._open[job].block(sent.box)
        self._flying[sent.key] = Flight(sent.box, truth, sent.due_s, looked_at=looked_at)
        rivals = self._rivals(sent.key, self._flying)
        if any(not f.looked_at for f in rivals) or any(a.overlaps(b) for a, b in itertools.combinations(rivals, 2)):
            raise ChaosError(f"block {block} of job {job} was sent twice")
        self.seen["overdue blocks sent to others"] += len(rivals)
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


def raise_if(jobs: list[int], what: str) -> None:
    if jobs:
        raise ChaosError(f"jobs {jobs} {what}")


def replay(operations: Sequence[Operation]) -> World:
    """Execute these operations again; raises what they broke."""
    return World(operations).live()
