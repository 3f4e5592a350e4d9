"""Promises of emulator.containers.throttle: computing has a thread of its own, which can be found and limited, and
nothing else is limited. `test_containers.py` checks it on an engine; here are control groups of version 2, on user-mode
Linux."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import netem_kernel
import numpy as np
import pytest
from places import ROOT

from agent.compute.kernels import Array, NumpyKernel
from emulator.containers.throttle import ComputeThread, ThrottleError, container_group, thread_of


class Thread:
    name = "thread"

    def product(self, left: Array, right: Array) -> Array:
        import threading

        return np.array([threading.get_native_id()], np.float32)


class Broken:
    name = "broken"

    def product(self, left: Array, right: Array) -> Array:
        raise MemoryError("no room for the product")


def test_products_and_errors_of_the_kernel_reach_the_caller() -> None:
    left, right = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 4), np.float32)
    kernel = ComputeThread(NumpyKernel())
    assert (kernel.product(left, right) == left @ right).all()
    broken = ComputeThread(Broken())
    for _ in range(2):  # the thread survives
        with pytest.raises(MemoryError, match="no room for the product"):
            broken.product(left, right)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are found in Linux's /proc")
def test_the_thread_that_computes_is_found_by_its_name(tmp_path: Path) -> None:
    task = tmp_path / "7" / "task" / "8"
    task.mkdir(parents=True)
    (task / "comm").write_text("python3\n")
    (task.parent / "9").mkdir()  # a thread that has ended
    assert thread_of(7, tmp_path) is None
    kernel, nothing = ComputeThread(Thread()), np.zeros((1, 1), np.float32)
    names = [Path(f"/proc/self/task/{int(kernel.product(nothing, nothing)[0])}/comm").read_text()]
    assert names == ["cleave-kernel\n"]
    assert thread_of(os.getpid()) is not None


def test_a_containers_group_is_found_in_both_versions(tmp_path: Path) -> None:
    (tmp_path / "cpu,cpuacct").mkdir()
    first = "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/docker/1\n0::/system.slice\n"
    assert container_group(first, tmp_path) == (tmp_path / "cpu,cpuacct/docker/1", False)
    alone = "5:cpuset:/\n4:cpu:/docker/1\n0::/\n"
    assert container_group(alone, tmp_path) == (tmp_path / "cpu/docker/1", False)
    second = "0::/system.slice/docker-1.scope\n"
    assert container_group(second, tmp_path) == (tmp_path / "system.slice/docker-1.scope", True)
    with pytest.raises(ThrottleError, match="no control group of processor time"):
        container_group("5:memory:/docker/1\n", tmp_path)


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.root("control groups")
def test_version_2_limits_the_computing_thread_and_nothing_else() -> None:
    if (why := netem_kernel.why_not()) is not None:
        pytest.skip(why)
    done = netem_kernel.run([sys.executable, "tests/helpers/throttle_inside.py", "1000", "20000"], ROOT)
    assert done.returncode == 0, done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["threads"] == 1
    assert told["computes"] < 1.2 * 0.05
    assert told["others"] > 0.25  # alone on that kernel's only processor, however busy this machine is
