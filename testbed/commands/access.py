"""`cleave invite`, `cleave invitations`, `cleave devices`: admission of devices from elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.protocol.errors import UserError

if TYPE_CHECKING:
    from ps.access.access_file import AccessFile
    from ps.access.reputation import Standing

devices_app = typer.Typer(
    help="Devices: list them and their standing, revoke one, forgive one.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
invitations_app = typer.Typer(
    help="Invitations: list them, revoke or reopen one.", invoke_without_command=True, rich_markup_mode=None
)
State = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder of the server's key and its list of devices.")
]
Signer = Annotated[
    str | None,
    typer.Option(metavar="FILE.pub", help="Signer of the agent releases it may install; see cleave release trust."),
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
    signer: Signer = None,
    state: State = None,
    format: Annotated[str, typer.Option(metavar="FORMAT", help="text or json.")] = "text",
) -> None:
    """Invite a device: a link, a command and a QR code with which it joins, over an encrypted connection.

    Anyone who has the link can join with it, so treat it like a key. A running server accepts it at once.

    \b
      cleave invite                                   one device, within a day
      cleave invite --uses 10 --expires "2 h"         ten
      cleave invite --address 192.0.2.7:5555          a server behind a router that forwards this port

    Exit code 0: done. 2: an option is wrong, or it is not known where the server is.
    """
    from agent.protocol.units import parse_duration
    from testbed.access.inviting import new_invitation

    _check(format, "text", "json")
    invited = new_invitation(_access(state), uses, parse_duration(expires), address or [], signer=signer)
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
    from ps.access import access_list as access

    gone = _access(state).change(lambda access_list: access.revoke_invitation(access_list, id_, time.time()))
    print(f"withdrawn: {gone.id}; {gone.used} of {gone.uses} devices have joined with it, and stay")


@invitations_app.command("reopen")
def reopen_invitation(
    id_: Annotated[str, typer.Argument(metavar="ID", help="As `cleave invitations` lists it.")], state: State = None
) -> None:
    """Let devices join again with an invitation that was closed because a device of it was revoked."""
    from ps.access import access_list as access

    opened = _access(state).change(lambda access_list: access.reopen_invitation(access_list, id_, time.time()))
    print(f"reopened: {opened.id}; {opened.uses - opened.used} more devices may join with it")


@devices_app.callback()
def devices(context: typer.Context, state: State = None, format: Format = "table") -> None:
    """List the devices that have joined, and their standing. `cleave devices revoke NAME` shuts one out, `cleave
    devices forgive NAME` lifts a suspension."""
    from agent.identity.keys import fingerprint
    from ps.access.access_list import standing_fingerprint
    from ps.access.reputation import key_identity

    _check(format, "table", "json")
    if context.invoked_subcommand is not None:
        return
    access_list, now_s = _access(state).read(), time.time()
    standings = {standing.identity: standing for standing in access_list.standings}
    rows = [
        {
            "name": d.name,
            "fingerprint": fingerprint(d.key),
            "state": d.state,
            "standing": _standing(standings.pop(key_identity(d.key), None), now_s),
            "first seen": _moment(d.first_seen_s),
            "last seen": _moment(d.last_seen_s),
            "invitation": d.invitation,
        }
        for d in access_list.enrolled
    ]
    rows += [  # unencrypted devices, and keys that are no longer listed
        {
            "name": s.name,
            "fingerprint": standing_fingerprint(s),
            "state": "plain line",
            "standing": _standing(s, now_s),
            "first seen": "",
            "last seen": _moment(s.seen_s),
            "invitation": "",
        }
        for s in standings.values()
    ]
    _show(rows, format, "no device has joined with an invitation yet: cleave invite")


@devices_app.command("forgive")
def forgive_device(
    which: Annotated[str, typer.Argument(metavar="NAME|FINGERPRINT", help="As `cleave devices` lists it.")],
    state: State = None,
) -> None:
    """Lift a device's suspension. A running server lets it in at once; its agent asks again within ten minutes."""
    from ps.access import access_list as access

    good = _access(state).change(lambda access_list: access.forgive(access_list, which, time.time()))
    print(f"forgiven: {good.name} ({access.standing_fingerprint(good)})")


def _standing(standing: Standing | None, now_s: float) -> str:
    if standing is None:
        return "new"
    if standing.banned(now_s):
        return f"suspended until {_moment(standing.banned_until_s)}: {standing.why}"
    slow = f", {standing.factor(now_s):.1f}x slower than it says" if standing.factor(now_s) > 1 else ""
    return f"{standing.blocks} blocks{f', {standing.refused} failed' if standing.refused else ''}{slow}"


@devices_app.command("revoke")
def revoke_device(
    which: Annotated[str, typer.Argument(metavar="NAME|FINGERPRINT", help="As `cleave devices` lists it.")],
    state: State = None,
    with_invitation: Annotated[
        bool | None,
        typer.Option(
            "--with-invitation/--keep-invitation",
            help="Withdraw the invitation it came with, too; or let others go on joining with it.",
            show_default="asks on a terminal, else closes it",
        ),
    ] = None,
) -> None:
    """Shut a device out, for good. A running server drops it within a heartbeat.

    The invitation it came with enrols no more devices, or this one could return with a new key: it is closed until
    `cleave invitations reopen ID`, withdrawn (--with-invitation), or left open (--keep-invitation).
    """
    from agent.identity.keys import fingerprint
    from ps.access import access_list as access

    file = _access(state)
    keep = with_invitation is False
    gone = file.change(lambda access_list: access.revoke_device(access_list, which, time.time(), keep_invitation=keep))
    print(f"revoked: {gone.name}, key {fingerprint(gone.key)}")
    came_with = access.find_invitation(file.read(), gone.invitation)
    if came_with is None or came_with.state(time.time()) not in ("open", "closed"):
        return  # no device can join with this invitation anyway
    if with_invitation is None and sys.stdin.isatty():
        with_invitation = typer.confirm(f"Withdraw invitation {came_with.id}, with which it came?", default=True)
    if with_invitation:
        file.change(lambda access_list: access.revoke_invitation(access_list, came_with.id, time.time()))
        print(f"withdrawn: {came_with.id}, with which it came")
    elif keep:
        print(f"invitation {came_with.id} stays open: anyone with its link can join, even this device with a new key")
    else:
        print(
            f"closed: invitation {came_with.id}, with which it came; for other devices: cleave invitations reopen "
            f"{came_with.id}; to withdraw it: cleave invitations revoke {came_with.id}"
        )


def _access(state: Path | None) -> AccessFile:
    from ps.access.access_file import AccessFile, server_folder

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

    table = Table()
    for heading in rows[0]:
        # identifiers are never cut off, however narrow the terminal; a name is the device's own choice
        whole = max(len(row[heading]) for row in rows) if heading in ("id", "fingerprint") else None
        table.add_column(heading, min_width=whole, no_wrap=whole is not None)
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))  # no markup: device owners choose names
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=110)).print(table)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
