"""What this device knows about its own speed: measured once, on its first start, and kept in its state folder.

The measurement (`python -m agent measure --quick`, a few seconds) runs in a process of its own: the agent itself loads
only the kernel that it uses, and none of the measurement's memory stays with it. It is made again when something has
changed that it depends on. The profile is also what the server gets, so that this device can be emulated.
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

from agent.about import cpu_quota, processor, versions
from agent.kernels import Kernel, Measured, NumpyKernel, OnnxKernel, pick_kernel
from agent.measure import FORMAT
from agent.measure import VERSION as PROFILE_VERSION
from agent.state import read_json

log = logging.getLogger(__name__)

PATIENCE_S = 90.0
MOST_BYTES = 64 << 10  # of a profile that is sent


@dataclass(frozen=True, slots=True)
class Known:
    measured: Measured
    profile: str | None  # as JSON; None: not measured


def know(folder: Path, name: str, threads: int, kernel: str | None, memory: str, measure: bool) -> Known:
    """`measure`: otherwise a moment's guess has to do. ValueError if the kernel that was asked for cannot be used."""
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
    profile["device"]["name"] = name  # as it is called now
    text = json.dumps(profile, separators=(",", ":"))
    return Known(found, text if len(text) <= MOST_BYTES else None)


def is_current(profile: dict[str, Any], threads: int) -> bool:
    """Is it complete, and measured on what there is now?"""
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
    except Exception as error:  # whatever a broken installation throws
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
    here = str(Path(__file__).resolve().parents[1])
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
