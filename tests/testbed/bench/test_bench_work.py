"""The benchmark's work has the announced size; its yardsticks compute it and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from testbed.bench.ours import plan_over
from testbed.bench.yardsticks import peers
from testbed.bench.yardsticks.raw import RawWorkers, numpy_in_process, raw_zmq
from testbed.bench.yardsticks.work import W1, W2, Work, round_of

UNEVEN = Work("uneven", m=70, n=48, q=50, block_rows=32, block_columns=16)


@pytest.mark.parametrize("work", [W1, W2, round_of(1000), round_of(7), UNEVEN], ids=lambda work: work.name)
def test_rectangles_cover_every_cell_exactly_once(work: Work) -> None:
    written = np.zeros((work.m, work.q), dtype=np.int32)
    rectangles = work.rectangles()
    for row, rows, column, columns in rectangles:
        assert 0 < rows <= work.block_rows
        assert 0 < columns <= work.block_columns
        written[row : row + rows, column : column + columns] += 1
    assert rectangles.shape == (work.blocks, 4)
    assert (written == 1).all()


@pytest.mark.parametrize("work", [W1, W2, round_of(7), UNEVEN], ids=lambda work: work.name)
@pytest.mark.parametrize("devices", [1, 3, 7])
def test_our_plan_covers_the_work_and_gives_every_block_to_a_device(work: Work, devices: int) -> None:
    plan = plan_over(work, devices)
    written = np.zeros((work.m, work.q), dtype=np.int32)
    for batch, batches, row, rows, column, columns in plan.boxes.tolist():
        assert (batch, batches) == (0, 1)
        written[row : row + rows, column : column + columns] += 1
    assert (written == 1).all()
    assert plan.device.shape == (work.blocks,)
    assert set(plan.device.tolist()) == set(range(min(devices, work.blocks)))
    for side, axis in enumerate((2, 4)):  # each device downloads each of its slabs once, as in a plan of a run
        slabs = list(zip(plan.device.tolist(), plan.boxes[:, axis].tolist(), strict=True))
        downloaded = [slab for slab, fresh in zip(slabs, plan.fresh[:, side].tolist(), strict=True) if fresh]
        assert sorted(downloaded) == sorted(set(slabs))


def test_the_works_have_the_announced_sizes() -> None:
    assert (W1.blocks, 4 * W1.n * W1.block_rows) == (16, 8 * 2**20)
    assert (W2.blocks, 4 * W2.n * W2.block_rows) == (1024, 64 * 2**10)
    assert W1.flops == 2 * 1024 * 4096 * 4096


@pytest.mark.parametrize(("devices", "grid"), [(1, (1, 1)), (7, (1, 7)), (1000, (25, 40)), (4000, (50, 80))])
def test_a_round_has_one_small_block_for_each_device(devices: int, grid: tuple[int, int]) -> None:
    work = round_of(devices)
    assert work.blocks == devices
    assert (work.m, work.n, work.q) == (32 * grid[0], 512, 32 * grid[1])


def test_a_round_without_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 device, got 0"):
        round_of(0)


def test_a_work_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="'empty'"):
        Work("empty", m=0, n=1, q=1, block_rows=1, block_columns=1)


def test_operands_follow_the_seed() -> None:
    a, b = UNEVEN.operands(seed=3)
    again_a, again_b = UNEVEN.operands(seed=3)
    other_a, _ = UNEVEN.operands(seed=4)
    assert (a.shape, b.shape) == ((70, 48), (48, 50))
    assert a.dtype == b.dtype == np.dtype(np.float32)
    np.testing.assert_array_equal(a, again_a)
    np.testing.assert_array_equal(b, again_b)
    assert not np.array_equal(a, other_a)


@pytest.mark.parametrize("slab_once", [True, False])
def test_raw_workers_assemble_one_product_after_another(slab_once: bool) -> None:
    with RawWorkers() as workers:
        for seed in range(3):  # new operands each time: a slab kept from the previous product would show
            a, b = UNEVEN.operands(seed)
            np.testing.assert_allclose(workers.multiply(UNEVEN, a, b, slab_once=slab_once), a @ b, atol=1e-4)
        pids = workers.pids
    assert len(pids) == 2
    assert not any(_is_alive(pid) for pid in pids)


def test_raw_workers_die_with_their_parent() -> None:
    program = (
        "import sys, time\n"
        "from testbed.bench.yardsticks.raw import RawWorkers\n"
        "with RawWorkers() as workers:\n"
        "    print(workers.pids, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    with parent.stdout:
        pids = json.loads(parent.stdout.readline())
        parent.kill()
        parent.wait()
    assert _all_end(pids, within_s=10)


def test_a_dead_raw_worker_is_an_error_that_names_it() -> None:
    a, b = W2.operands()
    with RawWorkers() as workers:
        victim = workers.pids[0]
        os.kill(victim, signal.SIGKILL)
        assert _all_end([victim], within_s=10)
        with pytest.raises(RuntimeError, match=f"worker {victim} ended with code -9"):
            workers.multiply(W2, a, b)


def test_yardsticks_give_seconds() -> None:
    assert 0 < raw_zmq(UNEVEN, repeats=1) < 10
    assert 0 < numpy_in_process(UNEVEN, threads=1, repeats=1) < 10


def test_a_peer_that_cannot_be_installed_is_reported_with_the_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "a file where the environment should be"
    blocked.write_text("")
    lines: list[str] = []
    results = peers.run_peers(blocked, progress=lines.append)
    assert set(results) == {"ray", "dask"}
    assert all(result["status"] == "not installed" and result["reason"] for result in results.values())
    assert any("ray: not installed" in line for line in lines)


def _peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> dict[str, object]:
    """The report on a peer whose script is this program, run by the tests' interpreter."""
    script = tmp_path / "peer.py"
    script.write_text(program)
    monkeypatch.setattr(peers, "_install", lambda *_: Path(sys.executable))
    peer = peers.Peer("stand-in", script, (), "", "")
    return peers.run_peers(tmp_path, peers=(peer,))["stand-in"]


def test_a_peer_that_fails_is_reported_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _peer(tmp_path, monkeypatch, "raise SystemExit('no luck today')")
    assert report["status"] == "failed"
    assert "no luck today" in str(report["reason"])


@pytest.mark.slow
def test_a_peer_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RUN_LIMIT_S", 1)
    monkeypatch.setattr(peers, "GRACE_S", 0.5)
    pids = tmp_path / "pids"
    program = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pids)!r}).write_text(f'[{{os.getpid()}}, {{child.pid}}]')\n"
        "time.sleep(60)\n"
    )
    report = _peer(tmp_path, monkeypatch, program)
    assert report["status"] == "failed"
    assert "not finished" in str(report["reason"])
    assert _all_end(json.loads(pids.read_text()), within_s=10)


def test_a_peer_is_reported_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _peer(tmp_path, monkeypatch, 'print(\'a banner\')\nprint(\'{"works": {"W1": {"seconds": 2.5}}}\')')
    assert report == {"status": "ok", "works": {"W1": {"seconds": 2.5}}}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # a zombie that has not been reaped yet has ended too
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def _all_end(pids: list[int], within_s: float) -> bool:
    limit_s = time.monotonic() + within_s
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.01)
    return True
