"""`cleave phones`: invite phones with one pasted command, or deploy to those on adb."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.errors import UserError
from testbed.access_commands import State, access_of

if TYPE_CHECKING:
    from android.channel import Channel
    from android.deploy import Deployment, Phone

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
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="This machine, as phones call it, if not its own address.")
    ] = None,
    port: Annotated[int, typer.Option(metavar="PORT", help="Where the files are served over HTTP.")] = 8733,
    state: State = None,
) -> None:
    """Invite phones: prints a command to paste into Termux, also as a QR code, and serves what it fetches.

    Stays until Ctrl-C: meanwhile phones can fetch three files over HTTP, read-only. The command carries their checksum.
    A server must listen for invited devices, or do so later at the same address:

    \b
      cleave run quickstart --listen tcp://0.0.0.0:5555
      cleave phones invite --uses 3

    Exit code 0: ended by Ctrl-C. 2: an option is wrong, or it is not known where the server is.
    """
    import threading

    from agent.units import parse_duration
    from android.serving import Serving
    from testbed.inviting import new_invitation, own_addresses, qr_code

    own = own_addresses()
    address = host or (own[0] if own else "127.0.0.1")
    invited = new_invitation(access_of(state), uses, parse_duration(expires), [host] if host else [])
    with Serving("0.0.0.0", port, f"http://{address}:{port}") as serving:
        command = serving.command(invited.link)
        print(f"{qr_code(command)}\n{command}\n", flush=True)
        print(f"Paste it into Termux. Files at {serving.url} until Ctrl-C; to withdraw: ", end="")
        print(f"cleave invitations revoke {invited.id}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("no longer served; phones that joined stay")
