"""Promises of testbed.results.report: a trace that viewers can draw, a page that needs nothing and trusts no input."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from numpy.typing import NDArray
from rich.console import Console

from emulator.model.fidelity import judge
from testbed.results import report
from testbed.results.charts import element, histogram, line_chart, ticks
from testbed.results.files import Summary, print_summary, write_blocks, write_json, write_steps
from testbed.results.report import TRACE_DEVICES, TRACE_EVENTS, ReportError, write_report, write_trace

HOSTILE = "</td><script>alert('x')</script>&\"<svg onload=1>"
VOID_TAGS = {"meta"}


def make_blocks(count: int, devices: int, seed: int = 0, at_once: int = 4) -> dict[str, NDArray[Any]]:
    """Blocks of `devices` devices, up to about `at_once` of them in flight on each."""
    rng = np.random.default_rng(seed)
    sent_s = np.sort(rng.uniform(0, 10, count))
    took_s = rng.exponential(at_once * 10 * devices / count / 2, count) + 1e-4
    job = (sent_s * 20).astype(np.int64)
    whole = {name: rng.integers(1, 200, count).astype(np.int32) for name in ("rows", "columns", "inner")}
    order = np.argsort(sent_s + took_s)  # the file is in order of arrival
    columns = {
        "step": (1 + job // 40).astype(np.int32),
        "product": np.array([f"forward/mm_{j % 40}" for j in job.tolist()]),
        "job": job,
        "block": np.arange(count, dtype=np.int32),
        "device": rng.integers(0, devices, count).astype(np.int32),
        "batch": np.zeros(count, np.int32),
        "batches": np.ones(count, np.int32),
        "row": np.zeros(count, np.int32),
        "column": np.zeros(count, np.int32),
        **whole,
        "sent_s": sent_s,
        "due_s": sent_s + took_s * rng.uniform(0.7, 1.0, count),
        "received_s": sent_s + took_s,
        "compute_s": took_s / 3,
    }
    return {name: values[order] for name, values in columns.items()}


def make_run(
    folder: Path,
    blocks: dict[str, NDArray[Any]],
    labels: list[str],
    losses: list[float] | None = None,
    **changes: Any,
) -> Path:
    losses = losses if losses is not None else [5.5, 5.1, 4.9, 4.8]
    reference = [loss + 1e-6 for loss in losses]
    summary = Summary(
        links="modelled",
        name="synthetic",
        model="opt-tiny",
        parameters=691_968,
        seed=1,
        clock={"kind": "wall"},
        devices=len(labels),
        pods=2,
        joined_s=0.2,
        steps=len(losses),
        losses=losses,
        reference_losses=reference,
        loss_max_abs_diff=1e-6,
        weights_max_abs_diff=1e-5,
        step_s={"p50": 0.4, "p95": 0.5},
        predicted_step_s=0.32,
        first_step_s=0.6,
        products_per_step=51,
        flops_done=1000,
        flops_reference=1000,
        blocks=len(blocks.get("sent_s", [])),
        devices_used=1,
        bytes_down=12_500_000,
        bytes_up=5_000_000,
        socket_bytes_down=1,
        lost_devices=0,
        real_devices={},
        basis={"estimate": len(labels)},
        memory_bytes=600_000_000,
        total_s=9.5,
        training_host_s=1.7,
        fidelity={"stretch": 1.01},
        verdict="VALID",
    )
    write_json(folder / "summary.json", asdict(summary) | changes)
    rows = [
        {"step": i, "loss": a, "seconds": 0.4, "devices": 5, "blocks": 9, "bytes_down": 100, "reference_loss": b}
        for i, (a, b) in enumerate(zip(losses, reference, strict=True), start=1)
    ]
    write_steps(folder / "steps.csv", rows)
    real = np.unique(blocks["device"][np.isnan(blocks["due_s"])]).tolist() if blocks else []
    write_blocks(folder / "blocks.parquet", blocks, labels, real)
    return folder


def names(count: int) -> list[str]:
    return [f"pixel-8/uk-ftth/{i}" for i in range(count)]


def trace_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    document = json.loads(write_trace(folder).read_text(encoding="utf-8"))
    return document["traceEvents"], document["otherData"]


class Page(HTMLParser):
    """Parses a page, checks that its tags balance, keeps its text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# ---- trace.json


def test_a_small_run_is_completely_in_the_trace(tmp_path: Path) -> None:
    blocks = make_blocks(300, 7)
    events, about = trace_of(make_run(tmp_path, blocks, names(7)))
    slices = [e for e in events if e["ph"] == "X" and "block" in e.get("args", {})]
    assert about["left_out"] == {"blocks": 0, "devices": 0, "products": 0, "steps": 0}
    assert len(slices) == 300
    by_block = {e["args"]["block"]: e for e in slices}
    for row in range(300):
        event = by_block[int(blocks["block"][row])]
        assert event["name"] == blocks["product"][row]
        assert event["args"]["step"] == blocks["step"][row]
        assert event["ts"] == pytest.approx(1e6 * blocks["sent_s"][row], abs=0.01)
        assert event["ts"] + event["dur"] == pytest.approx(1e6 * blocks["received_s"][row], abs=0.01)


def test_a_device_has_its_name_on_its_track_and_extra_tracks_only_for_overlaps(tmp_path: Path) -> None:
    blocks = make_blocks(40, 3, at_once=1)
    blocks["sent_s"], blocks["received_s"] = np.arange(40.0), np.arange(40.0) + 0.5
    events, _ = trace_of(make_run(tmp_path, blocks, names(3)))
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert sorted(tracks) == names(3)

    blocks["received_s"][blocks["device"] == 0] += 100
    events, _ = trace_of(make_run(tmp_path, blocks, names(3)))
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert f"{names(1)[0]}, overlapping 2" in tracks
    assert f"{names(2)[1]}, overlapping 2" not in tracks


@pytest.mark.parametrize("at_once", [1, 4, 40])
def test_slices_of_a_track_never_overlap(tmp_path: Path, at_once: int) -> None:
    events, _ = trace_of(make_run(tmp_path, make_blocks(2000, 9, seed=at_once, at_once=at_once), names(9)))
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert tracks
    for spans in tracks.values():
        spans.sort()
        assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in pairwise(spans))


def test_the_counter_counts_the_blocks_in_flight(tmp_path: Path) -> None:
    blocks = make_blocks(500, 5)
    events, _ = trace_of(make_run(tmp_path, blocks, names(5)))
    counter = [(e["ts"] / 1e6, e["args"]["blocks"]) for e in events if e["ph"] == "C"]
    assert counter[-1][1] == 0
    for at_s, count in counter[::37]:
        middle_s = at_s + 1e-8  # just after the change
        assert count == int(((blocks["sent_s"] <= middle_s) & (blocks["received_s"] > middle_s)).sum())


def test_the_trace_of_a_long_run_is_bounded_quick_and_says_what_is_left_out(tmp_path: Path) -> None:
    make_run(tmp_path, make_blocks(100_000, 900), names(900))
    begun = time.process_time()
    events, about = trace_of(tmp_path)
    page = write_report(tmp_path)
    assert time.process_time() - begun < 4  # both, and reading the trace back; about a second on an idle machine
    assert len(events) <= TRACE_EVENTS
    blocks_in = sum("block" in e.get("args", {}) for e in events if e["ph"] == "X")
    assert about["blocks_shown"] == blocks_in > 1000
    assert about["devices_shown"] == TRACE_DEVICES
    assert about["left_out"]["blocks"] == 100_000 - blocks_in
    assert about["left_out"]["devices"] == 900 - TRACE_DEVICES
    assert "blocks.parquet" in about["note"]
    assert page.stat().st_size < 200_000


def test_the_limits_keep_the_promise_in_the_worst_case() -> None:
    labels = 2 * (2 + (2 + TRACE_DEVICES) * report.TRACE_LANES)  # groups; steps, products, devices
    slices = report.TRACE_BLOCKS + report.TRACE_PRODUCTS + report.TRACE_STEPS + report.TRACE_COUNTER
    assert labels + slices <= TRACE_EVENTS


def test_the_busiest_devices_are_shown(tmp_path: Path) -> None:
    blocks = make_blocks(3000, 200)
    blocks["device"][:1500] = 123
    events, _ = trace_of(make_run(tmp_path, blocks, names(200)))
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert tracks[0] == names(200)[123]


# ---- report.html


def test_the_page_shows_verdict_curves_times_and_devices(tmp_path: Path) -> None:
    make_run(tmp_path, make_blocks(400, 7), names(7), verdict="DEGRADED", reasons=["the host was too slow"])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert {"DEGRADED", "the host was too slow", "plain PyTorch", "12.5 MB", "600 MB"} <= set(page.text)
    assert text.count("<svg") == 4
    assert text.count("<polyline") == 3  # two losses, seconds per step
    assert any(line.startswith("step 4, devices: 4.8") for line in page.text)
    assert "pixel-8/uk-ftth/3" in page.text


def test_the_page_needs_no_network_and_runs_no_script(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path, make_blocks(50, 3), names(3))).read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "a", "object"}
    assert not page.attributes & {"src", "href", "srcset", "onload", "style"}
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_names_from_devices_stay_text(tmp_path: Path) -> None:
    blocks = make_blocks(50, 2)
    blocks["product"] = np.full(50, HOSTILE)
    make_run(tmp_path, blocks, [HOSTILE, "x"], name=HOSTILE, verdict=HOSTILE, reasons=[HOSTILE], basis={HOSTILE: 1})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert "onload" not in page.attributes
    assert HOSTILE in page.text
    assert trace_of(tmp_path)[1]["name"] == HOSTILE


def test_a_real_device_is_marked_as_such_and_does_not_count_in_the_lateness(tmp_path: Path) -> None:
    blocks = make_blocks(200, 2)
    blocks["due_s"][blocks["device"] == 1] = math.nan
    page = Page(write_report(make_run(tmp_path, blocks, names(2))).read_text(encoding="utf-8"))
    assert "real device" in page.text
    assert not [line for line in page.text if "nan" in line]
    events, _ = trace_of(tmp_path)
    late = [e for e in events if "late_ms" in e.get("args", {})]
    assert len(late) == int((blocks["device"] == 0).sum())


def test_a_run_with_an_infinite_loss_is_still_reported(tmp_path: Path) -> None:
    make_run(tmp_path, make_blocks(50, 2), names(2), losses=[5.0, math.inf, math.nan], verdict="FAILED")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "FAILED" in page.text
    assert {"inf", "nan"} <= set(page.text)


def test_a_run_without_blocks_is_still_reported(tmp_path: Path) -> None:
    make_run(tmp_path, {}, names(2), losses=[])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "no block has such a time in this run" in page.text
    events, about = trace_of(tmp_path)
    assert about["blocks_shown"] == 0
    assert not [e for e in events if e["ph"] == "X"]


def test_many_steps_make_a_page_of_the_same_size(tmp_path: Path) -> None:
    losses = (5 - np.linspace(0, 1, 20_000)).tolist()
    text = write_report(make_run(tmp_path, make_blocks(50, 2), names(2), losses=losses)).read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert "20000" in Page(text).text  # the last step is among those listed


@pytest.mark.parametrize("missing", ["blocks.parquet", "steps.csv", "summary.json"])
def test_a_folder_without_a_finished_run_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    make_run(tmp_path, make_blocks(10, 2), names(2))
    (tmp_path / missing).unlink()
    for write in (write_trace, write_report):
        with pytest.raises(ReportError, match=f"has no {missing}.*cleave run"):
            write(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [("blocks.parquet", b"PAR1 not"), ("summary.json", b"{"), ("steps.csv", b"step,loss\n1,abc\n")],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, file: str, content: bytes) -> None:
    make_run(tmp_path, make_blocks(10, 2), names(2))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ReportError, match="cannot be read"):
        write_report(tmp_path)


def test_names_without_dictionary_encoding_are_read_too(tmp_path: Path) -> None:
    make_run(tmp_path, make_blocks(10, 2), names(2))
    path = tmp_path / "blocks.parquet"
    table = pyarrow.parquet.read_table(path)
    plain = [column.cast(pyarrow.string()) if i in (1, 16) else column for i, column in enumerate(table.columns)]
    pyarrow.parquet.write_table(pyarrow.table(plain, names=table.column_names), path)
    assert "pixel-8/uk-ftth/1" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text


# ---- charts


@pytest.mark.parametrize("low", [0.0, -3.0, 4.7, 1e6])
@pytest.mark.parametrize("width", [1e-6, 0.37, 1.0, 12345.6])
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 7
    assert low - 1e-9 <= found[0] < found[-1] <= low + width + 1e-9


def test_every_block_is_in_some_bar_of_a_histogram() -> None:
    seconds = np.concatenate([np.linspace(0, 0.01, 990), np.full(10, 5.0)])
    drawn = histogram(seconds)
    counts = [int(part.split(" blocks")[0].split(": ")[-1].replace(",", "")) for part in drawn.split("<title>")[1:]]
    assert sum(counts) == 1000
    assert "longest 5 s" in drawn


def test_equal_values_can_be_drawn() -> None:
    assert "<rect" in histogram(np.full(10, 0.0))
    assert "<polyline" in line_chart([("same", "one", [1, 2], [3.0, 3.0])], from_zero=False)
    assert "<polyline" in line_chart([("zero", "one", [1], [0.0])], from_zero=True)


def test_an_element_escapes_its_text_and_its_attributes() -> None:
    assert element("p", "<b>", element("i", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<i>&amp;</i></p>'


# ---- the summary for people


def summary_of(folder: Path) -> str:
    values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    values["fidelity"] = asdict(judge(np.zeros(1), np.ones(1), np.full(1, 1.01)))
    console = Console(width=200)
    with console.capture() as captured:
        print_summary(console, Summary(**values))
    return captured.get()


@pytest.mark.parametrize(
    ("predicted_s", "told"),
    [(0.32, "predicted 0.32 (achieved +25%)"), (0.5, "predicted 0.50 (achieved -20%)"), (None, None)],
)
def test_the_summary_says_how_the_step_compares_with_its_prediction(
    tmp_path: Path, predicted_s: float | None, told: str | None
) -> None:
    make_run(tmp_path, make_blocks(10, 2), names(2), predicted_step_s=predicted_s)
    text = summary_of(tmp_path)
    assert "p50 0.40" in text
    assert (told in text) if told else ("predicted" not in text)


def test_real_devices_without_a_kept_name_are_counted(tmp_path: Path) -> None:
    make_run(tmp_path, make_blocks(10, 2), names(2), real_devices={"phone": 7}, real_devices_forgotten=1234)
    assert "phone (7 blocks), 1,234 more that left without having returned a block" in summary_of(tmp_path)
