"""Deterministic chaos: `python -m testbed.faults.chaos --seconds 60 --seed 0`, or `make chaos`.

Small worlds in virtual time, one after another, each made from a seed and full of faults. Half of the time a world runs
the real dispatcher and planner (testbed/faults/chaos_world.py), the other half the whole server, turn by turn of its
own loop (testbed/faults/loop_world.py). After every event or turn all promises are checked. A world that breaks a
promise is shrunk to the fewest and simplest operations that still break it, and printed as a test to paste.

Exit code 0: nothing broke. 1: something did. 2: an option is wrong.
"""

from __future__ import annotations

import argparse
import pprint
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from testbed.faults.chaos_seeds import generate
from testbed.faults.chaos_world import COMMON, STRAYS, Operation, World, replay
from testbed.faults.loop_seeds import generate_loop
from testbed.faults.loop_world import LoopWorld, replay_loop

__all__ = ["DISPATCHER", "LOOP", "Failure", "Kind", "Tally", "as_test", "failure_of", "generate", "generate_loop"]
__all__ += ["live_one", "replay", "replay_loop", "shrink"]

MOST_TRIES = 3000  # worlds executed to shrink one failure
MOST_PAIRED = 24  # most operations for which pairs are tried
PROGRESS_S = 1.0
PROGRESS_IN_A_FILE_S = 10.0


class Living(Protocol):
    """A world that can be executed."""

    @property
    def events(self) -> int: ...

    @property
    def faults(self) -> Counter[str]: ...

    @property
    def seen(self) -> Counter[str]: ...

    def live(self) -> Living: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of world."""

    name: str
    world: Callable[[Sequence[Operation]], Living]
    generate: Callable[[int], list[Operation]]
    replay: str  # the function that a printed test calls
    unit: str  # what is counted as an event


DISPATCHER = Kind("dispatcher", World, generate, "replay", "events")
LOOP = Kind("loop", LoopWorld, generate_loop, "replay_loop", "turns")
KINDS = (DISPATCHER, LOOP)


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str  # exception and text without numbers: the same for failures with the same cause
    text: str


@dataclass(slots=True)
class Tally:
    worlds: int = 0
    seconds: float = 0.0  # spent in these worlds
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)


def failure_of(operations: Sequence[Operation], tally: Tally | None = None, kind: Kind = DISPATCHER) -> Failure | None:
    """Execute these operations; anything the dispatcher or the server raises is also a failure."""
    world, begun = kind.world(operations), time.monotonic()
    try:
        world.live()
    except Exception as error:  # any exception would have killed the server
        name, text = type(error).__name__, str(error)
        words = re.sub(r"[\[{(].*[\])}]", "#", text, flags=re.DOTALL)
        return Failure(f"{name}: {re.sub(r'-?[0-9]+', '#', words)[:80]}", f"{name}: {text}")
    finally:
        if tally is not None:
            tally.worlds += 1
            tally.seconds += time.monotonic() - begun
            tally.events += world.events
            tally.faults += world.faults
            tally.seen += world.seen
    return None


def live_one(seed: int, tally: Tally, kind: Kind = DISPATCHER) -> tuple[list[Operation], Failure] | None:
    """One world; if it breaks a promise, its operations and the failure."""
    operations = kind.generate(seed)
    failure = failure_of(operations, tally, kind)
    return (operations, failure) if failure else None


# ---- shrinking


def shrink(
    operations: Sequence[Operation], failure: Failure, most_tries: int = MOST_TRIES, kind: Kind = DISPATCHER
) -> list[Operation]:
    """The fewest and simplest operations found that fail in the same way: drop chunks first, then single operations,
    then simplify the remaining ones; repeat until nothing changes."""
    tries = 0

    def fails(candidate: list[Operation]) -> bool:
        nonlocal tries
        tries += 1
        if tries > most_tries:
            return False
        found = failure_of(candidate, kind=kind)
        return found is not None and found.kind == failure.kind

    best, before = list(operations), None
    while best != before and tries <= most_tries:
        before = best
        best = _simplified(_dropped(best, fails), fails)
    return best


def _dropped(operations: list[Operation], fails: Callable[[list[Operation]], bool]) -> list[Operation]:
    size = max(1, len(operations) // 2)
    while True:
        start, shorter = 0, False
        while start < len(operations):
            candidate = operations[:start] + operations[start + size :]
            if fails(candidate):
                operations, shorter = candidate, True
            else:
                start += size
        if size == 1 and not shorter:
            pair = _pair_dropped(operations, fails)
            if pair is None:
                return operations
            operations = pair
        size = max(1, size // 2)


def _pair_dropped(operations: list[Operation], fails: Callable[[list[Operation]], bool]) -> list[Operation] | None:
    """Drop two operations that can only go together, such as a device's join and leave; None if there is no such
    pair."""
    if len(operations) > MOST_PAIRED:
        return None
    for one in range(len(operations)):
        for two in range(one + 1, len(operations)):
            candidate = [*operations[:one], *operations[one + 1 : two], *operations[two + 1 :]]
            if fails(candidate):
                return candidate
    return None


def _simplified(operations: list[Operation], fails: Callable[[list[Operation]], bool]) -> list[Operation]:
    for position in range(len(operations)):
        again = True
        while again:
            again = False
            for simpler in _simpler(operations[position]):
                candidate = [*operations[:position], simpler, *operations[position + 1 :]]
                if fails(candidate):
                    operations, again = candidate, True
                    break
    return operations


def _simpler(operation: Operation) -> Iterator[Operation]:
    """Slightly simpler versions of the operation: each step simplifies, so shrinking terminates."""
    kind, first, *rest = operation
    if isinstance(first, list):
        for index, item in enumerate(first):
            if len(first) > 1:
                yield kind, first[:index] + first[index + 1 :]
            for smaller in _smaller(item):
                yield kind, [*first[:index], smaller, *first[index + 1 :]]
    elif kind == "planner":
        if first == "packed":
            yield kind, "grid"
    else:
        numbers = [first, *rest]
        for index, number in enumerate(numbers):
            for less in (0, number // 2) if isinstance(number, int) and number > 0 else ():
                yield kind, *numbers[:index], less, *numbers[index + 1 :]


def _smaller(item: Any) -> Iterator[Any]:
    match item:
        case int(number) if number > 0:  # a device or a weight
            yield from (0, number // 2)
        case (_, _, _, _, _, _, _) if item != COMMON:  # a profile
            yield COMMON
        case (batch, rows, inner, columns, critical, weight):  # a product
            if weight is not None:
                yield batch, rows, inner, columns, critical, None
            if not critical:
                yield batch, rows, inner, columns, True, weight
            sizes = (batch, rows, inner, columns)
            for index, size in enumerate(sizes):
                for less in (1, size // 2, size - 1) if size > 1 else ():
                    yield *sizes[:index], less, *sizes[index + 1 :], critical, weight


def as_test(operations: Sequence[Operation], failure: Failure, seed: int, kind: Kind = DISPATCHER) -> str:
    """A test to paste into tests/; it fails until the cause is fixed."""
    listed = pprint.pformat(list(operations), width=100, compact=True)
    lines = "\n".join(f"        {line}" for line in listed.splitlines())
    story = [f"    # {line}" for line in failure.text[:400].splitlines()]
    return "\n".join(
        [
            f"from testbed.faults.chaos import {kind.replay}",
            "",
            "",
            f"def test_the_world_of_seed_{seed}() -> None:",
            *story,
            f"    {kind.replay}(",
            lines,
            "    )",
            "",
        ]
    )


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m testbed.faults.chaos",
        description="Lives seeded worlds of faults until time is over, and shrinks the first that breaks a promise.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the next has the next (default: 0)")
    options = parser.parse_args(arguments)
    if not options.seconds > 0 or options.seconds == float("inf"):
        parser.error(f"--seconds is {options.seconds:g}; it must be more than 0, and have an end")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; it must be at least 0")

    tallies = {kind.name: Tally() for kind in KINDS}
    begun, worked = time.monotonic(), time.process_time()
    terminal, told = sys.stderr.isatty(), begun
    while (now := time.monotonic()) - begun < options.seconds or not all(t.worlds for t in tallies.values()):
        kind = min(KINDS, key=lambda kind: tallies[kind.name].seconds)  # half of the time each
        tally = tallies[kind.name]
        seed = options.seed + tally.worlds
        broken = live_one(seed, tally, kind)
        if broken:
            return _report(kind, seed, *broken)
        if now - told >= (PROGRESS_S if terminal else PROGRESS_IN_A_FILE_S):
            told = now
            rates = "; ".join(_rates(kind, tallies[kind.name]) for kind in KINDS)
            line = f"{rates}; {max(0.0, options.seconds - (now - begun)):.0f} s left"
            print(f"\r{line:<100}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
    if terminal:
        print(file=sys.stderr)
    took_s, worked_s = time.monotonic() - begun, time.process_time() - worked
    worlds = sum(tally.worlds for tally in tallies.values())
    print(f"nothing broke: {worlds:,} worlds; {took_s:.0f} s, {worked_s:.0f} s of processor time")
    for kind in KINDS:
        _print_tally(kind, tallies[kind.name], options.seed)
    return 0


def _print_tally(kind: Kind, tally: Tally, first: int) -> None:
    strong = tally.faults.total() - sum(tally.faults[stray] for stray in STRAYS)
    print(f"{_rates(kind, tally)}; seeds {first} to {first + tally.worlds - 1}")
    if strong < tally.faults.total():
        print(f"  without stray answers {strong:,} faults ({strong / tally.seconds:,.0f}/s)")
    print("  faults: " + ", ".join(f"{fault} {count:,}" for fault, count in tally.faults.most_common()))
    print("  and so: " + ", ".join(f"{what} {count:,}" for what, count in tally.seen.most_common()))


def _rates(kind: Kind, tally: Tally) -> str:
    faults, seconds = tally.faults.total(), max(tally.seconds, 1e-9)
    return (
        f"{kind.name}: {tally.worlds:,} worlds, {tally.events:,} {kind.unit} ({tally.events / seconds:,.0f}/s), "
        f"{faults:,} faults ({faults / seconds:,.0f}/s)"
    )


def _report(kind: Kind, seed: int, operations: list[Operation], failure: Failure) -> int:
    print(f"\nthe {kind.name} world of seed {seed} broke a promise: {failure.text}", file=sys.stderr)
    print(f"again: python -m testbed.faults.chaos --seed {seed} --seconds 1", file=sys.stderr)
    print(f"shrinking its {len(operations)} operations", file=sys.stderr, flush=True)
    smallest = shrink(operations, failure, kind=kind)
    print(f"{len(smallest)} are left; a test to paste:\n", file=sys.stderr, flush=True)
    print(as_test(smallest, failure_of(smallest, kind=kind) or failure, seed, kind))
    return 1


if __name__ == "__main__":
    sys.exit(main())
