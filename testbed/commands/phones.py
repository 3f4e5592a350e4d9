"""`cleave phones`: invite phones with one pasted command, or deploy to phones on adb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.protocol.errors import UserError
from testbed.commands.access import Signer, State

if TYPE_CHECKING:
    from android.channel import Channel
    from android.deploy import Deployment, Phone
    from ps.access.access_file import AccessFile

phones_app = typer.Typer(
    help="Real phones: invite them (QR code), or deploy to those at a cable (adb).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every adb command, change nothing.")]
Format = Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")]


@phones_app.command()
def invite(
    uses: Annotated[int, typer.Option(metavar="N", help="How many phones may join with it.")] = 1,
    expires: Annotated[str, typer.Option(metavar="DURATION", help='For how long, e.g. "2 h".')] = "1 day",
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Where phones reach the server, if not where it listens."),
    ] = None,
    port: Annotated[int, typer.Option(metavar="PORT", help="Where the files are served over HTTP.")] = 8733,
    signer: Signer = None,
    state: State = None,
) -> None:
    """Invite phones: prints a command to paste into Termux, also as a QR code, and serves what it fetches.

    Phones fetch a few files over HTTP, read-only; the command carries their checksum. They are served until Ctrl-C,
    unless the run does it itself (server.files). A server must listen for invited devices:

    \b
      cleave run quickstart --listen tcp://0.0.0.0:5555 --set server.files=8733 --set fleet.phones=1
      cleave phones invite
      cleave phones invite --uses 3 --expires "2 h"

    Exit code 0: done, or ended by Ctrl-C. 2: an option is wrong, or it is not known where the server is.
    """
    import threading

    from agent.protocol.units import parse_duration
    from android.bundle import bootstrap
    from android.serving import Serving, paste
    from testbed.access.inviting import new_invitation, own_addresses, qr_code
    from testbed.access.releases import handed_out

    own = own_addresses()
    given = address.removeprefix("tcp://") if address else ""
    host = given.rpartition(":")[0] if ":" in given and not given.endswith("]") else given
    url = f"http://{host or (own[0] if own else '127.0.0.1')}:{port}"
    access = _access(state)
    given_out = handed_out(access.path.parent)
    script = bootstrap(given_out.bundle, url)
    listen = "127.0.0.1" if url.startswith("http://127.") else "0.0.0.0"
    serving = None if _is_served(script, port) else Serving(listen, port, url, given_out.bundle, given_out.release)
    invited = new_invitation(access, uses, parse_duration(expires), [address] if address else [], signer=signer)
    command = paste(script, url, invited.link)
    print(f"{qr_code(command)}\n{command}\n", flush=True)
    print(f"Paste it into Termux. To withdraw it: cleave invitations revoke {invited.id}", flush=True)
    if serving is None:
        print(f"The files are at {url}, from a server that runs already", flush=True)
        return
    with serving:
        print(f"The files are at {url} until Ctrl-C", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("no longer served; phones that joined stay")


def _is_served(script: bytes, port: int) -> bool:
    """Whether a run with server.files already serves the same agent."""
    import http.client
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/bootstrap.sh", timeout=5) as answer:
            return bool(answer.read(1 << 20) == script)
    except (OSError, ValueError, http.client.HTTPException):
        return False


@phones_app.command()
def start(
    options: Annotated[
        list[str] | None, typer.Option("--agent", metavar="OPTION", help='For the agents, e.g. "--threads=4"; again.')
    ] = None,
    server_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Of the server on this machine, if it does not run yet.")
    ] = None,
    state: State = None,
    dry_run: DryRun = False,
    format: Format = "table",
) -> None:
    """Deploy to every phone on adb, ten at once if need be: bundle, cable, invitation, start; then a table of them.

    A phone needs Termux, opened once. Termux's debuggable build (GitHub releases) is reached with the screen off, any
    other (F-Droid) with the screen on and unlocked, by typing into it. Where a phone needs a hand, the table says so.

    \b
      cleave run quickstart --listen tcp://0.0.0.0:5555
      cleave phones start
      cleave phones start --dry-run

    Exit code 0: all phones work. 1: some do not. 2: no phone, no adb, or it is not known where the server is.
    """
    from agent.protocol.units import parse_duration
    from testbed.access.inviting import new_invitation

    access = _access(state)
    here = server_port or _server_port(access)

    def begin(deployment: Deployment, phone: Phone, channel: Channel) -> Phone:
        if dry_run:
            link = "cleave://127.0.0.1/INVITATION"
        else:
            ports, lasts_s = deployment.ports, parse_duration("1 day")
            link = new_invitation(access, 1, lasts_s, [f"127.0.0.1:{ports.server}"], ports.enrolment).link
        return deployment.start(phone, channel, link, options or [])

    enrolling = access.read().enrolling if server_port is None else 0
    _for_each(begin, here, dry_run, format, enrolling, state)


@phones_app.command("list")
def list_(dry_run: DryRun = False, format: Format = "table") -> None:
    """Every phone on adb: model, Android, SoC, memory, battery, the kernel in use and its measured speed, state."""
    _for_each(lambda deployment, phone, channel: deployment.show(phone, channel), 0, dry_run, format)


@phones_app.command()
def stop(dry_run: DryRun = False, format: Format = "table") -> None:
    """Stop the agents; `cleave phones start` starts them again."""
    _for_each(lambda deployment, phone, channel: deployment.stop(phone, channel), 0, dry_run, format)


@phones_app.command()
def update(state: State = None, dry_run: DryRun = False, format: Format = "table") -> None:
    """Install the published release, or this checkout's agent, on every phone, and start it with the same options."""
    port = _server_port(_access(state))
    _for_each(lambda deployment, phone, channel: deployment.update(phone, channel), port, dry_run, format, state=state)


@phones_app.command()
def logs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Gets one log file per phone.")] = Path("logs"),
    dry_run: DryRun = False,
    format: Format = "table",
) -> None:
    """Collect the agents' logs."""
    _for_each(lambda deployment, phone, channel: deployment.logs(phone, channel, folder), 0, dry_run, format)


def _for_each(
    action: Callable[[Deployment, Phone, Channel], Phone],
    server_port: int,
    dry_run: bool,
    format_: str,
    enrol_port: int = 0,
    state: Path | None = None,
) -> None:
    from android.adb import Adb
    from android.deploy import Deployment, Ports
    from android.serving import Serving
    from ps.access.access_file import server_folder
    from testbed.access.releases import handed_out

    if format_ not in ("table", "json"):
        raise UserError(f"--format is {format_}; it must be table or json")
    ports = Ports()
    given_out = handed_out(state or server_folder())
    url = f"http://127.0.0.1:{ports.files}"
    with Serving("127.0.0.1", 0, url, given_out.bundle, given_out.release) as serving:
        deployment = Deployment(Adb(dry_run=print if dry_run else None), serving, server_port, ports, enrol_port)
        phones = deployment.each(lambda phone, channel: action(deployment, phone, channel))
    if not dry_run:
        _show(phones, format_)
    if not all(phone.ok for phone in phones):
        raise typer.Exit(1)


def _show(phones: list[Phone], format_: str) -> None:
    from agent.protocol.units import format_size

    rows = []
    for phone in phones:
        facts = phone.facts
        memory = facts.memory_bytes if facts else None
        rows.append(
            {
                "phone": phone.serial,
                "model": facts.model if facts else "",
                "android": facts.android if facts else "",
                "soc": facts.soc if facts else "",
                "ram": format_size(memory) if memory else "",
                "battery": facts.battery if facts else "",
                "kernel": phone.kernel,
                "GFLOP/s": "" if phone.gflops is None else f"{phone.gflops:.1f}",
                "state": phone.state,
            }
        )
    if format_ == "json":
        print(json.dumps(rows))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))  # no markup: the text comes from phones
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=130)).print(table)


def _access(state: Path | None) -> AccessFile:
    from ps.access.access_file import AccessFile, server_folder

    return AccessFile(state or server_folder())


def _server_port(access: AccessFile) -> int:
    ports = {address.rpartition(":")[2] for address in access.read().listening}
    if len(ports) != 1:
        raise UserError(
            "no server listens for invited devices; start one with `cleave run SCENARIO --listen tcp://0.0.0.0:5555`, "
            "or say where one will be: --server-port 5555"
        )
    return int(ports.pop())
