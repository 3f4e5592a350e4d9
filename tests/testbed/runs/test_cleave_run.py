"""The real `cleave` command in an empty folder: its promises to users, and its messages for their mistakes."""

from __future__ import annotations

import csv
import json
import re
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow.parquet
import pytest
from small_runs import MODEL, RUN_LIMIT_S

if TYPE_CHECKING:
    from conftest import Program, Start

SMALL = ("--devices", "40", "--set", "data.batch=2", "--set", "data.sequence=16", "--set", "fleet.line_share=1.0")
NAMED_BY_THE_ISSUE = (
    "devices",
    "steps",
    "losses",
    "reference_losses",
    "loss_max_abs_diff",
    "step_s",
    "predicted_step_s",
    "blocks",
    "bytes_down",
    "bytes_up",
    "verdict",
)


class Run:
    """A finished run, read from its folder."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.code, self.output = program.wait(RUN_LIMIT_S), program.output
        assert self.code == 0, self.output
        (self.folder,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
        self.summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        with (self.folder / "steps.csv").open(newline="", encoding="utf-8") as file:
            self.steps = list(csv.DictReader(file))
        events = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        self.events: list[dict[str, Any]] = [json.loads(line) for line in events]
        self.blocks = pyarrow.parquet.read_table(self.folder / "blocks.parquet")


Launch = Callable[..., tuple["Program", Path]]


@pytest.fixture(scope="module")
def launch(start_warm_module: Start, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """cleave run SCENARIO, small, in a folder of its own. Runs are started two or three at a time: most of their time
    is waiting for modelled links."""

    def launch(scenario: str, *options: str, start: Start = start_warm_module) -> tuple[Program, Path]:
        folder = tmp_path_factory.mktemp(scenario)
        return start("cleave", "run", scenario, *SMALL, *options, cwd=folder), folder

    return launch


@pytest.fixture(scope="module")
def runs(launch: Launch, start_module: Start) -> dict[str, Run]:
    """An OPT and a Llama model, two steps each; the first started like any user would."""
    started = {"quickstart": launch("quickstart", "--steps", "2", start=start_module)}
    started["llama"] = launch("llama", "--steps", "2")
    return {scenario: Run(*pair) for scenario, pair in started.items()}


# In virtual time: how often a slab travels must not depend on the load of this machine.
IN_PARTS = ("--steps", "2", "--set", "data.batch=4", "--set", "training.micro_batches=4", "--set", "clock.kind=virtual")


@pytest.fixture(scope="module")
def keeping(runs: dict[str, Run], launch: Launch) -> dict[str, Run]:
    """Four micro-batches per step, on devices that keep the weights in between and on devices that do not."""
    started = {
        keep: launch("quickstart", *MODEL, *IN_PARTS, "--set", f"planner.keep={keep}") for keep in ("true", "false")
    }
    return {keep: Run(*pair) for keep, pair in started.items()}


@pytest.fixture(scope="module")
def exploding(launch: Launch) -> tuple[Program, Path]:
    """A run whose loss becomes NaN, without modelled links."""
    wild = ("--set", "training.learning_rate=1e30", "--set", "links.kind=off", "--set", "fleet.uniform=extreme")
    return launch("quickstart", "--steps", "2", *MODEL, *wild)


@pytest.fixture(scope="module")
def long_runs(launch: Launch) -> dict[signal.Signals, Program]:
    """Runs of several minutes, one for each way of ending them; on lines so slow that a step takes seconds, so that the
    waiting runs take nothing from the others."""
    return {
        number: launch("quickstart", "--steps", "60", *MODEL, "--no-predict", "--set", "fleet.line_share=0.0005")[0]
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "model"), [("quickstart", "opt-tiny"), ("llama", "llama-tiny")])
def test_the_loss_equals_plain_pytorchs_and_the_devices_did_all_products(
    runs: dict[str, Run], scenario: str, model: str
) -> None:
    summary = runs[scenario].summary
    assert summary["model"] == model
    assert len(summary["losses"]) == len(summary["reference_losses"]) == summary["steps"] == 2
    largest = max(abs(a - b) for a, b in zip(summary["losses"], summary["reference_losses"], strict=True))
    assert summary["loss_max_abs_diff"] == largest <= 1e-4
    assert all(4 < loss < 7 for loss in summary["losses"])  # near ln 256 at first: an untrained model
    assert summary["flops_done"] == summary["flops_reference"] > 0
    assert summary["verdict"] in ("VALID", "DEGRADED")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["quickstart", "llama"])
def test_the_summary_has_every_promised_figure(runs: dict[str, Run], scenario: str) -> None:
    summary = runs[scenario].summary
    assert not set(NAMED_BY_THE_ISSUE) - set(summary)
    assert summary["devices"] == 40
    assert 0 < summary["step_s"]["p50"] <= summary["step_s"]["p95"]
    assert summary["bytes_down"] > summary["bytes_up"] > 0
    assert summary["lost_devices"] == 0
    assert summary["real_devices"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["quickstart", "llama"])
def test_every_file_of_the_results_is_readable_and_they_agree(runs: dict[str, Run], scenario: str) -> None:
    run = runs[scenario]
    assert run.blocks.num_rows == run.summary["blocks"] == sum(int(row["blocks"]) for row in run.steps)
    assert [float(row["loss"]) for row in run.steps] == run.summary["losses"]
    assert [float(row["reference_loss"]) for row in run.steps] == run.summary["reference_losses"]
    assert sum(int(row["bytes_down"]) for row in run.steps) == run.summary["bytes_down"]
    assert [event["step"] for event in run.events if event["event"] == "step"] == [1, 2]
    scenario_used = tomllib.loads((run.folder / "scenario.toml").read_text(encoding="utf-8"))
    assert scenario_used["fleet"]["devices"] == 40
    assert scenario_used["data"] == {"text": "stdlib", "batch": 2, "sequence": 16}
    environment = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    assert environment["packages"]["torch"].startswith("2.")
    assert run.summary["verdict"] in (run.folder / "summary.txt").read_text(encoding="utf-8")
    trace = json.loads((run.folder / "trace.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["blocks_shown"] == run.summary["blocks"]
    assert "plain PyTorch" in (run.folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["quickstart", "llama"])
def test_the_blocks_cover_every_product_and_their_flops_add_up(runs: dict[str, Run], scenario: str) -> None:
    run = runs[scenario]
    column = {name: run.blocks[name].to_numpy() for name in run.blocks.column_names}
    cells = column["batches"].astype(np.int64) * column["rows"] * column["columns"]
    assert int((2 * cells * column["inner"]).sum()) == run.summary["flops_done"]
    assert 4 * int(cells.sum()) == run.summary["bytes_up"]
    for job in np.unique(column["job"]).tolist():
        mine = column["job"] == job
        ends = [int((column[a][mine] + column[b][mine]).max()) for a, b in _EXTENTS]
        written = np.zeros(ends, np.int8)
        for row in np.flatnonzero(mine).tolist():
            written[tuple(slice(column[a][row], column[a][row] + column[b][row]) for a, b in _EXTENTS)] += 1
        assert (written == 1).all(), f"job {job}"
    assert (column["received_s"] >= column["sent_s"]).all()


_EXTENTS = (("batch", "batches"), ("row", "rows"), ("column", "columns"))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["quickstart", "llama"])
def test_the_predicted_step_time_is_printed_before_the_first_step(runs: dict[str, Run], scenario: str) -> None:
    run = runs[scenario]
    predicted_s = run.summary["predicted_step_s"]
    assert predicted_s > 0
    assert run.output.index("a step should take") < run.output.index("step 1 of 2")
    order = [event["event"] for event in run.events]
    assert order.index("predicted") < order.index("step")
    assert [e["step_s"] for e in run.events if e["event"] == "predicted"] == [predicted_s]
    assert f"predicted {predicted_s:.2f} (achieved " in (run.folder / "summary.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_without_a_prediction_blocks_alone_are_judged(launch: Launch) -> None:
    run = Run(*launch("quickstart", *MODEL, "--steps", "1", "--no-predict"))
    assert run.summary["predicted_step_s"] is None
    assert run.summary["fidelity"]["step_stretch"] is None
    assert run.summary["fidelity"]["blocks"] > 0
    assert "a step should take" not in run.output


@pytest.mark.slow
def test_the_scenario_of_a_real_model_at_a_small_size(launch: Launch) -> None:
    """The whole lines and the clock of the scenario, a smaller model and fleet."""
    run = Run(*launch("opt-125m", "--steps", "1", *MODEL, "--devices", "12"))
    assert run.summary["loss_max_abs_diff"] <= 1e-4
    assert run.summary["verdict"] in ("VALID", "DEGRADED")
    assert run.summary["clock"]["kind"] in ("wall", "scaled")
    assert run.summary["clock"]["trials"][0]["scale"] == 1.0
    assert "at 1x times" in run.summary["clock"]["why"]
    assert "s left" in run.output  # every probe says how long the others may take


@pytest.mark.slow
def test_devices_that_keep_the_weights_download_a_third_less_and_the_loss_is_the_same(keeping: dict[str, Run]) -> None:
    kept, sent_again = keeping["true"].summary, keeping["false"].summary
    assert kept["bytes_down"] <= 0.7 * sent_again["bytes_down"]
    assert kept["losses"] == pytest.approx(sent_again["losses"], abs=1e-6)
    assert kept["reference_losses"] == sent_again["reference_losses"]
    assert kept["products_per_step"] == sent_again["products_per_step"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["true", "false"])
def test_micro_batches_have_the_loss_and_the_flops_of_plain_pytorch(keeping: dict[str, Run], keep: str) -> None:
    summary = keeping[keep].summary
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["flops_done"] == summary["flops_reference"] > 0
    assert summary["bytes_down"] == sum(int(row["bytes_down"]) for row in keeping[keep].steps)


@pytest.mark.slow
def test_progress_is_plain_lines_without_a_terminal(runs: dict[str, Run]) -> None:
    output = runs["quickstart"].output
    for text in (
        "server at tcp://",
        "40 devices joined in",
        "step 1 of 2: loss",
        "step 2 of 2",
        "s left",
        "results in",
    ):
        assert text in output
    assert "\x1b" not in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_real_agent_joins_a_run_under_way_and_its_death_changes_neither_run_nor_loss(
    start_warm: Start, tmp_path: Path
) -> None:
    """Over lines so slow that the run waits most of the time, and the agent has time to join."""
    name = "[/dim]<b>phone</b>"  # a name is never interpreted
    small = (*SMALL, *MODEL, "--no-predict", "--devices", "12", "--steps", "16", "--set", "fleet.line_share=0.003")
    program = start_warm("cleave", "run", "quickstart", *small, cwd=tmp_path)
    address = re.search(r"tcp://[\d.:]+", program.expect("server at", RUN_LIMIT_S))
    assert address is not None
    program.expect("step 1 of 16", RUN_LIMIT_S)
    agent = start_warm(
        *("agent", "--ps", address[0], "--name", name, "--kernel", "numpy", "--unmeasured"),
        *("--down", "10 Gbit", "--up", "10 Gbit", "--latency", "0 ms"),
    )
    agent.expect("joined")
    seen = max(int(found) for found in re.findall(r"step (\d+) of 16", program.output))
    program.expect(f"step {seen + 2} of 16")
    agent.signal(signal.SIGKILL)
    run = Run(program, tmp_path)
    assert list(run.summary["real_devices"]) == [name]
    assert run.summary["real_devices"][name] > 0
    assert run.summary["lost_devices"] == 1
    assert f"lost {name}" in run.output
    assert run.summary["loss_max_abs_diff"] <= 1e-4
    assert run.summary["flops_done"] == run.summary["flops_reference"]
    assert int(run.steps[-1]["devices"]) == 12


@pytest.mark.alone  # the verdict is VALID only if the host keeps up
@pytest.mark.slow
def test_a_training_that_diverges_to_nan_continues_exactly_like_plain_pytorch(exploding: tuple[Program, Path]) -> None:
    program, parent = exploding
    code = program.wait(RUN_LIMIT_S)
    (folder,) = (parent / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["losses"][1] is None  # JSON has no NaN
    assert summary["reference_losses"][1] is None
    assert summary["loss_max_abs_diff"] < 1e-4
    assert summary["flops_done"] == summary["flops_reference"]
    assert summary["suspended"] == {}
    assert summary["verdict"] == "VALID"
    assert code == 0
    assert summary["predicted_step_s"] is None  # nothing is modelled
    assert summary["basis"] == {"published": 40}  # a uniform fleet


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_ends_everything_it_started(
    long_runs: dict[signal.Signals, Program], number: signal.Signals
) -> None:
    program = long_runs[number]
    program.expect("step 1 of 60" if number == signal.SIGINT else "40 devices joined", RUN_LIMIT_S)
    pods = psutil.Process(program.pid).children(recursive=True)
    assert len(pods) >= 1
    program.signal(number)
    code = program.wait(15.0)
    assert not [pod for pod in pods if pod.is_running()]
    assert program.errors == ["cleave: interrupted; everything that was started has ended"]
    assert code == 130


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pods end when the server falls silent, a little later")
def test_a_run_killed_in_the_middle_of_training_leaves_no_process(long_runs: dict[signal.Signals, Program]) -> None:
    program = long_runs[signal.SIGKILL]
    program.expect("step 1 of 60", RUN_LIMIT_S)
    started = psutil.Process(program.pid).children(recursive=True)
    assert len(started) >= 1
    program.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []


# ---- user mistakes

MISTAKES: dict[str, tuple[list[str], list[str]]] = {  # arguments; words that the message must contain
    "unknown scenario": (["quikstart"], ['unknown scenario "quikstart"', "did you mean quickstart", "llama"]),
    "no such file": (["mine.toml"], ["there is no file mine.toml", "packaged scenarios"]),
    "unknown model": (["quickstart", "--model", "opt-tny"], ["unknown model", "opt-tny", "opt-tiny"]),
    "unknown device": (
        ["quickstart", "--set", "fleet.kinds.pixel-88=1"],
        ["--set fleet.kinds.pixel-88", 'unknown device "pixel-88"', "nearest: pixel-8"],
    ),
    "unknown network": (
        ["quickstart", "--set", "fleet.networks.uk-fth=1"],
        ["--set fleet.networks.uk-fth", 'unknown network "uk-fth"', "nearest: uk-ftth"],
    ),
    "no devices": (["quickstart", "--devices", "0"], ["--devices", "is 0", "greater than or equal to 1"]),
    "devices not a number": (["quickstart", "--devices", "many"], ["--devices", '"many"', "integer"]),
    "no steps": (["quickstart", "--steps", "0"], ["--steps", "is 0"]),
    "missing text": (
        ["quickstart", "--set", "data.text=novel.txt"],
        ["--set data.text", "novel.txt", "there is no such file", '"stdlib"'],
    ),
    "micro-batches that do not divide the batch": (
        ["quickstart", "--set", "data.batch=8", "--set", "training.micro_batches=3"],
        ["training.micro_batches is 3", "data.batch, which is 8"],
    ),
    "unknown uniform fleet": (
        ["quickstart", "--set", "fleet.uniform=papre"],
        ["--set fleet.uniform", '"papre"', '"paper", "moderate" or "extreme"'],
    ),
    "set without a value": (["quickstart", "--set", "training.steps"], ["--set", "write key=value"]),
    "set of an unknown key": (
        ["quickstart", "--set", "training.stepz=3"],
        ["--set training.stepz", 'unknown key "stepz"', 'did you mean "steps"'],
    ),
    "unknown option": (["quickstart", "--devises", "3"], ["--devises"]),
    "option without a value": (["quickstart", "--devices"], ["--devices"]),
    "no scenario": ([], ["SCENARIO"]),
    "malformed TOML": (["malformed.toml"], ["malformed.toml, line 3"]),
    "unknown key in TOML": (["unknown.toml"], ["unknown.toml, line 5", 'unknown key "stepz"', 'did you mean "steps"']),
    "wrong value in TOML": (["wrong.toml"], ["wrong.toml, line 5", '"steps" in [training] is "ten"']),
    "unknown device in TOML": (["device.toml"], ["device.toml, line 9", 'unknown device "pixel-88"', "pixel-8"]),
}
FILES = {
    "malformed.toml": '[model]\nname = "opt-tiny"\n[training\nsteps = 3\n',
    "unknown.toml": '[model]\nname = "opt-tiny"\n\n[training]\nstepz = 3\n',
    "wrong.toml": '[model]\nname = "opt-tiny"\n\n[training]\nsteps = "ten"\n',
    "device.toml": (
        '[model]\nname = "opt-tiny"\n[training]\nsteps = 3\n[fleet]\ndevices = 3\n\n[fleet.kinds]\npixel-88 = 1\n'
        "[fleet.networks]\nuk-ftth = 1\n"
    ),
}


def _is_a_clear_refusal(program: Program, expected: list[str], folder: Path) -> None:
    assert program.wait(RUN_LIMIT_S) == 2, program.output
    told = "\n".join(program.errors)
    assert "Traceback" not in program.output
    for text in expected:
        assert text in told
    assert len([line for line in program.errors if line]) <= 3, told  # one message, at most with the usage above it
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_with_advice(start_light: Start, tmp_path: Path, mistake: str) -> None:
    arguments, expected = MISTAKES[mistake]
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    _is_a_clear_refusal(start_light("cleave", "run", *arguments, cwd=tmp_path), expected, tmp_path)


def test_an_unknown_command_is_reported_with_the_known_ones(start: Start, tmp_path: Path) -> None:
    _is_a_clear_refusal(start("cleave", "rum", "quickstart", cwd=tmp_path), ["rum"], tmp_path)


def test_without_arguments_cleave_prints_its_help(start: Start, tmp_path: Path) -> None:
    program = start("cleave", cwd=tmp_path)
    assert program.wait() in (0, 2)
    assert "Usage: cleave" in program.output
    assert "Traceback" not in program.output


NARROW = (  # fewer tokens than byte values
    '{"model_type": "opt", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, '
    '"ffn_dim": 64, "word_embed_proj_dim": 32}'
)


@pytest.fixture(scope="module")
def late_mistakes(
    start_warm_module: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Program, Path]]]:
    """Started in parallel, because some take seconds to show."""
    programs = {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {
            "port in use": ("--set", f"server.port={taken.getsockname()[1]}"),
            "sequence too long": ("--set", "data.sequence=5000"),
            "vocabulary too small": ("--set", "model.config=narrow.json"),
            "results nowhere": ("--results", "narrow.json/runs"),
        }
        for mistake, given in options.items():
            folder = tmp_path_factory.mktemp("late")
            (folder / "narrow.json").write_text(NARROW)
            few = ("--devices", "3", "--steps", "1", "--set", "data.batch=1")
            programs[mistake] = start_warm_module("cleave", "run", "quickstart", *few, *given, cwd=folder), folder
        yield programs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("port in use", ["cannot listen on 127.0.0.1 port", "in use", "port 0 to get any free port"]),
        ("sequence too long", ["5000", "2048"]),
        ("vocabulary too small", ["50", "256"]),
        ("results nowhere", ["narrow.json"]),
    ],
)
def test_a_mistake_that_shows_late_is_reported_as_clearly(
    late_mistakes: dict[str, tuple[Program, Path]], mistake: str, expected: list[str]
) -> None:
    program, folder = late_mistakes[mistake]
    _is_a_clear_refusal(program, expected, folder)
