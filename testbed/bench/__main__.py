"""`make bench`: the data plane, a training step, the emulator's density, rounds over thousands of devices, planning,
encryption, the three clocks.

What is compared is measured in one run, in alternating passes, best of several: machines are noisy, ratios less so.
Results go to runs/bench-*/bench.json and, as a table, to the screen.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from testbed.bench import density, ours
from testbed.bench.yardsticks.peers import run_peers
from testbed.bench.yardsticks.raw import RawWorkers, check, numpy_in_process
from testbed.bench.yardsticks.work import W1, W2, Work, round_of
from testbed.results.files import environment, write_json
from testbed.runs.display import Display

ROUNDS = (1000, 4000)
OF_RAW = {"W1": 0.9, "W2": 1.2}  # least speed, as a multiple of raw ZeroMQ's


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measured: str
    compared: str
    ratio: float | None
    goal: str
    met: bool


def main() -> int:
    match sys.argv[1:2]:
        case ["gate"]:
            from testbed.bench.gate import command

            return command.main(sys.argv[2:])
        case ["ablation"]:
            from testbed.bench.heuristics import ablation

            return ablation.main(sys.argv[2:])
        case ["monotone"]:
            from testbed.bench.heuristics import monotone

            return monotone.main(sys.argv[2:])
    return benchmarks()


def benchmarks() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also run Ray and Dask, in an environment of their own")
    parser.add_argument(
        "--only",
        default="abcdeg",
        help="parts to run: a data plane, b step, c density, d rounds, e planning, f verification (minutes), "
        "g encryption, l kernel links (root), v virtual and other clocks (%(default)s)",
    )
    parser.add_argument("--write-docs", action="store_true", help="also write the tables of docs/benchmarks.md")
    parser.add_argument("--repeats", type=int, default=9, help="passes of each measurement (%(default)s)")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="honest blocks of part f (%(default)s)")
    options = parser.parse_args()
    display, rows, raw = Display(), [], {}
    seconds: dict[str, float] = {}
    if "a" in options.only:
        display.say("(a) data plane: W1 and W2 over two local agents, in turn with raw ZeroMQ; about 15 s")
        for work in (W1, W2):
            result = data_plane(work, options.repeats)
            raw[f"data plane {work.name}"] = result
            seconds[work.name] = result["ours_s"]
            rows.append(_against_raw(work, result))
    if "b" in options.only:
        from testbed.bench import step

        display.say("(b) a training step of OPT-125M over two local agents, in turn with plain PyTorch; about 60 s")
        result = raw["step"] = step.measure()
        rows.append(
            Row(
                f"(b) OPT-125M step, {result['batch']} x {result['sequence']} tokens",
                f"{result['ours_s']:.2f} s",
                f"plain PyTorch {result['plain_s']:.2f} s",
                result["ratio"],
                "at most 1.6",
                result["ratio"] <= 1.6,
            )
        )
    if "c" in options.only:
        display.say("(c) emulator density: 4,000 devices, 2,000 blocks per second; about 15 s")
        result = raw["density"] = density.measure()
        kib, late_ms = result["bytes_per_device"] / 1024, 1e3 * result["late_p99_s"]
        rate = f"{result['blocks_per_s']:,.0f} blocks/s"
        rows.append(Row("(c) memory of 4,000 devices", f"{kib:.0f} KiB each", rate, None, "100 KiB", kib <= 100))
        rows.append(Row("(c) p99 lateness", f"{late_ms:.2f} ms", rate, None, "1 ms", late_ms <= 1))
    if "d" in options.only:
        for count in ROUNDS:
            display.say(f"(d) a round: one W2 block for each of {count:,} devices, no modelled time; about 5 s")
            work = round_of(count)
            took = seconds[work.name] = one_round(work, count, options.repeats)
            raw[f"round {count}"] = {"seconds": took, "blocks_per_s": count / took}
            fast = count / took >= 40_000
            rows.append(
                Row(f"(d) {work.name}", f"{took:.4f} s", f"{count / took:,.0f} blocks/s", None, "40,000/s", fast)
            )
    if "e" in options.only:
        from testbed.bench import planning

        display.say("(e) planning: every product of OPT-13B over 1,024 and 8,192 devices; about 60 s")
        rows += _planning(raw.setdefault("planning", planning.measure()))
    if "f" in options.only:
        from testbed.bench import verification

        display.say(f"(f) verification: {options.blocks:,} honest blocks of real trainings, then lies; minutes")
        rows += _verification(raw.setdefault("verification", verification.measure(options.blocks, display.say)))
    if "g" in options.only:
        from testbed.bench import encryption

        display.say("(g) encryption: bytes per second and a step of a fleet, plain and encrypted in turn; about 90 s")
        rows += _encryption(raw.setdefault("encryption", encryption.measure()))
    if "l" in options.only:
        from testbed.bench import links

        display.say(f"(l) kernel links of {links.DEVICES:,} devices: set up, and rates of {links.SAMPLE}; about 40 s")
        rows += _links(raw.setdefault("links", links.measure()))
    if "v" in options.only:
        from testbed.bench import clocks

        display.say("(v) the quickstart on three clocks, with 1,000 and 100 devices; about 200 s")
        rows += _clocks(raw.setdefault("clocks", clocks.measure()))
    if options.peers:
        peers = raw["peers"] = run_peers(progress=display.say)
        display.say("ours once more, after the peers; about 15 s")
        _measure_again(seconds, options.repeats)
        rows += _against_peers(peers, seconds)
    folder = Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    write_json(folder / "bench.json", {"rows": [asdict(r) for r in rows], "raw": raw, "environment": environment()})
    _print(display.console, rows)
    display.console.print(f"all figures: {folder}/bench.json")
    _say_what_else(options, rows, display)
    return 0


def _say_what_else(options: argparse.Namespace, rows: list[Row], display: Display) -> None:
    if options.write_docs:
        from testbed.bench.tables.tables import write_docs
        from testbed.bench.tables.where import where

        display.console.print(write_docs([asdict(row) for row in rows], where()))
    if not options.peers:
        display.console.print("compared with Ray and Dask: make bench PEERS=1")


def _measure_again(seconds: dict[str, float], repeats: int) -> None:
    """Measure each work again, and keep the better figure."""
    for work in (W1, W2):
        seconds[work.name] = min(seconds.get(work.name, 1e9), data_plane(work, repeats)["ours_s"])
    for count in ROUNDS:
        work = round_of(count)
        seconds[work.name] = min(seconds.get(work.name, 1e9), one_round(work, count, repeats))


def one_round(work: Work, devices: int, repeats: int) -> float:
    with ours.emulated(ours.unlimited(devices), "off") as (server, _):
        return ours.best(server, work, devices, repeats)


def data_plane(work: Work, repeats: int) -> dict[str, Any]:
    """The testbed and raw ZeroMQ in turn, then NumPy."""
    a, b = work.operands()
    plan = ours.plan_over(work, 2)
    mine: list[float] = []
    raw: dict[bool, list[float]] = {True: [], False: []}
    with ours.agents(2) as server, RawWorkers(2) as workers:
        for turn in range(repeats + 1):
            took, result = ours.multiply(server, work, a, b, plan)
            mine.append(took)
            for slab_once in (True, False):
                begun = time.perf_counter()
                other = workers.multiply(work, a, b, slab_once=slab_once)
                raw[slab_once].append(time.perf_counter() - begun)
            if turn == 0:  # the first pass warms up and is checked, not counted
                check(work, result, a, b)
                check(work, other, a, b)
                mine.clear()
                raw = {True: [], False: []}
    return {
        "ours_s": min(mine),
        "raw_slab_once_s": min(raw[True]),
        "raw_slab_a_block_s": min(raw[False]),
        "numpy_2_threads_s": numpy_in_process(work, threads=2),
        "all_ours_s": mine,
        "all_raw_s": raw[True],
    }


def _against_raw(work: Work, result: dict[str, Any]) -> Row:
    ratio = result["raw_slab_once_s"] / result["ours_s"]
    return Row(
        f"(a) {work.name}, {work.blocks:,} blocks",
        f"{result['ours_s']:.4f} s",
        f"raw ZeroMQ {result['raw_slab_once_s']:.4f} s, NumPy {result['numpy_2_threads_s']:.4f} s",
        ratio,
        f"at least {OF_RAW[work.name]} of raw",
        ratio >= OF_RAW[work.name],
    )


def _planning(result: dict[str, Any]) -> list[Row]:
    """The slowest product of each kind, median of several passes."""
    which = f"worst of {result['products']} products, median of {result['passes']}"
    goals = (
        ("tiling, 1,024 devices", "box_1024_s", 0.050),
        ("tiling, 8,192 devices", "box_8192_s", 0.500),
        ("plan of the running system, 1,024 devices", "plan_s", 0.050),
        ("plan after a lost device, 1,024 devices", "adapt_s", 0.005),
    )
    return [
        Row(f"(e) {what}", f"{1e3 * result[key]:.1f} ms", which, None, f"{1e3 * goal:.0f} ms", result[key] <= goal)
        for what, key, goal in goals
    ]


def _verification(result: dict[str, Any]) -> list[Row]:
    from testbed.bench.lies import holds as lies_hold

    honest, effects = result["honest"], result["honest_effects"]
    rows = [
        Row(
            f"(f) {honest['blocks']:,} honest blocks",
            f"{honest['accused']} called wrong",
            f"{honest['products']:,} products; {honest['special_blocks']:,} blocks of products that are not finite or "
            f"may overflow, {honest['tiny_blocks']:,} of vanishing ones, {honest['repeated_blocks']:,} of operands "
            "that repeat",
            None,
            "0",
            not honest["accused"],
        )
    ]
    for one in result["lies"]:
        found = f"{one['found']} of {one['liars']} found"
        if one["found"]:
            found += f" by step {one['last_found_step']:.0f}"
        moved = f"loss moved by {one['effect']:.1e}; by honest orders of additions up to {max(effects):.1e}"
        name = f"(f) {one['model']}, seed {one['seed']}, {one['liars']} of 100 lie: {one['kind']}"
        rows.append(Row(name, found, moved, None, "all within 2 steps, or < 1e-5", lies_hold(one)))
    return rows


def _encryption(result: dict[str, Any]) -> list[Row]:
    rows = []
    for way in ("down", "up"):
        rate, plain = (result[kind][way] for kind in ("encrypted", "plain"))
        compared = f"plain {plain:.2f} GB/s; {result['encrypted']['cpu_s_per_gb']:.1f} s of CPU time per GB"
        rows.append(Row(f"(g) {way}, encrypted", f"{rate:.2f} GB/s", compared, rate / plain, "0.8 GB/s", rate >= 0.8))
    step = result["step"]
    took = f"{step['encrypted_s']:.2f} s, {100 * step['differs']:+.1f}%"
    what = f"(g) step of {step['devices']} devices, encrypted"
    return [*rows, Row(what, took, f"plain {step['plain_s']:.2f} s", None, "within 5%", abs(step["differs"]) <= 0.05)]


def _links(result: dict[str, Any]) -> list[Row]:
    what, set_up_s = f"(l) links of {result['devices']:,} devices", result["set_up_s"]
    rows = [Row(f"{what} set up", f"{set_up_s:.2f} s", "each way, read back", None, "5 s", set_up_s <= 5)]
    for way in ("down", "up"):
        least, most = (result[f"{way}_share"][end] for end in ("least", "most"))
        within = f"{100 * least:.1f}% to {100 * most:.1f}%"
        of = f"of what was asked, sample of {result['sample']}"
        rows.append(Row(f"{what}, {way}", within, of, None, "within 5%", least >= 0.95 and most <= 1.05))
    return rows


def _clocks(result: dict[str, Any]) -> list[Row]:
    rows = []
    modelled = f"virtual {result['virtual']['step_s']:.3f} s"
    for name in ("wall", "scaled"):
        differs = result[f"{name}_differs"]
        took = f"{result[name]['step_s']:.3f} s, {100 * differs:+.1f}%"
        rows.append(Row(f"(v) step of the quickstart, {name}", took, modelled, None, "within 3%", abs(differs) <= 0.03))
    for devices, goal, figures in ((100, 10, result["100 devices"]), (1000, 2, result)):
        ratio = result[f"faster_{devices}"]
        took = f"{figures['virtual']['host_s']:.3f} s per step, {figures['virtual']['blocks']:,} blocks"
        wall = f"wall {figures['wall']['host_s']:.2f} s"
        rows.append(Row(f"(v) shapes only, {devices:,} devices", took, wall, ratio, f"at least {goal}x", ratio >= goal))
    return rows


def _against_peers(peers: dict[str, dict[str, Any]], seconds: dict[str, float]) -> list[Row]:
    rows = []
    for name, peer in peers.items():
        if peer["status"] != "ok":
            rows.append(Row(f"{name}: {peer['status']}", "", peer["reason"], None, "", False))
            continue
        for work, figures in peer["works"].items():
            if work not in seconds:
                continue
            ratio = figures["seconds"] / seconds[work]
            least = 0.8 if work == "W1" else 20.0  # gaps under 25% are noise
            goal = "no slower" if work == "W1" else "at least 20x"
            text = f"{name} {peer['version']}: {figures['seconds']:.3f} s"
            met = ratio >= least or (work == "W1" and name != "ray")
            rows.append(Row(f"{work} against {name}", f"{seconds[work]:.4f} s", text, ratio, goal, met))
    return rows


def _print(console: Console, rows: list[Row]) -> None:
    table = Table(title="make bench", title_justify="left")
    for heading in ("what", "measured", "compared with", "ratio", "goal", ""):
        table.add_column(heading)
    for r in rows:
        mark = "[green]yes[/green]" if r.met else "[red]no[/red]"
        table.add_row(r.what, r.measured, r.compared, "" if r.ratio is None else f"{r.ratio:.2f}", r.goal, mark)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
