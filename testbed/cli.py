"""The `cleave` command. Imports what it needs when it needs it, so that --help is quick."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from agent.errors import Failure, UserError

app = typer.Typer(
    name="cleave",
    help="Train transformers on a fleet of emulated or real edge devices, with exactly the loss of plain PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain errors of three lines
)


@app.callback()
def _root() -> None:
    """Train transformers on a fleet of emulated or real edge devices, with exactly the loss of plain PyTorch."""


@app.command()
def run(
    scenario: Annotated[
        str,
        typer.Argument(metavar="SCENARIO", help="A packaged scenario (quickstart, llama) or the path of a TOML file."),
    ],
    devices: Annotated[str | None, typer.Option(metavar="N", help="How many emulated devices.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="How many optimizer steps.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed of weights, batches and fleet.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model by name, e.g. llama-tiny.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any key, e.g. data.sequence=128.")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results folder is made.")] = Path("runs"),
) -> None:
    """Run a scenario: reference, fleet, training, results folder, verdict.

    Exit code 0: done. 1: the run failed. 2: something in what you asked for is wrong. 130: you interrupted it.
    """
    from testbed.scenario import load_scenario, parse_assignments

    given = {"fleet.devices": devices, "training.steps": steps, "seed": seed, "model.name": model}
    flags = {"fleet.devices": "--devices", "training.steps": "--steps", "seed": "--seed", "model.name": "--model"}
    overrides = parse_assignments(set_ or []) | {key: value for key, value in given.items() if value is not None}
    loaded = load_scenario(scenario, overrides, flags={k: v for k, v in flags.items() if given[k] is not None})

    from ps.models import check_name

    if loaded.model.name is not None:
        check_name(loaded.model.name)

    from testbed.display import Display

    display = Display()
    display.say("loading PyTorch")

    from testbed.results import print_summary
    from testbed.run import run as execute

    try:
        folder, summary = execute(loaded, results, display)
    except KeyboardInterrupt:
        print("cleave: interrupted; everything that was started has ended", file=sys.stderr)
        raise typer.Exit(130) from None
    print_summary(display.console, summary)
    display.console.print(f"results in {folder}; to look at them, open {folder / 'report.html'}", soft_wrap=True)
    display.console.print("more devices: make testbed DEVICES=4000; another model: make testbed MODEL=llama-tiny")
    if summary.verdict == "FAILED":
        raise typer.Exit(1)


def main() -> None:
    """Entry point: a user's mistake becomes one clear line and exit code 2."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except (UserError, Failure) as error:
        print(f"cleave: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
