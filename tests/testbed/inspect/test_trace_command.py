"""Promises of `cleave trace inspect`: right figures, a plot that fits, one clear line for a mistake."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import phone_sessions
import pytest
from rich.console import Console

from emulator.availability.churn import flash_sessions, read_trace, trace_of
from testbed.inspect.availability import HALVES, ROWS, as_json, measure, plot, print_trace

if TYPE_CHECKING:
    from conftest import Start


def cleave(start: Start, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return start("cleave", "trace", *map(str, arguments)).completed()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text("device,start_s,end_s\na,0,3600\na,7200,10800\nb,0,1800\nb,1800,3600\n", encoding="utf-8")
    return path


def test_the_figures_of_a_small_trace_match_a_hand_calculation(start_light: Start, small: Path) -> None:
    found = json.loads(cleave(start_light, "inspect", small, "--format", "json").stdout)
    assert (found["devices"], found["sessions"], found["duration_s"]) == (2, 3, 10800)
    assert found["session_s"] == {"p10": 3600, "p50": 3600, "p90": 3600, "mean": 3600}
    assert found["gap_s"]["p50"] == 3600
    assert found["departures"] == 2  # the third session lasts until the end
    assert found["departures_per_available_hour"] == pytest.approx(2 / 3)
    assert found["mean_availability"] == pytest.approx(0.5)
    assert found["repairs"]["merged"] == 1
    series = found["availability"]
    assert len(series["share"]) * series["part_s"] == pytest.approx(10800)
    assert np.mean(series["share"]) == pytest.approx(0.5)
    assert series["share"][0] == pytest.approx(1.0)


def test_the_output_has_a_table_the_repairs_and_a_plot(start_light: Start, small: Path) -> None:
    done = cleave(start_light, "inspect", small)
    assert done.returncode == 0, done.stderr
    assert "60 min / 60 min / 60 min" in done.stdout
    assert "repaired: 1 intervals that overlapped or touched the one before, merged" in done.stdout
    assert "100.0% ██" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_figures_of_thousands_of_phones_match_their_sessions(start_light: Start, tmp_path: Path) -> None:
    made = phone_sessions.sessions(seed=1)
    done = cleave(start_light, "inspect", made.write(tmp_path / "phones.csv"), "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    lengths_s, span_s = made.lengths_s, 48 * 3600
    assert found["devices"] == phone_sessions.PHONES
    percentiles = np.percentile(lengths_s, [10, 50, 90])
    assert [found["session_s"][p] for p in ("p10", "p50", "p90")] == pytest.approx(percentiles)
    assert found["session_s"]["mean"] == pytest.approx(lengths_s.mean(), abs=1)
    departures = int((made.end_s < span_s).sum())
    assert found["departures_per_available_hour"] == pytest.approx(departures * 3600 / lengths_s.sum(), abs=0.005)
    hours_a_day = 24 * lengths_s.sum() / span_s / phone_sessions.PHONES
    assert found["available_hours_a_day"] == pytest.approx(hours_a_day, abs=0.05)
    assert found["duration_s"] == pytest.approx(span_s, rel=0.001)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_plot_is_as_wide_as_the_terminal_and_no_wider(width: int) -> None:
    lines = plot(flash_sessions(200, 48 * 3600.0, seed=1), width)
    assert len(lines) == ROWS + 1
    assert width - 2 <= max(map(len, lines)) < width
    assert lines[-1].split() == (["0", "24", "h", "48", "h"] if width > 20 else ["0", "48", "h"])


def test_the_highest_column_fills_the_plot_an_empty_one_is_blank_and_a_low_one_is_visible() -> None:
    trace = trace_of([f"d{i}" for i in range(1000)], range(1000), [0] * 1000, [10] * 999 + [20], window_s=(0.0, 30.0))
    bars = [line[7:].ljust(30) for line in plot(trace, 38)[:ROWS]]
    assert all(line[:10] == "█" * 10 for line in bars)
    assert bars[-1][10:20] == "▁" * 10
    assert all(line[20:].isspace() for line in bars)


def test_a_terminal_without_unicode_gets_a_plot_it_can_show() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_trace(Console(file=file, width=60), flash_sessions(200, 48 * 3600.0, seed=1))
    file.flush()  # would fail on a block character
    assert HALVES[-1] * 3 in "".join(plot(flash_sessions(200, 48 * 3600.0, seed=1), 60, HALVES))


def test_a_trace_without_gaps_reports_none() -> None:
    trace = trace_of(["a", "b"], [0], [0], [10], window_s=(0.0, 10.0))
    assert measure(trace).gap_s is None
    assert measure(trace).never_there == 1
    assert as_json(trace)["gap_s"] is None
    file = io.StringIO()
    print_trace(Console(file=file, width=80), trace)
    assert "2 (1 never there)" in file.getvalue()


def test_the_drawing_is_a_self_contained_svg(start_light: Start, small: Path, tmp_path: Path) -> None:
    awkward = tmp_path / "<b>&.csv"
    awkward.write_bytes(small.read_bytes())
    drawing = tmp_path / "drawing.svg"
    assert cleave(start_light, "inspect", awkward, "--svg", drawing).returncode == 0
    root = ET.parse(drawing).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert any("<b>&.csv" in (element.text or "") for element in root)
    assert root.find("{http://www.w3.org/2000/svg}polygon") is not None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.csv"], "nowhere.csv: there is no such file"),
        (["bad.csv"], "bad.csv, line 3: end_s 5 is before start_s 9"),
        (["small.csv", "--format", "xml"], "table or json"),
        (["small.csv", "--svg", "x.png"], "give the file a name in .svg"),
        (["small.csv", "--svg", "no/where.svg"], "cannot write the drawing"),
    ],
)
def test_a_mistake_gets_one_clear_line_and_exit_code_2(
    start_light: Start, arguments: list[str], told: str, small: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.csv").write_text("device,start_s,end_s\na,0,1\na,9,5\n", encoding="utf-8")
    given = [str(tmp_path / a) if "." in a else a for a in arguments]
    done = cleave(start_light, "inspect", *given)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("cleave: ")
    assert told in line


@pytest.mark.slow
def test_the_figures_of_a_link_trace_match_a_hand_calculation(start_light: Start, tmp_path: Path) -> None:
    (tmp_path / "drive.down").write_text("".join(f"{ms}\n" for ms in (0, 0, 500, 1000, 1500, 2000)), encoding="utf-8")
    (tmp_path / "drive.up").write_text("1000\n2000\n", encoding="utf-8")
    found = json.loads(cleave(start_light, "link", tmp_path / "drive", "--format", "json").stdout)
    assert [each["trace"] for each in found] == ["drive, down", "drive, up"]
    assert found[0]["duration_s"] == found[1]["duration_s"] == 2
    assert found[0]["mean_bps"] == 36_000
    assert found[0]["second_bps"] == {"p10": 26_400, "p50": 36_000, "p90": 45_600}  # of 48 and 24 kbit/s
    assert (found[0]["packets"], found[0]["longest_gap_s"]) == (6, 0.5)
    assert found[1]["longest_gap_s"] == 1.0
    done = cleave(start_light, "link", tmp_path / "drive.down", tmp_path / "drive.up")
    assert done.returncode == 0, done.stderr
    assert "36 kbit" in done.stdout
    assert "█" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("text", "told"), [("", "it is empty"), ("1\nx\n", 'line 2: "x" is not'), (None, "there is neither")]
)
def test_a_mistake_in_a_link_trace_gets_one_clear_line_and_exit_code_2(
    start_light: Start, tmp_path: Path, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / "drive.down").write_text(text, encoding="utf-8")
    done = cleave(start_light, "link", tmp_path / ("drive" if text is None else "drive.down"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert told in line


def test_help_explains_the_formats(start_light: Start) -> None:
    told = cleave(start_light, "inspect", "--help").stdout
    for taught in (
        "device,start_s,end_s",
        '"phone-1": [[0, 3600]',
        "Failure Trace Archive",
        "--format json",
        "Exit code",
    ):
        assert taught in told


def test_inspecting_does_not_load_pytorch(small: Path) -> None:
    code = "import sys; import testbed.inspect.availability; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    assert len(read_trace(small)) == 2
