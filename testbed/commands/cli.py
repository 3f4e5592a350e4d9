"""The `cleave` command. Imports modules only when they are needed, so that --help is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from agent.protocol.errors import Failure, UserError
from testbed.commands import access as access_commands
from testbed.commands import containers as cli_containers
from testbed.commands import links as cli_links
from testbed.commands import phones as phone_commands
from testbed.commands import release as release_commands
from testbed.runs import interrupts

app = typer.Typer(
    name="cleave",
    help="Train transformers on a fleet of emulated or real edge devices, with exactly the loss of plain PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain errors of three lines
)


trace_app = typer.Typer(
    help="Traces: when devices are there (inspect), what their links carry (link).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(trace_app, name="trace")
access_commands.add_to(app)
app.add_typer(cli_links.app, name="links")
app.command()(cli_containers.image)
app.command()(cli_containers.clean)
app.add_typer(phone_commands.phones_app, name="phones")
app.add_typer(release_commands.release_app, name="release")


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
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Invited devices may join here, e.g. tcp://0.0.0.0:5555.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any key, e.g. data.sequence=128.")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results folder is made.")] = Path("runs"),
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Predict the step; without, only blocks are judged.")
    ] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 3 unless the verdict is VALID.")] = False,
) -> None:
    """Run a scenario: reference, fleet, training, results folder, verdict.

    Exit code 0: done. 1: the run failed. 2: the scenario or an option is wrong. 3: with --strict, the verdict is
    DEGRADED. 130: you interrupted it.
    """
    from testbed.runs.scenario import load_scenario, parse_assignments

    flags = {"fleet.devices": "--devices", "training.steps": "--steps", "seed": "--seed", "model.name": "--model"}
    flags["server.listen"] = "--listen"
    given = dict(zip(flags, (devices, steps, seed, model, listen), strict=True))
    overrides = parse_assignments(set_ or []) | {key: value for key, value in given.items() if value is not None}
    loaded = load_scenario(scenario, overrides, flags={k: v for k, v in flags.items() if given[k] is not None})

    from ps.graph.models import check_name

    if loaded.model.name is not None:
        check_name(loaded.model.name)

    from testbed.runs.display import Display

    display = Display()
    display.say("loading PyTorch")

    from testbed.results.files import print_summary
    from testbed.runs.run import run as execute

    try:
        folder, summary = execute(loaded, results, display, predict)
    except KeyboardInterrupt:
        print("cleave: interrupted; everything that was started has ended", file=sys.stderr)
        raise typer.Exit(130) from None
    print_summary(display, summary)
    display.print(f"results in {folder}; to look at them, open {folder / 'report.html'}")
    display.print("more devices: make testbed DEVICES=4000; another model: make testbed MODEL=llama-tiny")
    if summary.verdict == "FAILED":
        raise typer.Exit(1)
    if strict and summary.verdict != "VALID":
        raise typer.Exit(3)


@app.command()
def plan(
    model: Annotated[str, typer.Option(metavar="NAME", help="A model by name, e.g. opt-13b, llama2-70b.")],
    fleet: Annotated[
        str, typer.Option(metavar="NAME", help="paper, moderate, extreme, or a packaged scenario's.")
    ] = "paper",
    devices: Annotated[int, typer.Option(metavar="N", help="How many devices.")] = 256,
    batch: Annotated[int, typer.Option(metavar="B", help="Sequences per batch.")] = 128,
    seq: Annotated[int, typer.Option(metavar="S", help="Tokens per sequence.")] = 1024,
    ps_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help='The server\'s line each way, e.g. "10 Gbit"; no limit without.')
    ] = None,
    bytes_per_value: Annotated[int, typer.Option(metavar="BYTES", help="On the wire: 2 or 4.")] = 2,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the fleet.")] = 0,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
    tiles: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all rectangles, one JSON line each.")
    ] = None,
) -> None:
    """Plan one batch of a model over a fleet, without running it: makespan and lower bound of every product.

    All times are modelled: latency + max(download, compute, upload) per device, products one after another.
    """
    from agent.protocol.units import parse_rate
    from ps.graph.models import check_name, model_config
    from testbed.virtual import plan as planning

    check_name(model)
    for name, value, allowed in (
        ("--format", format, ("table", "json")),
        ("--bytes-per-value", bytes_per_value, (2, 4)),
    ):
        if value not in allowed:
            raise UserError(f"{name} is {value}; it must be {' or '.join(str(a) for a in allowed)}")
    for name, number in (("--batch", batch), ("--seq", seq)):
        if number < 1:
            raise UserError(f"{name} is {number}; it must be at least 1")
    server_bps = parse_rate(ps_rate) if ps_rate else None
    if server_bps == 0:
        raise UserError("--ps-rate is 0; a server without a line moves nothing")
    profiles = planning.fleet_profiles(fleet, devices, seed)

    from rich.console import Console

    console = Console(highlight=False, stderr=format == "json")
    if not console.is_terminal:
        console = Console(highlight=False, stderr=format == "json", width=130)
    console.print(f"capturing the products of {model}; about 10 s", style="dim")

    from ps.graph.products import step_products

    products = step_products(model_config(model), batch, seq)
    plans = [planning.plan_product(s, n, profiles, bytes_per_value, server_bps) for s, n in products.items()]
    if tiles is not None:
        planning.write_boxes(tiles, plans)
    if format == "json":
        import json

        print(json.dumps(planning.as_json(plans, profiles, bytes_per_value)))
    else:
        planning.print_plans(console, f"{model}, {batch} x {seq} tokens, {devices:,} devices of {fleet}", plans)


@app.command()
def recovery(
    model: Annotated[str, typer.Option(metavar="NAME", help="A model by name, e.g. opt-13b, llama2-7b.")] = "opt-13b",
    fleet: Annotated[
        str, typer.Option(metavar="NAME", help="paper, moderate, extreme, or a packaged scenario's.")
    ] = "paper",
    devices: Annotated[int, typer.Option(metavar="N", help="How many devices.")] = 256,
    failures: Annotated[
        str, typer.Option(metavar="N,N", help="How many of them fail at the same moment; several, with commas.")
    ] = "1,3,5",
    batch: Annotated[int, typer.Option(metavar="B", help="Sequences per batch.")] = 128,
    seq: Annotated[int, typer.Option(metavar="S", help="Tokens per sequence.")] = 1024,
    trials: Annotated[int, typer.Option(metavar="N", help="Failure moments of each distinct product.")] = 10,
    checkpoint_steps: Annotated[
        float, typer.Option(metavar="STEPS", help="Between two checkpoints of the baseline that has them.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the fleet, the moments and who fails.")] = 0,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
) -> None:
    """How soon the work of lost devices is done again, compared with the cost of other ways to recover.

    Simulated: the real planner and dispatcher on modelled devices in virtual time, on the products of one training
    step. In the middle of a product devices fall silent; once that is detected, the rectangles that they owed are cut
    again over the others. Recovery is the time from detection until all of them are back. Virtual time: a
    moment in the middle of every distinct product is tried --trials times, each weighted with its share of the step.

    \b
    Baselines are formulas over the same fleet and step; their assumptions are printed under the table:
      checkpoint restart   reload weights and optimizer, do the work since the last checkpoint again
      pipeline replay      move the lost stage, do the micro-batches in flight there again (Asteroid-like)
      timeout              notice by the default timeout of torch.distributed, then recover as here

    \b
      cleave recovery                                   the authors' set-up: OPT-13B on 256 devices
      cleave recovery --devices 1024 --failures 1,10,50
      cleave recovery --format json | jq '.failures[0].recovery_s'

    Exit code 0: done. 1: the survivors cannot do it. 2: an option is wrong; one line says which.
    """
    from ps.graph.models import check_name, model_config
    from testbed.virtual import recovery as simulation
    from testbed.virtual.plan import fleet_profiles

    check_name(model)
    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    for name, number in (("--batch", batch), ("--seq", seq), ("--trials", trials)):
        if number < 1:
            raise UserError(f"{name} is {number}; it must be at least 1")
    if not 0 < checkpoint_steps < float("inf"):
        raise UserError(f"--checkpoint-steps is {checkpoint_steps:g}; it must be more than 0")
    if seed < 0:
        raise UserError(f"--seed is {seed}; it must be at least 0")
    profiles = fleet_profiles(fleet, devices, seed)
    numbers = simulation.parse_failures(failures, devices)

    from rich.console import Console

    console = Console(highlight=False, stderr=format == "json")
    if not console.is_terminal:
        console = Console(highlight=False, stderr=format == "json", width=130)
    console.print(f"capturing the products of {model}, then {trials} trials of each; about a minute", style="dim")

    from ps.graph.products import step_products

    config = model_config(model)
    products = step_products(config, batch, seq)
    found, step_s, longest_s, block_s = simulation.simulate(products, profiles, numbers, trials, seed)
    setting = simulation.Setting(
        parameters=simulation.count_parameters(config),
        layers=config.num_hidden_layers,
        devices=devices,
        slowest_down_bps=float(profiles["down_bps"].min()),
        slowest_up_bps=float(profiles["up_bps"].min()),
        step_s=step_s,
        products=sum(products.values()),
        longest_s=longest_s,
        block_s=block_s,
        checkpoint_steps=checkpoint_steps,
    )
    rows = simulation.summarise(found, setting)
    if format == "json":
        import json

        print(json.dumps(simulation.as_json(rows, found, setting)))
    else:
        title = f"{model}, {batch} x {seq} tokens, {devices:,} devices of {fleet}: recovery"
        simulation.print_recovery(console, title, rows, found, setting)


@app.command()
def calibrate(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Made by python -m agent measure.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The device file (NAME.toml here).")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the device file, without --out.")] = None,
    kind: Annotated[str, typer.Option(metavar="KIND", help="phone, tablet, board, laptop or mini-pc.")] = "mini-pc",
    kernel: Annotated[str | None, typer.Option(metavar="NAME", help="numpy or onnxruntime, not the faster.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw predicted against measured.")] = None,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
) -> None:
    """Fit the performance model to a measured device, say how good it is, and write a device file.

    The error is that of shapes which were held out from the fit (five-fold). A fleet has such devices when a scenario
    names the file, or when it stands among the zoo's:

    \b
      cleave calibrate my-phone.json --kind phone
      cleave run quickstart --set 'fleet.kinds={"my-phone.toml" = 1.0}'

    Exit code 0: done. 2: the profile or an option is wrong; one line says why.
    """
    _one_thread()
    from emulator.model.calibration import calibrate as fit
    from emulator.model.samples import read_samples
    from emulator.model.zoo import KINDS
    from testbed.twins import calibrate as calibration

    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    if kind not in KINDS:
        raise UserError(f"--kind is {kind}; it must be one of {', '.join(KINDS)}")
    samples = read_samples(profile)
    found = fit(samples, kernel)
    path = out or Path(f"{calibration.file_name(name or samples.name)}.toml")
    calibration.write_device_file(path, calibration.device_file(samples, found, kind))
    if svg is not None:
        calibration.write_svg(svg, samples, found)
    if format == "json":
        import json

        print(json.dumps(calibration.as_json(samples, found)))
        return

    from rich.console import Console

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=100)
    calibration.print_calibration(console, samples, found)
    console.print(f"device file: {path}", soft_wrap=True)


@app.command()
def twin(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE...", help="Made by python -m agent measure, here.")
    ],
    steps: Annotated[int, typer.Option(metavar="N", help="Products, one after another.")] = 16,
    step_s: Annotated[float, typer.Option("--step-s", metavar="S", help="How long one takes a device, about.")] = 0.5,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the blocks and the twins' luck.")] = 0,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
) -> None:
    """Is an emulated device like the real one? The same blocks on real agents of this machine and on their twins.

    Agents run with the threads and the CPU quota that their profile was measured with (a quota needs root). A profile
    given twice is two devices.

    \b
      cleave twin this-machine.json
      cleave twin slow.json fast.json --format json | jq .compared

    Exit code 0: done. 1: agents or twins could not do it. 2: a profile or an option is wrong; one line says why.
    """
    _one_thread()
    from emulator.model.calibration import calibrate as fit
    from emulator.model.samples import read_samples
    from testbed.twins import twin as twins
    from testbed.twins.twin_blocks import TwinDevice

    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    if steps < 1 or not 0.01 <= step_s <= 60 or seed < 0:
        raise UserError("--steps and --seed must not be negative, --steps not 0, and --step-s from 0.01 to 60")
    read = {path: read_samples(path) for path in profiles}
    twins.check(list(read.values()))
    fitted = {path: TwinDevice(samples, fit(samples)) for path, samples in read.items()}
    devices = [fitted[path] for path in profiles]

    from rich.console import Console

    console = Console(highlight=False, stderr=format == "json")
    console = console if console.is_terminal else Console(highlight=False, stderr=format == "json", width=100)
    compared = twins.compare(devices, steps, step_s, seed, lambda text: console.print(text, style="dim"))
    if format == "json":
        import json

        print(json.dumps(twins.as_json(compared)))
    else:
        twins.print_rows(console, compared)


@app.command()
def doctor(
    scenario: Annotated[
        str | None, typer.Argument(metavar="[SCENARIO]", help="Also find how many of its devices are honest here.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the scenario.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="About how long the trial steps may take.")] = 180.0,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
) -> None:
    """What this host can do, what is used instead of what it cannot, and how many devices are honest on it.

    With a scenario, one step of it is taken in real time with more or fewer devices, beside the same step modelled. As
    many are honest as leave times within 4.25% of the model, which leaves a margin to the 5% that a run may have.

    \b
      cleave doctor
      cleave doctor quickstart
      cleave doctor quickstart --format json | jq .honest.devices

    Exit code 0: done. 2: the scenario or an option is wrong.
    """
    from testbed.runs import doctor as examination

    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds is {seconds:g}; it must be more than 0")
    loaded = None
    if scenario is not None:
        from testbed.runs.scenario import load_scenario, parse_assignments

        loaded = load_scenario(scenario, parse_assignments(set_ or []))
        if loaded.links.kind == "off":
            raise UserError("links.kind is off: no time is modelled, and any number of devices is honest")

    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=130)
    found, honest = examination.facts(), None
    if loaded is not None:
        from testbed.runs.display import Display

        display = Display(Console(highlight=False, stderr=format == "json"))
        display.say(f"one step of {loaded.name} with more and fewer devices; at most about {seconds:.0f} s")

        from testbed.runs.trial_step import TrialStep

        probe = TrialStep(loaded)
        display.say("the step is captured")
        honest = examination.largest_honest(loaded.fleet.devices, probe.measure, seconds, display.say)
    if format == "json":
        import json

        print(json.dumps(examination.as_json(found, honest, scenario)))
    else:
        examination.print_doctor(console, found, honest, scenario)


@trace_app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace: .csv, .json or .tab.")],
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw availability over time into a file.")] = None,
) -> None:
    """What a trace holds: devices, sessions, gaps, departures, and who is there when.

    A trace says in which intervals each device is available, in seconds. It may be

    \b
      .csv   device,start_s,end_s        a header like this, then one row per interval
             phone-1,0,3600
      .json  {"phone-1": [[0, 3600], [7200, 9000]], "phone-2": [[60, 90]]}
             or [{"device": "phone-1", "start_s": 0, "end_s": 3600}, ...]
      .tab   an event trace of the Failure Trace Archive (event_type 1: available)

    Rows out of order are sorted, overlapping or touching intervals of one device are merged; both are reported.
    A session is one interval, a gap the time until the device's next one. Departures are counted an hour that a
    device is there: the rate at which a run with these devices would lose them.

    \b
      cleave trace inspect phones.csv
      cleave trace inspect phones.csv --svg phones.svg
      cleave trace inspect phones.csv --format json | jq .session_s.p50

    Exit code 0: read. 2: the file or an option is wrong; one line says where and why.
    """
    from emulator.availability.trace_files import read_trace
    from testbed.inspect import availability as inspection

    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    trace = read_trace(file)
    if svg is not None:
        inspection.write_svg(svg, trace)
    if format == "json":
        import json

        print(json.dumps(inspection.as_json(trace)))
        return

    from rich.console import Console

    console = Console(highlight=False)
    inspection.print_trace(console if console.is_terminal else Console(highlight=False, width=100), trace)


@trace_app.command()
def link(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Traces of one direction each, or the prefix of a pair.")
    ],
    format: Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")] = "table",
) -> None:
    """What traces of a link hold: its rate over time, direction by direction.

    A trace is in mahimahi's format: one integer per line, the millisecond at which one packet of 1,500 bytes may pass.
    The last line is its length; after it the trace begins again. Files may be compressed (.gz). A scenario names a
    pair, PREFIX.down and PREFIX.up, in [links.traces].

    \b
      cleave trace link drive.down drive.up
      cleave trace link drive
      cleave trace link drive --format json

    Exit code 0: read. 2: a file or an option is wrong; one line says where and why.
    """
    from testbed.inspect import link_inspect

    if format not in ("table", "json"):
        raise UserError(f"--format is {format}; it must be table or json")
    traces = link_inspect.read_directions(files)
    if format == "json":
        import json

        print(json.dumps(link_inspect.as_json(traces)))
        return

    from rich.console import Console

    console = Console(highlight=False)
    link_inspect.print_directions(console if console.is_terminal else Console(highlight=False, width=100), traces)


def _one_thread() -> None:
    """Small matrices: threads would only slow each other down, and those that spin while they wait for the next
    operation take the cores from devices. NumPy, SciPy and PyTorch read the variables when imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    """Entry point: a user's mistake becomes one clear line and exit code 2."""
    interrupts.install()
    try:
        app()
    except (UserError, Failure) as error:
        print(f"cleave: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    finally:
        interrupts.ending()
