"""How fast is each device now compared with its profile? Repeats some products of the profile under the same CPU quota.

The speed of a shared machine drifts within minutes by more than a good model's error. So between the steps of the real
agents one process per device, all at once like the agents, computes the longest products in the profile; the ratio of
their time now to their time in the profile is the host's drift. These products are not blocks of the comparison.

`python -m testbed.twins.anchor KERNEL THREADS` is that process: for every line of shapes on its input it prints their
times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.protocol.errors import Failure
from emulator.model.calibration import Calibration, stretched
from emulator.model.performance import TERMS, Performance
from emulator.model.samples import Samples
from testbed.twins.quota import running

Floats = NDArray[np.float64]
PRODUCTS = 6  # per probe
EDGE = 64  # least rows and columns, as in blocks


@dataclass(frozen=True, slots=True)
class Now:
    """A device's current speed: the time of products relative to its profile, and processor seconds per message byte,
    down and up; None if no CPU quota makes that matter."""

    products: float = 1.0
    message_s: tuple[float, float] | None = None

    def applied(self, model: Performance, stretch: float | None) -> Performance:
        slower = {term: self.products * getattr(model, term) for term in TERMS}
        if self.message_s is None or stretch is None:
            return replace(model, **slower)
        down_s, up_s = self.message_s
        return replace(model, **slower, down_s=stretch * down_s, up_s=stretch * up_s)

    def __str__(self) -> str:
        said = f"products {self.products - 1:+.1%} of their time in the profile"
        if self.message_s is None:
            return said
        down_s, up_s = self.message_s
        return f"{said}, messages {1e9 * down_s:.2f} ms of CPU time per MB down, {1e9 * up_s:.2f} up"


class Anchor:
    """One device's process and its measurements."""

    def __init__(self, process: subprocess.Popen[str], samples: Samples, found: Calibration) -> None:
        self._process = process
        self._stretch = stretched(samples)
        self._picked = products(found)
        self._then_s = found.measured_s[self._picked]
        self._request = json.dumps(found.shapes[self._picked].tolist())
        self._slower: list[float] = []

    @property
    def drift(self) -> float:
        """Time relative to the profile, averaged over the probes."""
        return float(np.mean(self._slower)) if self._slower else 1.0

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(self._request + "\n")
        self._process.stdin.flush()

    def answer(self, counts: bool = True) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failure(f"the probe of a device's speed ended with exit code {self._process.wait()}")
        clock_s, processor_s = np.array(json.loads(line)).T
        now_s = clock_s if self._stretch is None else self._stretch * processor_s
        if counts:
            self._slower.append(float(np.median(now_s / self._then_s)))


@contextmanager
def anchors(devices: Sequence[tuple[Samples, Calibration]]) -> Iterator[list[Anchor]]:
    """Processes that have warmed up with one probe and are ready."""
    with ExitStack() as stack:
        found = []
        for samples, calibration in devices:
            command = [sys.executable, "-m", "testbed.twins.anchor", calibration.kernel, str(samples.threads)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(running(command, samples.quota, samples.threads, **pipes))
            found.append(Anchor(process, samples, calibration))
        probe(found, counts=False)
        yield found


def probe(found: Sequence[Anchor], counts: bool = True) -> None:
    """Probe all devices at once."""
    for anchor in found:
        anchor.ask()
    for anchor in found:
        anchor.answer(counts)


def products(found: Calibration) -> NDArray[np.int64]:
    """Indices of the profile's shapes to use: those like the blocks of a large model first, the longest first."""
    batch, rows, _, columns = found.shapes.T
    like_blocks = (batch == 1) & (np.minimum(rows, columns) >= EDGE)
    order: NDArray[np.int64] = np.lexsort((found.measured_s, like_blocks))[::-1][:PRODUCTS]
    return order


def main() -> None:
    from agent.compute.kernels import NumpyKernel, OnnxKernel
    from agent.measure.sampling import Sampler

    name, threads = sys.argv[1], int(sys.argv[2])
    kernel = NumpyKernel() if name == NumpyKernel.name else OnnxKernel(threads)
    sampler = Sampler(0)
    for line in sys.stdin:
        found = []
        for shape in json.loads(line):
            *_, (_, clock_s, _), (_, processor_s, _) = sampler.sample(kernel, shape, 0.0)
            found.append([clock_s, processor_s])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
