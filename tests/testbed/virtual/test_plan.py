"""Promises of `cleave plan`: anyone can recompute its figures from its JSON and its boxes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import pytest
from small_runs import RUN_LIMIT_S

from agent.protocol.errors import UserError
from ps.graph.models import model_config
from ps.graph.products import step_products
from ps.planning.plans import Shape
from testbed.virtual.plan import fleet_profiles, plan_product

if TYPE_CHECKING:
    from conftest import Start


def cleave(start: Start, *arguments: str) -> CompletedProcess[str]:
    return start("cleave", "plan", *arguments).completed(RUN_LIMIT_S)


@pytest.fixture(scope="module")
def planned(
    start_warm_module: Start, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, int]]]:
    path = tmp_path_factory.mktemp("plan") / "boxes.jsonl"
    fleet = ["--fleet", "quickstart", "--devices", "50"]
    arguments = ["--model", "opt-tiny", *fleet, "--batch", "4", "--seq", "32", "--format", "json", "--tiles"]
    done = cleave(start_warm_module, *arguments, str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_makespan_follows_from_the_boxes(planned: tuple[dict[str, Any], list[dict[str, int]]]) -> None:
    report, boxes = planned
    for index, product in enumerate(report["products"]):
        sides: defaultdict[int, int] = defaultdict(int)
        cells: defaultdict[int, int] = defaultdict(int)
        for t in boxes:
            if t["gemm"] == index:
                sides[t["device"]] += t["rows"] + t["columns"]
                cells[t["device"]] += t["rows"] * t["columns"]
        worst = 0.0
        for device in sides:
            d, bits = report["fleet"][device], 8 * product["bytes_per_value"]
            down_s = sides[device] * product["n"] * bits / d["down_bps"]
            up_s = cells[device] * bits / d["up_bps"]
            compute_s = 2 * cells[device] * product["n"] / d["flops"]
            worst = max(worst, d["latency_s"] + max(down_s, compute_s, up_s))
        assert product["makespan_s"] == pytest.approx(worst, rel=1e-9)
        assert product["makespan_s"] >= product["lower_bound_s"] * (1 - 1e-4)
        assert sum(cells.values()) == product["batch"] * product["m"] * product["q"]


@pytest.mark.slow
def test_the_batch_is_the_sum_of_its_products(planned: tuple[dict[str, Any], list[dict[str, int]]]) -> None:
    report, _ = planned
    total = sum(p["count"] * p["makespan_s"] for p in report["products"])
    assert report["batch_s"] == pytest.approx(total)


@pytest.mark.slow
def test_a_llama_layer_has_27_products_and_the_flops_of_the_formula() -> None:
    config = model_config("llama2-7b")
    config.num_hidden_layers = 3  # of 32 alike: each takes half a second to capture
    products = step_products(config, batch=1, sequence=64)
    assert sum(products.values()) == 27 * config.num_hidden_layers + 3  # plus the head, three times
    weights = 3 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    dense = sum(s.flops * n for s, n in products.items() if s.batch == 1 and s.inner > 1)
    assert dense == 6 * weights * 64


def test_with_a_slow_server_the_plan_sends_less_and_never_beats_its_line() -> None:
    shape, profiles = Shape(1, 8192, 4096, 8192), fleet_profiles("paper", 512, seed=0)
    free = plan_product(shape, 1, profiles, 2, None)
    for server_bps in (1e9, 1e10, 1e11):
        bound = plan_product(shape, 1, profiles, 2, server_bps)
        assert bound.makespan_s >= 8 * max(bound.bytes_down, bound.bytes_up) / server_bps
        assert bound.makespan_s >= bound.bound_s >= free.bound_s
    slow = plan_product(shape, 1, profiles, 2, 1e9)
    assert slow.limit == "server"
    assert slow.bytes_down < free.bytes_down / 2
    assert slow.devices < free.devices


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "opt-13"], "opt-13b"),
        (["--model", "opt-tiny", "--fleet", "papr"], "paper, moderate, extreme"),
        (["--model", "opt-tiny", "--devices", "0"], "at least 1"),
        (["--model", "opt-tiny", "--ps-rate", "-3 Gbit"], "-3 Gbit"),
        (["--model", "opt-tiny", "--seq", "0"], "--seq is 0"),
        (["--model", "opt-tiny", "--format", "xml"], "table or json"),
    ],
)
def test_a_mistake_gets_one_line(start_light: Start, arguments: list[str], told: str) -> None:
    done = cleave(start_light, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_product_that_no_device_can_hold_is_a_clear_error() -> None:
    profiles = fleet_profiles("paper", 3, seed=0)
    profiles["memory_bytes"] = 0
    with pytest.raises(UserError, match="none of 3 devices can hold even one cell"):
        plan_product(Shape(1, 4, 4, 4), 1, profiles, 2, None)


@pytest.mark.slow
def test_tiles_that_cannot_be_written_are_a_clear_error(start_warm: Start, tmp_path: Path) -> None:
    done = cleave(
        start_warm, "--model", "opt-tiny", "--devices", "3", "--seq", "8", "--tiles", str(tmp_path / "no" / "where")
    )
    assert done.returncode == 2
    assert "cannot write the boxes" in done.stderr
