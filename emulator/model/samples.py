"""Reads and checks a profile written by `python -m agent measure`. An error is one line that says what is wrong."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.measure.command import FORMAT, VERSION
from agent.protocol.errors import UserError

Floats = NDArray[np.float64]
READABLE = (1, VERSION)  # version 1 samples have no quartiles: the mean and a few single calls stand in
AGAIN = "measure the device again: python -m agent measure"


class ProfileError(UserError):
    """The profile cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    kernel: int
    shape: int
    calls: int
    seconds: float  # all calls together
    each_s: tuple[float, ...]  # a few single calls
    processor_s: float  # processor time of all calls
    typical_s: float  # of one call, wall time
    typical_processor_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    path: Path
    made: str
    complete: bool
    device: dict[str, Any]
    versions: dict[str, str]
    memory: dict[str, int | None]
    kernels: list[str]
    shapes: NDArray[np.int64]  # [k, 4]
    samples: list[Sample]
    stretch: float  # wall time of all rounds / processor time
    sustained: Floats  # [w, 2]: time, processor seconds per call; rises with heat, not with load from other programs
    pauses: Floats  # [p, 2]: seconds running, seconds paused
    link: dict[str, Any] | None

    @property
    def name(self) -> str:
        return str(self.device.get("name", "device"))

    @property
    def threads(self) -> int:
        return int(self.device.get("threads", 1))

    @property
    def quota(self) -> tuple[int, int] | None:
        """The CPU quota under which the device was measured: quota and period in microseconds."""
        quota = self.device.get("cpu_quota")
        return None if quota is None else (int(quota["quota_us"]), int(quota["period_us"]))


def read_samples(path: Path) -> Samples:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"cannot read {path}: {error.strerror}; give a profile made by python -m agent measure"
        ) from None
    except ValueError:  # also text that is not UTF-8
        raise ProfileError(f"{path} is not JSON, or only the beginning of it; {AGAIN}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProfileError(f"{path} is not a device profile; give a file made by python -m agent measure")
    if document.get("version") not in READABLE:
        raise ProfileError(
            f"{path} has profile version {document.get('version')!r}, this release reads version "
            f"{' and '.join(str(version) for version in READABLE)}; "
            "measure again with this release"
        )
    try:
        return _samples(path, document)
    except ProfileError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ProfileError(f"{path} is damaged ({type(error).__name__}: {error}); {AGAIN}") from None


def _samples(path: Path, document: dict[str, Any]) -> Samples:
    shapes = document["shapes"]
    if not all(len(s) == 4 and all(isinstance(x, int) and x >= 1 for x in s) for s in shapes):
        raise ProfileError(f"{path} has a shape that is none: four whole numbers from 1 up are needed; {AGAIN}")
    samples = []
    for number, (kernel, shape, _, calls, seconds, each, processor_s, *quartiles) in enumerate(document["samples"]):
        if not (0 <= kernel < len(document["kernels"]) and 0 <= shape < len(shapes) and calls >= 1 and each):
            raise ProfileError(f"{path}: sample {number} names a kernel or shape that is not there; {AGAIN}")
        typical_s, typical_processor_s = float(np.median(each)), processor_s / calls
        if document["version"] > 1:
            (_, typical_s, _), (_, middle_s, _) = quartiles
            typical_processor_s = middle_s or typical_processor_s  # zero: the clock is too coarse for one call
        for value in (seconds, *each, processor_s, typical_s, typical_processor_s):
            _positive(path, f"sample {number} of shape {shapes[shape]}", value)
        each_s = tuple(float(x) for x in each)
        times = float(processor_s), float(typical_s), float(typical_processor_s)
        samples.append(Sample(kernel, shape, calls, float(seconds), each_s, *times))
    elapsed_s, processor_s = (sum(times) for times in zip(*document["rounds"], strict=True)) if samples else (1.0, 1.0)
    for value in (elapsed_s, processor_s):
        _positive(path, "all rounds", value)
    stretch = elapsed_s / processor_s
    windows = (document["sustained"] or {"windows": []})["windows"]
    for at, calls, seconds, running_s in windows:
        if not math.isfinite(at) or calls < 1:
            raise ProfileError(f"{path}: a window of the sustained run is invalid; {AGAIN}")
        for value in (seconds, running_s):
            _positive(path, "the sustained run", value)
    away = (document["pauses"] or {"ran_and_away_s": []})["ran_and_away_s"]
    for pair in away:
        if len(pair) != 2 or not all(math.isfinite(x) and x >= 0 for x in pair):
            raise ProfileError(f"{path}: a pause is invalid: {pair}; {AGAIN}")
    if link := document["link"]:
        for seconds in (
            *link["round_trip_s"],
            *(s for way in ("down", "up") for _, *times in link[way] for s in times),
        ):
            _positive(path, "the link", seconds)
    return Samples(
        path=path,
        made=str(document["made"]),
        complete=document["complete"] is True,
        device=dict(document["device"]),
        versions=dict(document["versions"]),
        memory=dict(document["memory"]),
        kernels=[str(kernel) for kernel in document["kernels"]],
        shapes=np.array(shapes, np.int64).reshape(-1, 4),
        samples=samples,
        stretch=stretch,
        sustained=np.array([(at, running_s / calls) for at, calls, _, running_s in windows]).reshape(-1, 2),
        pauses=np.array(away, np.float64).reshape(-1, 2),
        link=link,
    )


def _positive(path: Path, what: str, value: object) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ProfileError(f"{path}: {what} took {value!r} seconds; every time must be above zero; {AGAIN}")
