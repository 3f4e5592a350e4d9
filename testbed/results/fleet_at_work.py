"""Which devices really did the work of a run, and which were lost without the scenario asking for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from emulator.model.fidelity import Worked
from ps.transport.attendance import LOST, Attendance
from testbed.launch.pods import Death
from testbed.runs.scenario import Scenario

SHOWN = 5  # most causes listed per kind


@dataclass(frozen=True, slots=True)
class Begun:
    """The fleet when the first step began."""

    emulated: int
    real: int
    lost: int  # emulated devices lost before the first step
    suspended: int
    arrived: int
    deaths: int = 0  # of pods, before the first step

    @classmethod
    def of(cls, attendance: Attendance, suspended: int, deaths: int = 0) -> Begun:
        real = len(attendance.present)
        return cls(attendance.count - real, real, _emulated_lost(attendance), suspended, attendance.arrived, deaths)


def worked(
    scenario: Scenario,
    asked: int,
    begun: Begun,
    attendance: Attendance,
    suspended: Sequence[str],
    deaths: Sequence[Death],
    stood_still_s: Sequence[float],
) -> Worked:
    """`asked`: emulated devices that the scenario wants present at the start. `suspended`: the reason for each
    suspended device."""
    real = len(attendance.present)
    disturbed = bool(scenario.faults or scenario.churn)
    unasked = [_died(death) for death in deaths[:SHOWN]]
    if len(deaths) > SHOWN:
        unasked.append(f"{len(deaths) - SHOWN} more pods ended")
    # devices that a scenario takes away also count as lost, and other losses cannot be told apart from them
    taken = sum(death.devices for death in deaths[begun.deaths :])
    silent = 0 if disturbed else _emulated_lost(attendance) - begun.lost - taken
    if silent > 0:
        unasked.append(f"{silent:,} devices fell silent or lost their connection")
    accused = Counter(suspended[begun.suspended :])
    if accused and not any(fault.do == "lie" for fault in scenario.faults):
        unasked += [f"{count:,} devices were suspended: {why}" for why, count in accused.most_common(SHOWN)]
    if attendance.least_real < scenario.fleet.phones:
        unasked.append(f"of {scenario.fleet.phones} phones at times only {attendance.least_real} were there")
    return Worked(
        asked=asked,
        began=begun.emulated,
        ended=attendance.count - real,
        least=attendance.least,
        real_began=begun.real,
        real_ended=real,
        real_least=attendance.least_real,
        unasked=tuple(unasked),
        stood_still_s=sum(stood_still_s),
        changed=attendance.arrived > begun.arrived or attendance.least_real < begun.real,
    )


def _died(death: Death) -> str:
    again = ", and was started again" if death.restarted else ""
    return f"pod {death.pod} with {death.devices:,} devices ended ({death.fate}){again}"


def _emulated_lost(attendance: Attendance) -> int:
    return attendance.departed[LOST] - attendance.departed_real[LOST]
