"""`cleave links`: links that the kernel shapes."""

from __future__ import annotations

from typing import Annotated

import typer

from agent.protocol.errors import UserError

app = typer.Typer(
    help="Links that the kernel shapes: do they carry what was asked for (check)?",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _root() -> None:
    """Links that the kernel shapes."""


@app.command()
def check(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="Whose fleet: a name or a TOML file.")],
    sample: Annotated[int, typer.Option(metavar="N", help="How many devices are measured.")] = 50,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the scenario.")
    ] = None,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
) -> None:
    """Asked against achieved: rate down, rate up and round trip of a sample of devices, with a verdict.

    The links of all devices of the scenario's fleet are made by the kernel, and those of the sample are measured over
    TCP, many at a time, in both directions at once: from inside containers if launch.kind is "docker", otherwise
    between two network namespaces of this machine that end with the command (root).

    \b
      cleave links check quickstart --set fleet.devices=2000 --set fleet.line_share=0.05
      cleave links check quickstart --sample 10 --format json | jq .down_share

    Exit code 0: they do. 1: some do not. 2: something is missing or wrong; one line says what.
    """
    from testbed.runs.scenario import load_scenario, parse_assignments

    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    if sample < 1:
        raise UserError(f"--sample is {sample}; it must be at least 1")
    loaded = load_scenario(scenario, parse_assignments(set_ or []))

    from rich.console import Console

    from testbed.inspect import link_check
    from testbed.runs.fleets import make_fleet, pods_for

    console = Console(highlight=False, stderr=format == "json")
    console = console if console.is_terminal else Console(highlight=False, stderr=format == "json", width=130)
    fleet = make_fleet(loaded.fleet, loaded.links, loaded.seed)
    chosen = link_check.choose(len(fleet), sample, loaded.seed)
    console.print(f"making {len(fleet):,} links, then measuring {len(chosen)}; up to a minute or two", style="dim")
    if loaded.launch.kind == "docker":
        from testbed.inspect.link_check_containers import check_in_containers

        applied, rows = check_in_containers(loaded.launch, pods_for(loaded.fleet, loaded.launch), fleet, chosen)
    else:
        applied, rows = link_check.check_here(fleet, chosen)
    if format == "json":
        import json

        print(json.dumps(link_check.as_json(applied, rows)))
    else:
        link_check.print_rows(console, applied, rows)
    if any(row.wrong for row in rows):
        raise typer.Exit(1)
