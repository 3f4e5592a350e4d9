"""`python -m agent measure`: measures this device's speed. Writes one JSON profile of raw samples, without conclusions.

Times a grid of products in rounds, in random order, so that other load on the machine affects all shapes alike and
every round covers the whole grid. Ctrl-C ends it; what was measured is still written. One sample
(`agent.measure.sampling`) is a series of calls, with its wall time and its CPU time, which advances only while this
process runs. Under a CPU quota, which pauses the process now and then, only the CPU time says what a short call costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.measure.about import available_memory, describe, versions

FORMAT, VERSION = "cleave-profile", 2  # version 1 has no quartiles per sample
LONGEST_S = 0.4  # approximate limit on a single call of the grid
SAMPLE_S = 0.02
PAUSE_S = 0.0005  # if the clock jumps by more in a busy loop, the process was paused
PAUSES_S = 1.5  # how long to watch for pauses
CYCLES = 4  # with pauses, a sample spans at least this many of them
LONGEST_SAMPLE_S = 0.25
WINDOW_S = 0.25  # of one measurement in the sustained run


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="the profile (profile-NAME.json here)")
    parser.add_argument("--name", default=platform.node() or "device", help="of this device (%(default)s)")
    parser.add_argument("--threads", type=_at_least_one, default=1, help="cores to lend (%(default)s)")
    parser.add_argument("--kernel", choices=("numpy", "onnxruntime"), help="only this one; both without")
    parser.add_argument("--memory", default="512 MB", help="memory to lend (%(default)s)")
    parser.add_argument("--shapes", type=_at_least_one, default=220, help="of products (%(default)s)")
    parser.add_argument("--rounds", type=_at_least_one, default=5, help="through all shapes (%(default)s)")
    parser.add_argument(
        "--sustained", type=_seconds, default=10.0, metavar="SECONDS", help="without a pause, to see throttling"
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--ps", metavar="ADDRESS", help="also measure the link to this server: tcp://HOST:PORT")
    link.add_argument("--invited", action="store_true", help="the link to the server that has invited this device")
    parser.add_argument("--state", metavar="FOLDER", help="of --invited: where keys and the server are remembered")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes and their order (%(default)s)")
    parser.add_argument("--faster", action="store_true", help="only the kernel that is faster on a large product")
    parser.add_argument("--quick", action="store_true", help="a few seconds: enough to try it, not to calibrate")


def run(options: argparse.Namespace) -> int:
    """Measure and write. 0: complete. 130: interrupted, the profile is marked incomplete. 2: an option is wrong."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as Ctrl-C
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("agent: interrupted before anything was measured", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    # imported only here: BLAS reads its thread count when NumPy is first imported
    from agent.compute.kernels import available_kernels, pick_kernel
    from agent.identity.server_choice import find_line
    from agent.measure.link import both, check_address, measure_link
    from agent.protocol.errors import UserError
    from agent.protocol.units import parse_size

    try:
        memory_bytes = parse_size(options.memory)
        kernels, rejected = available_kernels(options.threads, options.kernel)
        if options.kernel is not None:
            kernels = [kernel for kernel in kernels if kernel.name == options.kernel]
            if not kernels:
                raise UserError(f"kernel {options.kernel} cannot be used here: {rejected.get(options.kernel)}")
        picked = pick_kernel(options.kernel, options.threads)
        if options.faster:
            kernels = [picked.kernel]
            rejected = picked.rejected
        if options.ps is not None:
            check_address(options.ps)
        path = options.out or Path(f"profile-{options.name}.json")
        unfinished = path.with_name(path.name + ".part")  # so that a partial profile never has the final name
        unfinished.touch()  # fail before measuring if it cannot be written
    except (ValueError, OSError) as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    if options.quick:
        options.shapes, options.rounds, options.sustained = min(options.shapes, 24), 2, min(options.sustained, 0.5)
    measuring = Measuring(kernels, options)
    profile: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": False,
        "device": describe(options.name, options.threads),
        "versions": versions(),
        "settings": {"seed": options.seed, "rounds": options.rounds},
        "memory": {"available_bytes": available_memory(), "budget_bytes": memory_bytes},
        "kernels": [kernel.name for kernel in kernels],
        "rejected": rejected,
        "picked": {
            "kernel": picked.kernel.name,
            "flops": picked.flops,
            "overhead_s": picked.overhead_s,
            "rejected": picked.rejected,
        },
        "link": None,
    }
    code = 0

    def link() -> dict[str, Any]:
        with find_line(options.ps, None, options.state) as line:
            measuring.say(f"link to {line.endpoints[0]}")
            return measure_link(line.endpoints[0], line.curve)

    try:
        if options.ps is not None or options.invited:
            profile["link"] = link()
        measuring.all()
        if profile["link"] is not None:
            try:
                profile["link"] = both(profile["link"], link())  # one moment says little about a link
            except UserError as error:
                measuring.say(f"the link is only known as it was at the beginning: {error}")
        profile["complete"] = True
    except KeyboardInterrupt:
        measuring.say("interrupted: what was measured is written")
        code = 130
    except UserError as error:
        unfinished.unlink()
        print(f"agent: {error}", file=sys.stderr)
        return 2
    profile |= measuring.found
    unfinished.write_text(json.dumps(profile, separators=(",", ":")), encoding="utf-8")
    unfinished.replace(path)
    measuring.say(f"{len(profile['samples']):,} samples of {len(profile['shapes'])} shapes in {path}")
    return code


class Measuring:
    """Warm-up, sustained run, rounds through the grid; `found` fills as it goes."""

    def __init__(self, kernels: list[Any], options: argparse.Namespace) -> None:
        import numpy as np

        from agent.measure.sampling import Sampler

        self._kernels, self._options = kernels, options
        self._rng = np.random.default_rng(options.seed)
        self._sampler = Sampler(options.seed)
        self._begun = time.perf_counter()
        self.sample_s = SAMPLE_S
        self.found: dict[str, Any] = {
            "shapes": [],
            "samples": [],
            "rounds": [],
            "sustained": None,
            "pauses": None,
            "copy_bytes_per_s": None,
        }

    def all(self) -> None:
        from agent.measure.sampling import POOL_BYTES
        from agent.measure.shapes import shapes

        call = self._sampler.call
        self.say("warming up")
        seconds = {kernel.name: call(kernel, (1, 384, 384, 384))[0] for kernel in self._kernels for _ in range(3)}
        fastest = min(self._kernels, key=lambda kernel: seconds[kernel.name])
        flops = 2 * 384**3 / seconds[fastest.name]
        if self._options.sustained:
            self._sustain(fastest)
        self._watch_pauses(0.1 * PAUSES_S if self._options.quick else PAUSES_S)
        self.found["copy_bytes_per_s"] = self._sampler.copy_rate()
        grid = shapes(self._options.shapes, self._options.seed, flops * LONGEST_S, POOL_BYTES // 2)
        self.found["shapes"] = [list(shape) for shape in grid]
        work = [(kernel, shape) for kernel in range(len(self._kernels)) for shape in range(len(grid))]
        for kernel, shape in work:
            call(self._kernels[kernel], grid[shape])  # warm up: create sessions, load code
        rounds, begun, told = self._options.rounds, time.perf_counter(), 0.0
        for number in range(rounds):
            self.found["rounds"].append([0.0, 0.0])
            opened, running = time.perf_counter(), time.process_time()
            for done, place in enumerate(self._rng.permutation(len(work)).tolist()):
                kernel, shape = work[place]
                sample = self._sampler.sample(self._kernels[kernel], grid[shape], self.sample_s)
                self.found["samples"].append([kernel, shape, number, *sample])
                now = time.perf_counter()
                self.found["rounds"][-1] = [now - opened, time.process_time() - running]
                if now - told >= 2.0:
                    told, share = now, (number * len(work) + done + 1) / (rounds * len(work))
                    self.say(
                        f"round {number + 1} of {rounds}, {share:.0%}; {(now - begun) * (1 - share) / share:.0f} s left"
                    )

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._begun:7.1f} s  {text}", file=sys.stderr, flush=True)

    def _sustain(self, kernel: Any) -> None:
        """Record how the time of one product changes while the device heats up. Runs before the grid, from rest."""
        shape, length_s = (1, 256, 256, 256), self._options.sustained
        self.say(f"sustained run of {length_s:g} s")
        windows: list[list[float]] = []
        self.found["sustained"] = {"kernel": kernel.name, "shape": list(shape), "windows": windows}
        begun = time.perf_counter()
        while (opened := time.perf_counter()) < begun + length_s:
            calls, running = 0, time.process_time()
            while time.perf_counter() < opened + WINDOW_S:
                self._sampler.call(kernel, shape)
                calls += 1
            windows.append([opened - begun, calls, time.perf_counter() - opened, time.process_time() - running])

    def _watch_pauses(self, length_s: float) -> None:
        """Record how evenly CPU time is granted: alternating durations of running and of being paused."""
        begun = last = resumed = time.perf_counter()
        away: list[list[float]] = []
        while last < begun + length_s:
            now = time.perf_counter()
            if now - last > PAUSE_S:
                away.append([last - resumed, now - last])
                resumed = now
            last = now
        self.found["pauses"] = {"watched_s": last - begun, "ran_and_away_s": away}
        paused_s = sum(pause for _, pause in away)
        if paused_s > 0.02 * length_s:
            self.sample_s = min(max(SAMPLE_S, CYCLES * length_s / len(away)), LONGEST_SAMPLE_S)
            self.say(f"this process is kept waiting {paused_s / length_s:.0%} of the time: samples are longer")


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds between 0 and 3600")
    return value
