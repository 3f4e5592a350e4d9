"""Lend this device to a server: `python -m agent --invitation LINK`, and from then on `python -m agent`; or, on the
server's own machine, `--ps tcp://127.0.0.1:PORT`. Measure it: `python -m agent measure`.

When it may work is up to its owner: `python -m agent rules`. Why it does not: `python -m agent status`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import select
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.wire import Refused

UPDATE_AGAIN_S = 300.0


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    match words[:1]:
        case ["rules"]:
            from agent import rules

            return rules.run(words[1:])
        case ["status"]:
            from agent import status

            return status.run(words[1:])
        case ["measure"]:
            from agent import measure

            options = _measure_parser().parse_args(words[1:])
            _limit_threads(options.threads)
            return measure.run(options)
    return _lend(words)


def _lend(words: list[str]) -> int:
    options = _parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    stop = SignalStop()  # first, so that no signal finds us without it

    from agent.rules import read_rules, rules_file
    from agent.state import Identity, open_folder

    try:
        folder = open_folder(options.state)
        identity = Identity(folder, options.name)
        rules = read_rules(rules_file())
    except ValueError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    threads = min(options.threads, rules.threads or options.threads)
    _limit_threads(threads)

    import numpy as np

    from agent.known import know
    from agent.line import find_line
    from agent.profile import Profile, pack_profiles
    from agent.status import Status
    from agent.traffic import Meter
    from agent.units import parse_duration, parse_rate, parse_size
    from agent.watch import Watch
    from agent.wire import Join
    from agent.worker import RESTART, UPDATE, Worker

    log = logging.getLogger("agent")
    resources = contextlib.ExitStack()
    try:
        line = resources.enter_context(find_line(options.ps, options.invitation, options.state))
        rates = {"down_bps": parse_rate(options.down), "up_bps": parse_rate(options.up)}
        latency_s, memory_bytes = parse_duration(options.latency), parse_size(options.memory)
        known = know(folder, options.name, threads, options.kernel, options.memory, not options.unmeasured)
        measured = known.measured
        profile = Profile(
            flops=measured.flops,
            overhead_s=measured.overhead_s,
            latency_s=latency_s,
            memory_bytes=memory_bytes,
            credit_blocks=options.credit,
            **rates,
        )
    except ValueError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    log.info(
        "%s: kernel %s, %.1f GFLOP/s measured with %d thread(s)%s",
        options.name,
        measured.kernel.name,
        measured.flops / 1e9,
        threads,
        "".join(f"; {name}: {why}" for name, why in measured.rejected.items()),
    )
    about = {
        "device": identity.id,
        "kernel": measured.kernel.name,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "system": "Android" if "ANDROID_ROOT" in os.environ else platform.system(),
    }
    if known.profile is not None:
        about["profile"] = known.profile
    server = line.endpoints[0]
    status = Status(folder, name=options.name, server=server, kernel=measured.kernel.name, flops=measured.flops)
    over_cable = all(_is_loopback(endpoint) for endpoint in line.endpoints)
    with resources, Watch(rules_file(), rules, Meter(folder / "traffic.json"), over_cable) as watch:
        worker = Worker(
            line.endpoints,
            Join(pack_profiles([profile]), [options.name], about, line.token),
            measured.kernel,
            stop,
            watch,
            once=options.once,
            curve=line.curve,
            on_welcome=line.welcomed,
            tell=status.tell,
        )
        code = worker.run()
    log.info(
        "%d blocks in %.1f s of computing, %d failed", worker.tally.blocks, worker.tally.compute_s, worker.tally.failed
    )
    if code == UPDATE and worker.outdated is not None:
        code = _update(folder, worker.outdated, stop)
    if code == RESTART:
        log.info("beginning again")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "agent", *words])
    if code != 2:
        status.tell("ended", "the owner stopped it" if stop.requested else "the run is over", None)
    return code


def _update(folder: Path, refused: Refused, stop: SignalStop) -> int:
    """Whether it worked or may work later: begin again. The exit code if somebody has to help, or wants us to end."""
    from agent.errors import UserError
    from agent.update import NotNow, update
    from agent.worker import RESTART

    try:
        update(folder, refused)
    except UserError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    except NotNow as error:
        logging.getLogger("agent").warning("no update yet: %s; trying again in %.0f s", error, UPDATE_AGAIN_S)
        stop.wait(UPDATE_AGAIN_S)
    return 0 if stop.requested else RESTART


def _limit_threads(threads: int) -> None:
    """BLAS reads these when NumPy is first imported, hence before anything that imports it."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)


def _is_loopback(address: str) -> bool:
    """A server there is at the other end of a cable (adb reverse), or on this machine: no network is used."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


class SignalStop:
    """SIGTERM or Ctrl-C ask the agent to leave; a pipe wakes the loop that waits on a socket."""

    def __init__(self) -> None:
        self.requested = False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._write.send(b"!")

    def fileno(self) -> int:
        return self._read.fileno()

    def wait(self, timeout_s: float) -> None:
        select.select([self._read], [], [], timeout_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent",
        description="Lend this device to a Cleave parameter server. It computes blocks of matrix products and returns "
        "them; it keeps nothing and sends nothing else. Ctrl-C leaves politely.",
        epilog="example: python -m agent --invitation 'cleave://...'; afterwards: python -m agent",
    )
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--invitation", metavar="LINK", help="from the server's owner; needed once, then remembered")
    server.add_argument("--ps", metavar="ADDRESS", help="a server on this machine, as it printed it: tcp://HOST:PORT")
    parser.add_argument("--state", metavar="FOLDER", help="where keys and the server are remembered")
    parser.add_argument("--name", default=platform.node() or "device", help="what people read in tables (%(default)s)")
    parser.add_argument("--threads", type=_positive, default=1, help="cores to lend (%(default)s)")
    parser.add_argument("--memory", default="512 MB", help="memory to lend (%(default)s)")
    parser.add_argument("--down", default="100 Mbit", help="downlink to plan with (%(default)s)")
    parser.add_argument("--up", default="20 Mbit", help="uplink to plan with (%(default)s)")
    parser.add_argument("--latency", default="10 ms", help="one-way latency to plan with (%(default)s)")
    parser.add_argument("--credit", type=_positive, default=64, help="blocks to hold at most (%(default)s)")
    parser.add_argument("--kernel", choices=("numpy", "onnxruntime"), help="instead of the faster one, measured")
    parser.add_argument("--unmeasured", action="store_true", help="do not measure this device; guess")
    parser.add_argument("--once", action="store_true", help="end when the run ends, do not wait for another")
    return parser


def _measure_parser() -> argparse.ArgumentParser:
    from agent import measure

    parser = argparse.ArgumentParser(
        prog="python -m agent measure",
        description="Measure this device: a grid of products, memory, a sustained run, the link to a server. Takes one "
        "to four minutes, writes one JSON profile, sends nothing. Ctrl-C ends it; what was measured is written.",
        epilog="example: python -m agent measure --name my-phone --out my-phone.json --sustained 120",
    )
    measure.add_options(parser)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
