"""`python -m agent measure` as a real process, the link to a real server, and `cleave twin` on its measurements."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from made_profile import profile, written
from processes import line_to

from agent.measure import command as measure
from agent.measure.about import cpu_quota as own_quota
from agent.measure.link import ROUND_TRIPS
from agent.protocol.errors import UserError
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.calibration import calibrate
from emulator.model.fleet import Fleet
from emulator.model.performance import Models, Performance
from emulator.model.samples import read_samples
from ps.transport.server import Server
from testbed.launch.processes import Pods
from testbed.twins import message_cost, quota, twin, twin_blocks
from testbed.twins.anchor import Now, products
from testbed.twins.message_cost import message_seconds_now, processor_seconds

if TYPE_CHECKING:
    from conftest import Serve, Start

LIMIT_S = 90.0


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@pytest.mark.slow
def test_a_quick_measurement_gives_a_complete_profile_with_the_link(start: Start, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "me.json"
    program = start("agent", "measure", "--quick", "--out", str(path), "--name", "me", "--ps", serve().address)
    assert program.wait(LIMIT_S) == 0, program.output
    assert any("s left" in line for line in program.errors)
    samples = read_samples(path)
    assert samples.complete
    assert samples.name == "me"
    assert "numpy" in samples.kernels
    assert {(s.kernel, s.shape) for s in samples.samples} == {
        (kernel, shape) for kernel in range(len(samples.kernels)) for shape in range(24)
    }
    assert {"python", "numpy"} <= set(samples.versions)
    assert samples.link is not None
    assert min(samples.link["round_trip_s"]) > 0
    assert len(samples.link["round_trip_s"]) == 2 * ROUND_TRIPS  # before and after the products
    for size, seconds, processor_s in samples.link["down"] + samples.link["up"]:
        assert size >= 1 << 14
        assert min(seconds, processor_s) > 0
    assert list(tmp_path.iterdir()) == [path]
    assert calibrate(samples).median_error > 0


@pytest.mark.slow
def test_a_server_that_is_gone_at_the_end_loses_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {"round_trip_s": [1e-3], "down": [[1 << 14, 1e-3, 1e-4]], "up": [[1 << 14, 1e-3, 1e-4]]}
    answers = iter([link])

    def measured(*of: Any) -> dict[str, Any]:
        if (answer := next(answers, None)) is None:
            raise UserError("no server answers")
        return answer

    monkeypatch.setattr("agent.measure.link.measure_link", measured)
    parser = argparse.ArgumentParser()
    measure.add_options(parser)
    path = tmp_path / "me.json"
    options = ["--quick", "--sustained", "0", "--shapes", "4", "--out", str(path), "--ps", "tcp://127.0.0.1:9"]
    assert measure.run(parser.parse_args(options)) == 0
    assert "only known as it was at the beginning: no server answers" in capsys.readouterr().err
    document = read(path)
    assert document["complete"]
    assert document["link"] == link
    assert document["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_is_written_and_marked_incomplete(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "me.json"
    program = start("agent", "measure", "--out", str(path), "--rounds", "1000", "--shapes", "30", "--sustained", "0")
    program.expect("round 1 of 1000")
    program.signal(number)
    assert program.wait(LIMIT_S) == 130, program.output
    samples = read_samples(path)
    assert not samples.complete
    assert samples.samples
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ps", "nonsense"], "--ps"),
        (["--memory", "lots"], "lots"),
        (["--out", "/nowhere/at/all.json"], "/nowhere"),
        (["--threads", "0"], "positive"),
        (["--sustained", "-1"], "between 0 and 3600"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    start: Start, tmp_path: Path, options: list[str], said: str
) -> None:
    program = start("agent", "measure", *options)
    assert program.wait() == 2
    assert said in program.errors[-1]


def test_a_probe_for_gigabytes_is_refused(serve: Serve) -> None:
    """A probe beyond the limit gets a refusal, and costs the server nothing."""
    import zmq

    from agent.protocol.wire import MAX_PROBE_BYTES, Probe, Refused, decode, encode

    server = serve()
    for wanted, kind in ((MAX_PROBE_BYTES + 1, Refused), (1000, Probe)):
        with zmq.Context() as context, line_to(server, context) as socket:
            socket.send_multipart(encode(Probe(7, wanted, b"")))
            assert socket.poll(10_000)
            answer = decode(socket.recv_multipart(copy=False))
            assert isinstance(answer, kind)
    assert isinstance(answer, Probe)
    assert (answer.token, len(answer.data)) == (7, 1000)


# ---- CPU quotas


@pytest.fixture
def quotas() -> None:
    try:
        with quota.cpu_quota(5000, 10000):
            pass
    except Exception as error:
        pytest.skip(f"no CPU quota can be set here: {error}")


@pytest.mark.root("CPU quotas")
@pytest.mark.usefixtures("quotas")
def test_a_quota_holds_is_seen_from_inside_and_leaves_nothing_behind() -> None:
    with quota.cpu_quota(2500, 10000) as group:
        code = "from agent.measure.about import cpu_quota; input(); print(cpu_quota())"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        quota.enter(group, process.pid)
        said, _ = process.communicate("\n", timeout=30)
        assert said.strip() == "{'quota_us': 2500, 'period_us': 10000}"
        assert own_quota() != {"quota_us": 2500, "period_us": 10000}
    assert not group.exists()


def test_a_quota_that_the_kernel_would_not_apply_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"), quota.cpu_quota(10):
        pass


# ---- twins


@pytest.mark.slow
def test_a_twin_gets_the_blocks_of_the_real_device(start_light: Start, tmp_path: Path) -> None:
    """Of a made profile, since these promises do not depend on its figures."""
    path = written(tmp_path, profile(24, 1))
    program = start_light(
        "cleave", "twin", str(path), str(path), "--steps", "2", "--step-s", "0.05", "--format", "json"
    )
    assert program.wait(LIMIT_S) == 0, program.output
    found = json.loads(next(line for line in program.said if line.startswith("{")))
    assert found["real"]["device"] == found["twin"]["device"]
    assert sorted(set(found["real"]["device"])) == [0, 1]
    assert len(found["real"]["block_s"]) == 2 * 2 * twin_blocks.BLOCKS
    for side in ("real", "twin"):
        assert len(found[side]["step_s"]) == 2
        assert min(found[side]["compute_s"]) > 0
    for compared in ("compared", "compared_without_drift"):
        assert {row["what"] for row in found[compared]} >= {"mean step", "block, computing, p50"}
    assert all(now["products"] > 0 and now["message_s"] is None for now in found["now"])  # no quota, no such cost


@pytest.mark.slow
@pytest.mark.root("CPU quotas")
@pytest.mark.usefixtures("quotas")
def test_a_twin_with_a_quota_is_told_its_agents_cost_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output also reports the host's drift since the profile was measured."""
    from rich.console import Console

    document = profile(24, 1)
    document["device"]["cpu_quota"] = {"quota_us": 5000, "period_us": 10000}
    document["rounds"] = [[2.0, 1.0]]
    for name, less in (("ROWS", 50), ("TRIES", 0), ("PAIRS", 1)):
        monkeypatch.setattr(message_cost, name, less)
    samples = read_samples(written(tmp_path, document))
    device = twin_blocks.TwinDevice(samples, calibrate(samples))
    said: list[str] = []
    found = twin.compare([device], 1, 0.02, 0, said.append)
    assert found.now[0].message_s is not None
    assert max(found.now[0].message_s) > 0
    told = next(line for line in said if "host drift since the profile" in line)
    assert "messages" in told
    console = Console(width=200, record=True, file=io.StringIO())
    twin.print_rows(console, found)
    assert "error without drift" in console.export_text()


def test_corrections_of_a_twin_change_products_and_messages_and_nothing_else() -> None:
    model = Performance(0.001, 1e-9, right_s=1e-9, down_s=1e-8, up_s=1e-8, run_s=0.004, pause_s=0.006, rested=0.9)
    shape = np.array([[1, 20, 50, 30]])
    slower = Now(1.1, (2e-9, 3e-9)).applied(model, 4.0)
    assert slower.seconds(shape) == pytest.approx(1.1 * model.seconds(shape))
    assert (slower.down_s, slower.up_s) == pytest.approx((8e-9, 1.2e-8))
    kept = ("run_s", "pause_s", "rested", "spread", "shapes")
    assert [getattr(slower, name) for name in kept] == [getattr(model, name) for name in kept]
    assert Now().applied(model, 4.0) == model


def test_the_cost_of_messages_is_the_time_that_products_do_not_explain() -> None:
    rng = np.random.default_rng(0)
    moved = rng.uniform(1e6, 2e6, (9, 2, 2)) * np.array([[30.0, 1.0], [1.0, 30.0]])
    products_s = rng.uniform(0.001, 0.01, (9, 2))
    used_s = products_s + moved @ np.array([7e-10, 4e-10])
    used_s[0] *= 10  # an outlier: another process ran then
    assert message_seconds_now(used_s, products_s, moved) == pytest.approx((7e-10, 4e-10))
    assert message_seconds_now(products_s / 2, products_s, moved) == (0.0, 0.0)


def test_the_processor_time_of_a_process_matches_its_own_clock() -> None:
    before_s, found_s, after_s = time.process_time(), processor_seconds(os.getpid()), time.process_time()
    assert before_s <= found_s <= after_s


@pytest.mark.slow
def test_reference_products_are_block_like_shapes_of_the_profile(tmp_path: Path) -> None:
    found = calibrate(read_samples(written(tmp_path, profile(60, 1))))
    batch, rows, _, columns = found.shapes[products(found)].T
    assert len(batch) == 6
    assert batch.max() == 1
    assert min(rows.min(), columns.min()) >= 64


@pytest.mark.root("CPU quotas")
@pytest.mark.usefixtures("quotas")
def test_a_process_with_priority_leaves_no_control_group_behind() -> None:
    def groups(process: int) -> list[Path]:
        return [path for root in (quota.ROOT, quota.ROOT / "cpu") for path in root.glob(f"cleave-{process}-*")]

    process = os.fork()
    if process == 0:  # a lower nice value cannot be undone
        with quota.served_first():
            there = bool(groups(os.getpid()))
        os._exit(0 if there else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert not groups(process)


def test_a_pod_computes_for_as_long_as_the_model_says(serve: Serve) -> None:
    model = Performance(0.001, 1e-9, right_s=1e-9, tile_rows=6, tile_columns=16)
    profiles = pack_profiles([Profile(1e9, 0.0, 1e9, 1e9, 0.0, 1 << 30, twin.CREDIT)] * 3)
    of = np.array([0, -1, 0])
    fleet = Fleet(profiles, ["d"] * 3, ["n"] * 3, {}, models=Models((model,), of, ((0, 0), (0, 1), (0, 2))))
    boxes = np.array([[0, 1, 0, 20, 0, 30], [0, 1, 20, 40, 0, 30], [0, 1, 60, 7, 0, 30]])
    server: Server = serve()
    with Pods(fleet, 2, server.address, "model", pod_pass=server.pod_pass):
        assert server.wait_for_devices(3, 30)
        order = [int(label.rsplit("/", 1)[1]) for label in server.labels]
        parts = [[twin_blocks.Part(67, 50, 30, boxes, np.arange(3))]] * (twin.TRIES + 2)
        side = twin.drive(server, parts, 0, order)
        server.stop()
    expected = np.array([model.seconds(np.array([[1, rows, 50, 30]]))[0] for rows in (20, 40, 7)])
    expected[1] = 2 * 40 * 50 * 30 / 1e9
    assert side.device.tolist() == [0, 1, 2] * 2
    assert side.compute_s == pytest.approx(np.tile(expected, 2), rel=1e-5)


def test_too_few_cores_are_refused(tmp_path: Path) -> None:
    document = profile(24, 1)
    document["device"]["threads"] = 10_000
    with pytest.raises(ValueError, match=f"this machine has {os.cpu_count()}"):
        twin.check([read_samples(written(tmp_path, document))])
