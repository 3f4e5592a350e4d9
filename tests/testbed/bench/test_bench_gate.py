"""The gate: which rows fail, what the table says about them, and that it measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.protocol.errors import UserError
from testbed.bench.gate import command
from testbed.bench.gate.judge import BASELINE, Judged, Measured, baseline_of, better, judge, read_baseline
from testbed.bench.gate.rows import PARTS, Part


def row(ratio: float, baseline: float | None = 1.0) -> Judged:
    return Judged("W2", Measured(ratio, 1.0), baseline)


@pytest.mark.parametrize(("ratio", "fails"), [(0.5, False), (1.0, False), (1.29, False), (1.31, True)])
def test_a_row_fails_if_it_is_more_than_30_percent_worse(ratio: float, fails: bool) -> None:
    assert row(ratio).fails is fails


def test_the_advice_names_the_row_by_how_much_and_what_to_do() -> None:
    advice = row(1.5).advice
    assert "W2: 50% worse" in advice
    assert "--write-baseline" in advice
    assert "commit of its own" in advice
    assert "baseline" in row(0.5).advice, "a gain is kept by writing the baseline"
    assert not row(1.1).advice
    assert not row(0.9).advice


def test_a_row_that_the_baseline_does_not_know_fails() -> None:
    assert row(1.0, None).fails
    assert "no such row" in row(1.0, None).advice


def test_the_better_of_two_measurements_counts() -> None:
    again = better(row(2.0), Measured(1.1, 1.0))
    assert not again.fails
    assert again.times == 2
    assert better(row(2.0), Measured(3.0, 1.0)).measured.ratio == 2.0


def test_a_baseline_has_the_medians_and_can_be_read(tmp_path: Path) -> None:
    passes = [{"W1": Measured(ratio, 2.0), "W2": Measured(1.0, ratio)} for ratio in (2.0, 8.0, 4.0)]
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(baseline_of(passes, {"date": "today"})))
    assert read_baseline(path) == {"W1": 2.0, "W2": 0.25}
    assert not any(one.fails for one in judge(passes[2], read_baseline(path)))


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "cannot read the baseline"), ("nonsense", "is not JSON"), ('{"format": 0}', "another format")],
)
def test_a_baseline_that_cannot_be_used_is_one_clear_line(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "baseline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=told) as error:
        read_baseline(path)
    assert "\n" not in str(error.value)


def test_the_kept_baseline_has_every_row_of_the_gate() -> None:
    assert set(read_baseline(BASELINE)) == {row for part in PARTS for row in part.rows}


class Ratios:
    """A part whose measurements give these ratios in turn."""

    def __init__(self, *ratios: float) -> None:
        self.left = list(ratios)

    def part(self, name: str) -> Part:
        return Part((name,), "nothing", 1, lambda: {name: Measured(self.left.pop(0), 1.0)})


def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *parts: Part) -> int:
    monkeypatch.setattr(command, "PARTS", parts)
    path = tmp_path / "baseline.json"
    rows = {row: {"ratio": 1.0} for part in parts for row in part.rows}
    path.write_text(json.dumps({"format": 1, "rows": rows}))
    return command.main(["--baseline", str(path)])


def test_only_failed_rows_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy, steady = Ratios(2.0, 1.9, 1.1), Ratios(1.0)
    assert gate(tmp_path, monkeypatch, noisy.part("noisy"), steady.part("steady")) == 0
    assert not noisy.left
    assert "measured again before it counts: noisy" in capsys.readouterr().out


def test_the_gate_fails_if_a_row_is_worse_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, monkeypatch, Ratios(2.0, 2.1, 1.9).part("slow")) == 1
    assert "slow: 90% worse than the baseline" in " ".join(capsys.readouterr().out.split())


def test_a_row_that_cannot_be_measured_fails_and_is_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs() -> dict[str, Measured]:
        raise RuntimeError("W2 did not end")

    part = Part(("W2",), "nothing", 1, hangs)
    assert gate(tmp_path, monkeypatch, part) == 1
    assert "not measured, W2 did not end" in capsys.readouterr().out
    assert command.main(["--write-baseline", "--baseline", str(tmp_path / "new.json")]) == 2
    assert not (tmp_path / "new.json").exists()


def test_writing_a_baseline_measures_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PARTS", (Ratios(3.0, 1.0, 2.0).part("one"),))
    path = tmp_path / "baseline.json"
    assert command.main(["--write-baseline", "--baseline", str(path)]) == 0
    told = json.loads(path.read_text())
    assert told["rows"]["one"] == {"ratio": 2.0, "passes": [1.0, 2.0, 3.0]}
    assert set(told) == {"format", "date", "commit", "machine", "rows"}


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--rows", "W9"]) == 2
    assert "unknown rows: W9; there are W1, W2" in " ".join(capsys.readouterr().out.split())
