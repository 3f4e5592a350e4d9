"""`cleave invite`, `cleave invitations`, `cleave devices`: who may join from elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.errors import UserError

if TYPE_CHECKING:
    from ps.access_file import AccessFile

devices_app = typer.Typer(
    help="Devices that were invited: list them, revoke one.", invoke_without_command=True, rich_markup_mode=None
)
invitations_app = typer.Typer(
    help="Invitations: list them, revoke one.", invoke_without_command=True, rich_markup_mode=None
)
State = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where the server's key and its devices are written down.")
]
Format = Annotated[str, typer.Option(metavar="FORMAT", help="table or json.")]


def add_to(app: typer.Typer) -> None:
    app.command()(invite)
    app.add_typer(devices_app, name="devices")
    app.add_typer(invitations_app, name="invitations")


def invite(
    uses: Annotated[int, typer.Option(metavar="N", help="How many devices may join with it.")] = 1,
    expires: Annotated[str, typer.Option(metavar="DURATION", help='For how long, e.g. "2 days".')] = "1 day",
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Where devices reach the server, if not where it listens; again."),
    ] = None,
    state: State = None,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="text or json.")] = "text",
) -> None:
    """Invite a device: a link, a command and a QR code with which it joins, over an encrypted connection.

    Whoever has the link may join with it, so hand it over as you would a key. A running server takes it at once.

    \b
      cleave invite                                   one device, within a day
      cleave invite --uses 10 --expires "2 h"         ten
      cleave invite --address 192.0.2.7:5555          a server behind a router that forwards this port

    Exit code 0: done. 2: an option is wrong, or it is not known where the server is.
    """
    from agent.units import parse_duration
    from testbed.inviting import new_invitation

    _check(format, "text", "json")
    invited = new_invitation(_access(state), uses, parse_duration(expires), address or [])
    if format == "json":
        print(
            json.dumps(
                {
                    "id": invited.id,
                    "link": invited.link,
                    "command": invited.command,
                    "uses": invited.uses,
                    "expires": _moment(invited.expires_s),
                }
            )
        )
        return
    devices = "one device" if invited.uses == 1 else f"{invited.uses} devices"
    print(f"{invited.qr_code()}\n{invited.link}\n\n{invited.command}\n")
    print(f"for {devices}, until {_moment(invited.expires_s)}; to withdraw it: cleave invitations revoke {invited.id}")


@invitations_app.callback()
def invitations(context: typer.Context, state: State = None, format: Format = "table") -> None:
    """List invitations, with how often they were used. `cleave invitations revoke ID` withdraws one."""
    _check(format, "table", "json")
    if context.invoked_subcommand is not None:
        return
    now_s = time.time()
    rows = [
        {"id": i.id, "state": i.state(now_s), "used": f"{i.used} of {i.uses}", "expires": _moment(i.expires_s)}
        for i in _access(state).read().invitations
    ]
    _show(rows, format, "no invitation yet: cleave invite")


@invitations_app.command("revoke")
def revoke_invitation(
    id_: Annotated[str, typer.Argument(metavar="ID", help="As `cleave invitations` lists it.")], state: State = None
) -> None:
    """Withdraw an invitation. Devices that have joined with it stay: revoke those with `cleave devices revoke`."""
    from ps import access

    gone = _access(state).change(lambda book: access.revoke_invitation(book, id_, time.time()))
    print(f"withdrawn: {gone.id}; {gone.used} of {gone.uses} devices have joined with it, and stay")


@devices_app.callback()
def devices(context: typer.Context, state: State = None, format: Format = "table") -> None:
    """List the devices that were invited and have joined. `cleave devices revoke NAME` shuts one out."""
    from agent.keys import fingerprint

    _check(format, "table", "json")
    if context.invoked_subcommand is not None:
        return
    rows = [
        {
            "name": d.name,
            "fingerprint": fingerprint(d.key),
            "state": d.state,
            "first seen": _moment(d.first_seen_s),
            "last seen": _moment(d.last_seen_s),
            "invitation": d.invitation,
        }
        for d in _access(state).read().enrolled
    ]
    _show(rows, format, "no device has joined with an invitation yet: cleave invite")


@devices_app.command("revoke")
def revoke_device(
    which: Annotated[str, typer.Argument(metavar="NAME|FINGERPRINT", help="As `cleave devices` lists it.")],
    state: State = None,
) -> None:
    """Shut a device out, for good. A running server drops it within a heartbeat."""
    from agent.keys import fingerprint
    from ps import access

    gone = _access(state).change(lambda book: access.revoke_device(book, which, time.time()))
    print(f"revoked: {gone.name}, key {fingerprint(gone.key)}")


def _access(state: Path | None) -> AccessFile:
    from ps.access_file import AccessFile, server_folder

    return AccessFile(state or server_folder())


def _check(format_: str, *known: str) -> None:
    if format_ not in known:
        raise UserError(f"--format is {format_}; it must be {' or '.join(known)}")


def _show(rows: list[dict[str, str]], format_: str, nothing: str) -> None:
    if format_ == "json":
        print(json.dumps(rows))
        return
    if not rows:
        print(nothing)
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))  # not as markup: strangers choose names
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=110)).print(table)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
