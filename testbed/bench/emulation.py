"""Is emulation true? This machine at three CPU quotas as three devices: measured, fitted, and set beside their twins.

`python -m testbed.bench.emulation FOLDER`: profiles and figures go to the folder; profiles that are there already are
not measured again. About five minutes on an idle machine, root (control groups), 2 cores. Not part of `make bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent.errors import Failure

PERIOD_US = 10_000
QUOTAS_US = (2500, 4000, 6000)
TOGETHER = {"two": (0, 1), "mix": (0, 0, 1), "alone": (1,)}  # which devices run at once


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench.emulation", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twins", nargs="*", choices=TOGETHER, default=list(TOGETHER))
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy and SciPy are imported: small matrices
    from emulator.calibration import calibrate
    from emulator.samples import read_samples
    from testbed import twin

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # agents and control groups go in any case
    options.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        os.nice(-10)  # whoever else is on this machine
    devices = []
    for quota_us in QUOTAS_US:
        path = options.folder / f"quota-{100 * quota_us // PERIOD_US}.json"
        if not path.exists():
            measure(path, quota_us, options.shapes, options.rounds)
        samples = read_samples(path)
        fitted = calibrate(samples)
        devices.append(twin.Device(samples, fitted))
        shapes = len(fitted.shapes)
        print(f"{path.stem}: held out median {fitted.median_error:.1%}, p95 {fitted.p95_error:.1%}, {shapes} shapes")
    found: dict[str, Any] = {}
    for name in options.twins:
        together = [devices[number] for number in TOGETHER[name]]
        real, emulated = twin.compare(together, options.steps, 0.4, options.seed, lambda text: None)
        print(f"twin, {name}")
        for row in twin.rows(real, emulated):
            print(f"  {row.what:<30} {1000 * row.real_s:8.1f} {1000 * row.twin_s:8.1f} ms {row.error:+7.1%}")
        found[name] = twin.as_json([device.samples.name for device in together], real, emulated)
    (options.folder / f"twins-{options.seed}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def measure(path: Path, quota_us: int, shapes: int, rounds: int) -> None:
    from testbed import twin
    from testbed.quota import cpu_quota, enter

    command = [sys.executable, "-m", "agent", "measure", "--out", str(path), "--name", path.stem, "--sustained", "3"]
    command += ["--kernel", "onnxruntime", "--shapes", str(shapes), "--rounds", str(rounds)]
    with twin.serving() as server, cpu_quota(quota_us, PERIOD_US) as group:
        process = subprocess.Popen([*command, "--ps", server.address], stderr=subprocess.DEVNULL)
        enter(group, process.pid)
        if process.wait() != 0:
            raise Failure(f"measuring at {quota_us} us failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
