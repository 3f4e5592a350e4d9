"""Clock scales that `clock.kind = "auto"` has found, in a small file beside the results. The same scenario on the same
host need not be probed again. Losing the file costs a search and nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from emulator.model.scales import Trial
from testbed.runs.scenario import Scenario

NAME = "clock-scales.json"
MOST = 100  # scenarios; the oldest are forgotten


class KnownScales:
    def __init__(self, results: Path, scenario: Scenario) -> None:
        self.path, self._key = results / NAME, _key(scenario)

    def trials(self) -> tuple[Trial, ...]:
        """Of this scenario on this host; none if the file is missing or makes no sense."""
        found = self._read().get(self._key, [])
        with contextlib.suppress(TypeError, ValueError):
            return tuple(Trial(float(scale), float(stretch)) for scale, stretch in found)
        return ()

    def keep(self, trials: Sequence[Trial]) -> None:
        """Instead of what was known; no trials: forget it."""
        known = self._read()
        known.pop(self._key, None)
        if trials:
            known[self._key] = [(trial.scale, trial.stretch) for trial in trials]
        latest = dict(list(known.items())[-MOST:])
        with contextlib.suppress(OSError):  # the run matters more
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".part")
            partial.write_text(json.dumps(latest, indent=1), encoding="utf-8")
            partial.replace(self.path)

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def _key(scenario: Scenario) -> str:
    """Everything that decides how much a step asks of the host, and the host."""
    parts = {"model", "data", "fleet", "planner", "links", "launch"}
    asked = scenario.model_dump(mode="json", include=parts)
    asked["micro_batches"] = scenario.training.micro_batches
    config = scenario.model.config
    asked["config"] = Path(config).read_text(encoding="utf-8") if config else ""
    host = [platform.platform(), platform.processor(), os.cpu_count(), psutil.virtual_memory().total]
    version = importlib.metadata.version("cleave-testbed")
    told = json.dumps([asked, scenario.seed, host, version], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]
