"""The device's speed profile: measured once, on the first start, and kept in the state folder.

The measurement (`python -m agent measure --quick`, a few seconds) runs in a separate process, so the agent loads only
the kernel that it uses and keeps none of the measurement's memory. It is repeated when something that it depends on
changes. The profile is also sent to the server, so that this device can be emulated.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.compute.kernels import Kernel, Measured, NumpyKernel, OnnxKernel, pick_kernel
from agent.identity.state import read_json
from agent.measure.about import cpu_quota, processor, versions
from agent.measure.command import FORMAT
from agent.measure.command import VERSION as PROFILE_VERSION

log = logging.getLogger(__name__)

PATIENCE_S = 90.0
MOST_BYTES = 64 << 10  # a larger profile is not sent to the server


@dataclass(frozen=True, slots=True)
class Known:
    measured: Measured
    profile: str | None  # as JSON; None: not measured


def know(folder: Path, name: str, threads: int, kernel: str | None, memory: str, measure: bool) -> Known:
    """Without `measure`, use a rough estimate. ValueError if the requested kernel cannot be used."""
    if not measure:
        return Known(pick_kernel(kernel, threads), None)
    path = folder / f"profile-{threads}-{kernel or 'any'}.json"
    profile = read_json(path)
    if not is_current(profile, threads):
        log.info("measuring this device, once; a few seconds")
        _measure(path, name, threads, kernel, memory)
        profile = read_json(path)
    found = _picked(profile, threads) if is_current(profile, threads) else None
    if found is None:
        return Known(pick_kernel(kernel, threads), None)
    profile["device"]["name"] = name  # the name may have changed since the measurement
    text = json.dumps(profile, separators=(",", ":"))
    return Known(found, text if len(text) <= MOST_BYTES else None)


def is_current(profile: dict[str, Any], threads: int) -> bool:
    """True if the profile is complete and matches the current versions, processor, threads and quota."""
    device = profile.get("device")
    return (
        (profile.get("format"), profile.get("version")) == (FORMAT, PROFILE_VERSION)
        and profile.get("complete") is True
        and profile.get("versions") == versions()
        and isinstance(device, dict)
        and (device.get("threads"), device.get("processor")) == (threads, processor())
        and device.get("cpu_quota") == cpu_quota()
    )


def _picked(profile: dict[str, Any], threads: int) -> Measured | None:
    match profile.get("picked"):
        case {"kernel": str(name), "flops": float(flops), "overhead_s": float(overhead_s), "rejected": dict(rejected)}:
            pass
        case _:
            return None
    try:
        kernel: Kernel = NumpyKernel() if name == NumpyKernel.name else OnnxKernel(threads)
    except Exception as error:  # a broken installation may raise anything
        log.warning("kernel %s does not work any more (%s)", name, error)
        return None
    return Measured(kernel, flops, overhead_s, {str(other): str(why) for other, why in rejected.items()})


def _measure(path: Path, name: str, threads: int, kernel: str | None, memory: str) -> None:
    command = [sys.executable, "-m", "agent", "measure", "--quick", "--faster", "--sustained", "0"]
    command += [
        "--out",
        str(path),
        "--name",
        name,
        "--threads",
        str(threads),
        "--memory",
        memory,
        *(["--kernel", kernel] if kernel else []),
    ]
    here = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("this device could not be measured (%s); it joins with a rough guess", error)
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        log.warning("this device could not be measured (%s); it joins with a rough guess", said[-1] if said else "")
