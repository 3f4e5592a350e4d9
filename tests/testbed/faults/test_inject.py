"""Promises of testbed.faults.inject: which devices a fault hits, what is sent when, and an audit that hides nothing. No
pods and no clock: a list takes the orders, and the test sets the time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agent.protocol.errors import UserError
from emulator.availability.churn import Schedule, poisson_churn
from testbed.faults.inject import Injection, Injector, churn_schedule, describe, injecting, plan_faults
from testbed.runs.scenario import Churn, Fault

if TYPE_CHECKING:
    from conftest import Until

NETWORKS = ["cable", "uk-ftth", "uk-ftth", "cable", "uk-ftth", "cable", "uk-ftth", "uk-ftth"]


class FakePods:
    """Two pods that carry out orders at once, at the test's time."""

    def __init__(self, late_s: float = 0.0, deaf: bool = False) -> None:
        self.now_s = 0.0
        self.ordered: list[tuple[float, int, dict[str, Any]]] = []
        self.killed: list[int] = []
        self.paused: list[tuple[float, int]] = []
        self.resumed: list[tuple[float, int]] = []
        self.cables: list[tuple[float, int, bool]] = []
        self.late_s, self.deaf = late_s, deaf
        self._reports: list[tuple[int, dict[str, Any]]] = []

    def place(self, device: int) -> tuple[int, int]:
        return device % 2, device // 2

    def device(self, pod: int, index: int) -> int:
        return 2 * index + pod

    def order(self, pod: int, order: Mapping[str, Any]) -> None:
        self.ordered.append((self.now_s, pod, dict(order)))
        report = {"at_ns": int(1e9 * (self.now_s + self.late_s)), **order}
        if order["do"] == "corrupt":
            report["devices"] = [0, 1]
        self._reports.append((pod, report))

    def kill(self, pod: int) -> None:
        self.killed.append(pod)

    def pause(self, pod: int) -> None:
        self.paused.append((self.now_s, pod))

    def resume(self, pod: int) -> None:
        self.resumed.append((self.now_s, pod))

    def disconnect(self, pod: int) -> None:
        self.cables.append((self.now_s, pod, False))

    def reconnect(self, pod: int) -> None:
        self.cables.append((self.now_s, pod, True))

    def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]:
        reports, self._reports = self._reports, []
        return [] if self.deaf else reports


def drive(pods: FakePods, injector: Injector, until_s: float, step_s: float = 0.5) -> None:
    for now_s in np.arange(0.0, until_s + step_s / 2, step_s).tolist():
        pods.now_s = now_s
        injector.tick(now_s)


def fault(do: str, at: str = "1 s", **keys: Any) -> Fault:
    return Fault.model_validate({"at": at, "do": do, **keys})


# ---- choosing


def test_the_same_seed_chooses_the_same_devices_and_another_seed_others() -> None:
    networks = ["cable"] * 100

    def chosen(seed: int) -> tuple[int, ...]:
        (injection,) = plan_faults([fault("leave", share="10%")], networks, 2, seed)
        return injection.devices

    assert chosen(1) == chosen(1)
    assert len(set(chosen(1))) == 10
    assert chosen(1) != chosen(2)


def test_a_group_outage_takes_all_devices_of_a_network_and_brings_them_back() -> None:
    plan = plan_faults([fault("vanish", network="uk-ftth", seconds=3.0)], NETWORKS, 2, 0)
    group = (1, 2, 4, 6, 7)
    assert plan == [Injection(1.0, "vanish", group), Injection(4.0, "return", group)]


def test_the_devices_that_left_return_and_none_leaves_twice() -> None:
    faults = [fault("return", "3 s", devices=8), fault("leave", "1 s", devices=3), fault("leave", "2 s", devices=3)]
    one, two, back = plan_faults(faults, NETWORKS, 2, 4)
    assert not set(one.devices) & set(two.devices)
    assert set(back.devices) == set(one.devices) | set(two.devices)


def test_a_flap_leaves_and_returns_as_often_as_asked() -> None:
    plan = plan_faults([fault("flap", devices=2, times=3, period="4 s")], NETWORKS, 2, 0)
    assert [(i.at_s, i.do) for i in plan] == [
        (1.0, "leave"), (3.0, "return"), (5.0, "leave"), (7.0, "return"), (9.0, "leave"), (11.0, "return")
    ]  # fmt: skip
    assert len({i.devices for i in plan}) == 1


def test_devices_of_a_killed_pod_are_not_chosen_again() -> None:
    kill, leave = plan_faults([fault("kill"), fault("leave", "2 s", share="100%")], NETWORKS, 2, 0)
    assert len(kill.pods) == 1
    assert set(kill.devices) | set(leave.devices) == set(range(8))
    assert not set(kill.devices) & set(leave.devices)


def test_a_kill_that_leaves_no_pod_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match=r"at least one must survive: set fleet.pods to 3 or more"):
        plan_faults([fault("kill", pods=2)], NETWORKS, 2, 0)


def test_a_fault_without_devices_is_refused() -> None:
    with pytest.raises(UserError, match='no device of this fleet is in the network "uk-adsl2plus"'):
        plan_faults([fault("leave", network="uk-adsl2plus")], NETWORKS, 2, 0)


def test_memory_can_only_be_exhausted_under_a_limit() -> None:
    (exhaust,) = plan_faults([fault("exhaust")], NETWORKS, 8, 0)
    assert len(exhaust.pods) == len(exhaust.devices) == 1
    with pytest.raises(UserError, match="only containers of one device have"):
        plan_faults([fault("exhaust")], NETWORKS, 2, 0)


# ---- sending


def test_a_cable_is_pulled_and_plugged_in_again() -> None:
    pods = FakePods()
    injector = Injector(pods, plan_faults([fault("disconnect", pods=1, seconds=2)], NETWORKS, 2, 0))
    drive(pods, injector, 4.0)
    ((away_s, pod, plugged), (back_s, same, again)) = pods.cables
    assert (away_s, back_s, plugged, again) == (1.0, 3.0, False, True)
    assert pod == same
    assert injector.audit()["faults"]["injected"] == 2


def test_a_pod_that_is_to_exhaust_its_memory_is_told_so_and_counts_as_killed() -> None:
    pods = FakePods(deaf=True)
    injector = Injector(pods, [Injection(1.0, "exhaust", (1,), (1,)), Injection(2.0, "leave", (1, 3))])
    drive(pods, injector, 3.0)
    assert [(pod, order["do"]) for _, pod, order in pods.ordered] == [(1, "exhaust")]
    assert not injector.waiting


def test_a_fault_is_sent_to_the_pods_of_its_devices_when_it_is_due() -> None:
    pods = FakePods()
    injector = Injector(pods, [Injection(1.0, "slow", (0, 1, 4), (), {"factor": 4.0})])
    pods.now_s = 0.9
    injector.tick(0.9)
    assert pods.ordered == []
    assert injector.next_s == 1.0
    pods.now_s = 1.25
    injector.tick(1.25)
    assert pods.ordered == [
        (1.25, 0, {"do": "slow", "devices": [0, 2], "number": 0, "factor": 4.0}),
        (1.25, 1, {"do": "slow", "devices": [0], "number": 0, "factor": 4.0}),
    ]
    assert injector.next_s == float("inf")
    told = injector.audit()["faults"]
    assert (told["scheduled"], told["injected"], told["worst_delay_s"]) == (1, 1, pytest.approx(0.25))
    assert told["list"][0]["done"] == 3


def test_every_injection_is_noted_with_the_devices_of_the_fleet() -> None:
    noted: list[dict[str, Any]] = []
    pods = FakePods(late_s=0.125)
    faults = [Injection(1.0, "leave", (1, 3)), Injection(2.0, "kill", (0, 2, 4, 6), (0,))]
    drive(pods, Injector(pods, faults, note=lambda event, **fields: noted.append({"event": event, **fields})), 3.0)
    assert [(n["do"], n["devices"], n["run_s"], n["scheduled_s"]) for n in noted] == [
        ("leave", [1, 3], 1.125, 1.0),
        ("kill", [0, 2, 4, 6], 2.0, 2.0),
    ]
    assert pods.killed == [0]


def test_a_stopped_pod_resumes_after_its_time_and_both_are_in_the_audit() -> None:
    plan = plan_faults([fault("stop", "1 s", pods=2, seconds=3.0), fault("kill", "2 s")], NETWORKS, 2, 0)
    pods = FakePods()
    injector = Injector(pods, plan)
    drive(pods, injector, 5.0)
    (killed,) = pods.killed
    assert pods.paused == [(1.0, 0), (1.0, 1)]
    assert pods.resumed == [(4.0, 1 - killed)]
    listed = injector.audit()["faults"]["list"]
    assert [(entry["do"], entry["asked"], entry["done"]) for entry in listed] == [
        ("stop", 2, 2),
        ("kill", 1, 1),
        ("continue", 2, 1),
    ]


def test_a_killed_pod_gets_no_more_orders_and_the_audit_names_the_devices_left_out() -> None:
    pods = FakePods()
    faults = [Injection(1.0, "kill", (0, 2), (0,)), Injection(2.0, "lie", (0, 1), (), {"how": "zeros"})]
    injector = Injector(pods, faults)
    drive(pods, injector, 3.0)
    assert [pod for _, pod, _ in pods.ordered] == [1]
    assert not injector.waiting
    assert [(e["asked"], e["done"]) for e in injector.audit()["faults"]["list"]] == [(1, 1), (2, 1)]


def test_a_fault_not_carried_out_or_due_after_the_run_does_not_count_as_injected() -> None:
    pods = FakePods(deaf=True)
    injector = Injector(pods, [Injection(1.0, "leave", (1,)), Injection(50.0, "leave", (2,))])
    drive(pods, injector, 3.0)
    assert injector.waiting
    told = injector.audit()
    assert (told["faults"]["injected"], told["faults"]["scheduled"], told["faults"]["after_the_end"]) == (0, 1, 1)
    assert "0 of 1 faults injected, 1 due after the end" in describe(told)


def test_churn_is_sent_as_scheduled_and_the_audit_is_complete() -> None:
    schedule = Schedule.from_trace(poisson_churn(8, 0.2, 3.0, 60.0, seed=3), 8)
    pods = FakePods()
    injector = Injector(pods, schedule=schedule, how="vanish")
    drive(pods, injector, 90.0)  # the trace begins again after 60
    told = injector.audit()["churn"]
    assert told["complete"]
    assert told["scheduled"] == len(schedule.until(90.0)) > 20
    assert 0 < told["worst_delay_s"] <= 0.5 + 1e-6
    assert {order["do"] for _, _, order in pods.ordered} == {"vanish", "return"}
    there = schedule.present.copy()
    for _, pod, order in pods.ordered:
        for index in order["devices"]:
            device = pods.device(pod, index)
            assert there[device] != (order["do"] == "return")  # no device leaves or returns twice
            there[device] = order["do"] == "return"
    np.testing.assert_array_equal(there, schedule.present_at(90.0))


def test_churn_that_did_not_happen_is_missing_in_the_audit() -> None:
    schedule = Schedule.from_trace(poisson_churn(8, 0.2, 3.0, 60.0, seed=3), 8)
    pods = FakePods(deaf=True)
    injector = Injector(pods, schedule=schedule)
    drive(pods, injector, 20.0)
    told = injector.audit()
    assert len(told["churn"]["missing"]) == told["churn"]["scheduled"] > 0
    assert describe(told).startswith(f"0 of {told['churn']['scheduled']} departures")


def test_a_run_without_faults_has_nothing_to_audit() -> None:
    injector = Injector(FakePods())
    assert injector.audit() == {}
    assert describe({}) == ""


def test_an_error_while_injecting_is_raised(until: Until) -> None:
    class Broken(FakePods):
        def exchange(self, wait_s: float = 0.0) -> list[tuple[int, dict[str, Any]]]:
            raise OSError("the pipe burst")

    injector = Injector(Broken(), [Injection(0.0, "leave", (1,))])
    with pytest.raises(OSError, match="the pipe burst"), injecting(injector):
        until(lambda: injector.error is not None, "the error is noticed")


# ---- churn of a scenario


def test_poisson_churn_has_the_departure_rate_of_the_scenario() -> None:
    churn = Churn(kind="poisson", leave_per_minute="30%", mean_away="20 s")
    schedule = churn_schedule(churn, 200, seed=1)
    leaves = sum(event.what == "leave" for event in schedule.until(600.0))
    share_there = (1 / 0.005) / (1 / 0.005 + 20)
    assert leaves == pytest.approx(200 * share_there * 0.005 * 600, rel=0.15)


def test_a_trace_is_read_and_sped_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("device,start_s,end_s\na,0,50\nb,0,100\na,80,100\n", encoding="utf-8")
    schedule = churn_schedule(Churn(trace=str(path), speed_up=10.0), 2, seed=0)
    assert [(e.at_s, e.what) for e in schedule.events] == [(5.0, "leave"), (8.0, "join")]


@pytest.mark.parametrize("kind", ["flash", "seti"])
def test_published_sessions_are_available_by_name(kind: Any) -> None:
    assert churn_schedule(Churn(kind=kind, speed_up=600.0), 100, seed=1).events


def test_a_fleet_with_no_device_at_the_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("device,start_s,end_s\na,0,50\nb,0,20\na,80,100\n", encoding="utf-8")
    with pytest.raises(UserError, match="none of the 2 devices is there when the run begins"):
        churn_schedule(Churn(trace=str(path), offset="60 s"), 2, seed=0)
