"""Real devices of a run: waiting for the required number, and keeping their profiles, to emulate them later.

The measurements that a device sends when it joins become `devices/NAME.json`, a profile for `cleave calibrate` and
`cleave twin`, and `devices/NAME.toml`, a kind for scenarios: `fleet.kinds = { "runs/.../devices/NAME.toml" = 1.0 }`.
A profile is untrusted text: invalid values are left out, and a profile that would take long to fit is not fitted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agent.protocol.errors import Failure
from agent.protocol.units import format_duration, format_size
from emulator.model.samples import ProfileError, read_samples
from emulator.model.zoo import parse_device
from ps.transport.attendance import Attendance
from ps.transport.server import Server
from testbed.results.keeping import Keeping
from testbed.runs import interrupts
from testbed.runs.display import Display
from testbed.twins.calibrate import device_file, file_name, text_literal

log = logging.getLogger(__name__)

MOST_SHAPES = 300  # per fitted profile: the time of a fit grows with the cube of its shapes
MOST_FITS = 16  # profiles fitted per run
FITTING_S = 60.0  # no further fit begins after this; a fit takes 6 to 14 s on two cores
PAUSE_S = 0.25


class PhonesError(Failure):
    """Fewer real devices than the run needs; the text says how a device joins."""


def wait_for_phones(server: Server, count: int, patience_s: float, display: Display) -> None:
    """Wait until `count` real devices are present, including those that have already joined."""
    attendance, deadline = server.attendance, time.monotonic() + patience_s

    def there() -> str:
        names = sorted(server.labels[device] for device in list(attendance.present))
        return f"{len(names)} of {count}" + (f" ({', '.join(names)})" if names else "")

    if len(attendance.present) < count:
        how = joining(server)
        display.say(f"waiting for {count} phones, at most {format_duration(patience_s)}. One joins with {how}")
    with display.phase("waiting for phones", lambda: len(attendance.present) / count, there):
        while not attendance.wait_for_real(count, PAUSE_S):
            interrupts.check()
            if time.monotonic() > deadline:
                away = "".join(f"; {d.name} has left: {d.reason}" for d in attendance.departures if d.back_s is None)
                away += "".join(f"; {name} stays away: {reason}" for name, reason in list(attendance.away.items())[:5])
                raise PhonesError(
                    f"{there()} phones joined within {format_duration(patience_s)}{away}. One joins with "
                    f"{joining(server)}. To wait longer: --set fleet.phones_wait='1 h'; to go on with fewer: "
                    f"--set fleet.phones={len(attendance.present)}"
                )
    display.say(f"phones: {there()}")


def joining(server: Server) -> str:
    invited = "cleave invite (from elsewhere), or " if server.public_addresses else ""
    return f"{invited}python -m agent --ps {server.address} (on this machine)"


def departures(attendance: Attendance) -> list[dict[str, Any]]:
    """For the summary: which devices left, why, and for how long."""
    return [
        {
            "name": d.name,
            "reason": d.reason,
            "until_s": d.until_s,
            "blocks": d.blocks,
            "away_s": None if d.back_s is None else d.back_s - d.at_s,
        }
        for d in attendance.departures
    ]


def write_devices(
    folder: Path,
    attendance: Attendance,
    labels: list[str],
    profiles: np.ndarray[Any, Any],
    display: Display,
    keeping: Keeping,
    now_s: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Write the files of all real devices: first each device's two figures; then fitted models, one fit per measured
    profile, however often a device has joined, and within limits. A device without a fit keeps its two figures, and
    `cleave calibrate` can fit it later. Returns the names of the kinds."""
    kinds: dict[Path, str] = {}
    to_fit: dict[str, list[Path]] = {}  # profile -> devices with that profile
    for device in sorted(attendance.real):
        name, row = labels[device], profiles[device]
        about = attendance.about.get(name, {})
        place = folder / "devices" / file_name(name)
        place.parent.mkdir(exist_ok=True)
        profile = about.get("profile", "")
        if place not in kinds and profile:
            to_fit.setdefault(profile, []).append(place)
        kinds[place] = "phone" if about.get("system") == "Android" else "laptop"
        figures = _plain(name, kinds[place], row)
        keeping.write(place.with_suffix(".toml"), partial(_write, figures))
        if profile:
            keeping.write(place.with_suffix(".json"), partial(_write, profile + "\n"))
    if to_fit:
        _fit_all(list(to_fit.values()), kinds, display, keeping, now_s)
    return sorted({place.name for place in kinds})


def _fit_all(
    groups: list[list[Path]],
    kinds: dict[Path, str],
    display: Display,
    keeping: Keeping,
    now_s: Callable[[], float],
) -> None:
    """Fit one model per group of devices with the same profile."""
    begun_s, done = now_s(), 0
    display.say("results are written; fitting models to the real devices, which may be interrupted")
    with display.phase("fitting real devices", lambda: done / len(groups), lambda: f"{done} of {len(groups)} profiles"):
        for places in groups[:MOST_FITS]:
            if now_s() - begun_s > FITTING_S:
                break
            interrupts.check()
            model = _fitted(places[0].with_suffix(".json"), kinds[places[0]])
            done += 1
            if model is None:
                continue
            for place in places:
                keeping.write(place.with_suffix(".toml"), partial(_write, model))
    if done < len(groups):
        some = ", ".join(places[0].name for places in groups[done:][:3])
        display.say(f"{len(groups) - done} real devices were not fitted ({some}): cleave calibrate DEVICE.json does it")


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _fitted(path: Path, kind: str) -> str | None:
    from emulator.model.calibration import calibrate

    try:
        samples = read_samples(path)
        if len(samples.shapes) > MOST_SHAPES:
            raise ProfileError(f"{len(samples.shapes)} shapes are too many")
        return device_file(samples, calibrate(samples), kind)
    except Exception as error:  # untrusted figures may break the fit in any way
        log.info("no model for %s: %s", path.name, error)
        return None


def _plain(name: str, kind: str, row: Any) -> str:
    memory = format_size(max(1, int(row["memory_bytes"])))
    text = "\n".join(
        [
            f"title = {text_literal(name)} # the device",
            f"kind = {text_literal(kind)} # phone, tablet, board, laptop or mini-pc",
            f'gemm = "{float(row["flops"]) / 1e9:.6g} GFLOPS" # float32 rate of a large product',
            'basis = "estimate" # of gemm: the device said so when it joined, from a few products',
            f'overhead = "{1e6 * float(row["overhead_s"]):.6g} us" # fixed cost of one call',
            f'ram = "{memory}"',
            'ram_basis = "estimate" # of ram: what it lends',
            f'budget = "{memory}" # memory its owner lends',
            'source = "said by the device when it joined a run"',
            "",
        ]
    )
    parse_device(name, text)
    return text
