"""`cleave release`: sign the agent that phones update to, with a key that need not be on the server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agent.protocol.errors import UserError
from testbed.commands.access import State

release_app = typer.Typer(
    help="Signed releases of the agent: make a key, sign a bundle, let the server hand it out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Bundle_ = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle; its release lies beside it.")]


@release_app.command()
def keygen(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The key; FILE.pub is its public half.")],
) -> None:
    """Make a signing key, on a machine of your own: phones will run what it signs, so keep it off the server.

    \b
      cleave release keygen --out ~/keys/cleave-release

    Exit code 0: done. 2: the file already exists, or cannot be written.
    """
    from agent.identity.release import signer_fingerprint
    from ps.access.access_file import server_folder
    from testbed.access.signing import make_key, public_path

    if out.resolve().is_relative_to(server_folder().resolve()):
        raise UserError(f"{out} is in the server's state folder; the key belongs elsewhere, best on another machine")
    key = make_key(out)
    print(f"made {out}; keep it secret, with a safe copy: phones take updates from no other key")
    print(f"the public half, for the server: {public_path(out)}, fingerprint {signer_fingerprint(key.signer)}")


@release_app.command()
def sign(
    key: Annotated[Path, typer.Option(metavar="FILE", help="As `cleave release keygen` made it.")],
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="A bundle with a number; without it one is built here.")
    ] = None,
    number: Annotated[
        int | None, typer.Option(metavar="N", help="Of the new release; otherwise date and time, UTC.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write a built bundle.")] = Path(),
) -> None:
    """Sign the agent of this checkout, or a bundle built earlier: agent.zip, and beside it agent.zip.release.

    \b
      cleave release sign --key ~/keys/cleave-release --out release
      cleave release sign --key ~/keys/cleave-release release/agent.zip

    Exit code 0: done. 2: the key or the bundle is wrong.
    """
    from agent.identity.release import MOST_NUMBER, number_inside
    from android.bundle import NAME, Bundle, build
    from testbed.access.releases import write_signed
    from testbed.access.signing import read_key, sign_bundle

    signing = read_key(key)
    if bundle is None:
        number = number or int(time.strftime("%Y%m%d%H%M", time.gmtime()))
        if not 0 < number < MOST_NUMBER:
            raise UserError(f"--number is {number}; it must be between 1 and {MOST_NUMBER - 1}")
        path, built = out / NAME, build(release=number)
    else:
        try:
            path, built = bundle, Bundle(bundle.read_bytes())
        except OSError as error:
            raise UserError(f"cannot read {bundle}: {error.strerror}") from None
        inside = number_inside(built.data)
        if not inside:
            raise UserError(f"{bundle} has no release number; leave it out to build one here")
        if number not in (None, inside):
            raise UserError(f"{bundle} is release {inside}, not {number}")
        number = inside
    release = sign_bundle(signing, built.data, number)
    write_signed(path, built, release)
    print(f"release {number}: {path} ({len(built.data)} bytes, SHA-256 {built.sha256}) and {path}.release")
    print(f"on the server: cleave release publish {path}")


@release_app.command()
def verify(
    bundle: Bundle_ = Path("agent.zip"),
    signer: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Public key or FILE.pub; by default the signer that the server trusts."),
    ] = None,
    state: State = None,
) -> None:
    """Is this bundle, byte for byte, what the signer has signed?

    Exit code 0: it is. 2: it is not.
    """
    from agent.identity.release import check_bundle, check_signature, signer_fingerprint
    from ps.access.access_file import server_folder
    from testbed.access.releases import read_signed, trusted_signer
    from testbed.access.signing import read_signer

    found, release = read_signed(bundle)
    trusted = read_signer(signer) if signer else trusted_signer(state or server_folder())
    if not trusted:
        raise UserError("whose signature? --signer FILE.pub, or cleave release trust FILE.pub")
    check_signature(release, trusted)
    check_bundle(release, found.data)
    print(f"release {release.number}, signed by {signer_fingerprint(trusted)}: {bundle} is as it was signed")


@release_app.command()
def trust(
    public: Annotated[str, typer.Argument(metavar="PUB", help="FILE.pub, or the key itself.")], state: State = None
) -> None:
    """Name this signer in invitations from now on. Phones that were invited before keep theirs.

    Exit code 0: done. 2: it is not a public key.
    """
    from agent.identity.release import signer_fingerprint
    from ps.access.access_file import server_folder
    from testbed.access.releases import trust as write
    from testbed.access.signing import read_signer

    signer = read_signer(public)
    write(state or server_folder(), signer)
    print(f"invitations name the signer {signer_fingerprint(signer)} from now on")


@release_app.command()
def publish(bundle: Bundle_ = Path("agent.zip"), state: State = None) -> None:
    """Hand this release out to phones, new ones and those that are too old. A run that serves files takes it at its
    start.

    Exit code 0: done. 2: it is not signed by the trusted signer, was changed, or is not newer.
    """
    from ps.access.access_file import server_folder
    from testbed.access.releases import publish as hand_out

    release = hand_out(state or server_folder(), bundle)
    print(f"release {release.number} is handed out from now on")
