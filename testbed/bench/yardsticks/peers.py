"""Ray and Dask for comparison: a separate environment, their scripts run in it, their figures returned.

Their packages are not installed into the project's environment. A peer that cannot be installed or run is part of the
answer, with the reason: a table never omits a peer silently. Each script runs in its own process group, which is ended
before `run_peers` returns, however it returns; processes that Ray starts outside the group end with the script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INSTALL_LIMIT_S = 900.0
RUN_LIMIT_S = 400
GRACE_S = 20.0  # time for a script to shut down what it started


@dataclass(frozen=True)
class Peer:
    name: str
    script: Path
    requirements: tuple[str, ...]
    rough_install: str
    rough_run: str


# psutil measures memory; dask.distributed needs it anyway. All use the project's NumPy version: the same BLAS.
PEERS = (
    Peer("ray", HERE / "peer_ray.py", ("ray==2.60.*", "psutil"), "about 1 min, 300 MB", "about 2 min"),
    Peer(
        "dask",
        HERE / "peer_dask.py",
        ("dask==2026.8.*", "distributed==2026.8.*", "psutil"),
        "about 20 s, 20 MB",
        "about 1 min",
    ),
)


class PeerError(Exception):
    """Why a peer has no figures."""


def run_peers(
    environment: Path = Path(".venv-peers"),
    *,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda line: None,
    peers: tuple[Peer, ...] = PEERS,
) -> dict[str, dict[str, Any]]:
    """The peers' figures by name: {"status": "ok", "version", "works": {work: {"seconds", ...}}}, or
    {"status": "not installed" or "failed", "reason"}."""
    results: dict[str, dict[str, Any]] = {}
    for peer in peers:
        try:
            python = _install(peer, environment.absolute(), progress)
        except PeerError as error:
            results[peer.name] = {"status": "not installed", "reason": str(error)}
        else:
            progress(f"{peer.name}: W1, W2 and W3 with 1,000 and 4,000 devices ({peer.rough_run})")
            try:
                results[peer.name] = {"status": "ok", **_measure(peer, python, repeats)}
            except PeerError as error:
                results[peer.name] = {"status": "failed", "reason": str(error)}
        if "reason" in results[peer.name]:
            progress(f"{peer.name}: {results[peer.name]['status']}: {results[peer.name]['reason']}")
    return results


def _install(peer: Peer, environment: Path, progress: Callable[[str], None]) -> Path:
    """The environment's interpreter, once the peer is installed there; a file in it notes what is installed."""
    python = environment / "bin" / "python"
    requirements = [*peer.requirements, f"numpy=={version('numpy')}"]
    note = environment / f"{peer.name}.installed"
    wanted = "\n".join(requirements)
    if python.exists() and note.exists() and note.read_text() == wanted:
        return python
    progress(f"{peer.name}: installing {', '.join(requirements)} into {environment.name} ({peer.rough_install})")
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(environment)], INSTALL_LIMIT_S)
    _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *requirements], INSTALL_LIMIT_S)
    note.write_text(wanted)
    return python


def _measure(peer: Peer, python: Path, repeats: int) -> dict[str, Any]:
    # -I: nothing of the project, the user's site or this folder can interfere with the peer.
    command = [str(python), "-I", str(peer.script), "--repeats", str(repeats), "--limit-s", str(RUN_LIMIT_S)]
    answer = _run(command, RUN_LIMIT_S + GRACE_S)
    try:
        measured: dict[str, Any] = json.loads(answer.strip().rpartition("\n")[2])
    except json.JSONDecodeError as error:
        raise PeerError(f"{peer.script.name} ended well but printed no figures: {answer[-200:]!r}") from error
    return measured


def _run(command: list[str], limit_s: float) -> str:
    """The command's standard output; it gets a folder for its temporary files and leaves neither file nor process
    behind."""
    # Ray puts sockets into its temporary folder; their path may have 107 characters, so the folder's path must be
    # short.
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**variables, "TMPDIR": folder},
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"cannot start {command[0]}: {error}") from error
        try:
            answer, complaint = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"not finished after {limit_s:.0f} s: {' '.join(command)}") from error
        finally:
            _end(process)
    if process.returncode != 0:
        lines = [line.strip() for line in (complaint + answer).splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no output")
        raise PeerError(f"{' '.join(command[:4])} ... ended with code {process.returncode}: {reason}")
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the script to shut down if it still runs, then end everything left in its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def main() -> None:
    """`python -m testbed.bench.yardsticks.peers`: the figures as JSON, progress on the standard error."""
    results = run_peers(progress=lambda line: print(line, file=sys.stderr, flush=True))
    json.dump(results, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
