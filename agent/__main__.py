"""The agent's command line. `python -m agent` lends this device to a server.

The first start needs an invitation: `--invitation LINK` or `--invitation-file FILE`; later starts remember the server.
On the server's own machine, `--ps tcp://127.0.0.1:PORT` joins without one.

Subcommands: `measure` profiles this device, `rules` shows and sets when it may work, `status` says what it does and
why, `update` installs a release that waits for the owner's approval.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
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
    from agent.identity.update import Offer

UPDATE_AGAIN_S = 300.0
NEEDED = {"numpy": "numpy", "zmq": "pyzmq"}  # modules, and the packages they come from


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        if (package := NEEDED.get((error.name or "").partition(".")[0])) is None:
            raise
        print(
            f"agent: {sys.executable} has no {package}: {sys.executable} -m pip install "
            f"{' '.join(NEEDED.values())}; or start the agent with a Python that has them, "
            "in a clone of the project .venv/bin/python",
            file=sys.stderr,
        )
        return 2


def _run(words: list[str]) -> int:
    match words[:1]:
        case ["rules"]:
            from agent.owner import rules_file as rules

            return rules.run(words[1:])
        case ["status"]:
            from agent.owner import status

            return status.run(words[1:])
        case ["update"]:
            from agent.identity import update

            return update.run(words[1:])
        case ["measure"]:
            from agent.measure import command as measure

            options = measure_parser().parse_args(words[1:])
            _limit_threads(options.threads)
            return measure.run(options)
    return _lend(words)


def _lend(words: list[str]) -> int:
    options = lend_parser().parse_args(words)
    if options.invitation is not None:
        from agent.identity.command_line import hide_tokens

        hide_tokens()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    stop = SignalStop()  # before anything slow, so that no signal is missed

    from agent.identity.state import Identity, open_folder
    from agent.identity.update_state import note_running
    from agent.owner.rules_file import read_rules, rules_file

    try:
        folder = open_folder(options.state)
        identity = Identity(folder, options.name)
        rules = read_rules(rules_file())
        note_running(folder)
    except ValueError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    threads = min(options.threads, rules.threads or options.threads)
    _limit_threads(threads)

    import numpy as np

    from agent.compute.worker import RESTART, UPDATE, Worker
    from agent.identity.bundle_file import report_start
    from agent.identity.command_line import without_invitation
    from agent.identity.invitation import forget_file, read_link
    from agent.identity.server_choice import find_line
    from agent.measure.known import know
    from agent.owner.data_cap import Meter
    from agent.owner.status import Status
    from agent.owner.watch import Watch
    from agent.protocol.profile import Profile, pack_profiles
    from agent.protocol.units import parse_duration, parse_rate, parse_size
    from agent.protocol.wire import Join

    log = logging.getLogger("agent")
    resources = contextlib.ExitStack()
    try:
        link = options.invitation if options.invitation_file is None else read_link(options.invitation_file)
        line = resources.enter_context(find_line(options.ps, link, options.state, options.trust_signer))
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

    def tell(state: str, why: str, until_s: float | None) -> None:
        status.tell(state, why, until_s)
        report_start()

    def welcomed() -> None:
        line.welcomed()
        if options.invitation_file is not None:
            forget_file(options.invitation_file)

    over_cable = all(is_loopback(endpoint) for endpoint in line.endpoints)
    with resources, Watch(rules_file(), rules, Meter(folder / "traffic.json"), over_cable) as watch:
        worker = Worker(
            line.endpoints,
            Join(pack_profiles([profile]), [options.name], about),
            measured.kernel,
            stop,
            watch,
            once=options.once,
            curve=line.curve,
            token=line.token,
            entrances=line.entrances,
            on_welcome=welcomed,
            tell=tell,
        )
        code = worker.run()
    log.info(
        "%d blocks in %.1f s of computing, %d failed", worker.tally.blocks, worker.tally.compute_s, worker.tally.failed
    )
    if code == UPDATE and worker.outdated is not None:
        from agent.identity.update import Offer

        code = _update(folder, Offer(worker.outdated, worker.endpoint, line.curve is not None), stop)
    if code == RESTART:
        log.info("beginning again")
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "agent", *without_invitation(words)])  # server is remembered
    if code not in (2, UPDATE):
        status.tell("ended", "the owner stopped it" if stop.requested else "the run is over", None)
    return code


def _update(folder: Path, offer: Offer, stop: SignalStop) -> int:
    """Exit code. UPDATE: the launcher starts the new agent. RESTART: try again. 2: the owner must act. 0: stopped."""
    from agent.compute.worker import RESTART, UPDATE
    from agent.identity.update import NotNow, update
    from agent.owner.rules_file import read_rules, rules_file
    from agent.protocol.errors import UserError

    try:
        if update(folder, offer, read_rules(rules_file()).updates):
            return UPDATE
    except UserError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    except NotNow as error:
        logging.getLogger("agent").warning("no update yet: %s; trying again in %.0f s", error, UPDATE_AGAIN_S)
        stop.wait(UPDATE_AGAIN_S)
    return 0 if stop.requested else RESTART


def _limit_threads(threads: int) -> None:
    """Call before anything imports NumPy: BLAS reads these variables on the first import."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)


def is_loopback(address: str) -> bool:
    """True if the server is on this machine or at the other end of a cable (adb reverse): no network is used."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may begin with 127. and lead anywhere
        return False


class SignalStop:
    """SIGTERM and Ctrl-C ask the agent to leave. A socket pair wakes the loop that polls."""

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


def lend_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent",
        description="Lend this device to a Cleave parameter server. It computes blocks of matrix products and returns "
        "them, keeps none of them, and says what it is and how fast it is. Ctrl-C leaves politely.",
        epilog="example: python -m agent --invitation 'cleave://...'; afterwards: python -m agent",
    )
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--invitation", metavar="LINK", help="from the server's owner; needed once, then remembered")
    server.add_argument(
        "--invitation-file", metavar="FILE", help="the same, read from a file that is removed when it has served, or -"
    )
    server.add_argument("--ps", metavar="ADDRESS", help="a server on this machine, as it printed it: tcp://HOST:PORT")
    parser.add_argument("--state", metavar="FOLDER", help="where keys and the server are remembered")
    parser.add_argument(
        "--trust-signer",
        action="store_true",
        help="take updates from the signer that this invitation names from now on",
    )
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


def measure_parser() -> argparse.ArgumentParser:
    from agent.measure import command as measure

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
