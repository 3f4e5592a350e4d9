"""Commands of `cleave` that talk to a Docker engine: the image of devices, and cleaning up."""

from __future__ import annotations

from typing import Annotated

import typer


def image(
    base: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help='Instead of the Dockerfile\'s; "debootstrap" needs no registry.'),
    ] = None,
    tag: Annotated[str, typer.Option(metavar="NAME", help="What the image is called.")] = "cleave-device",
) -> None:
    """Make the image of emulated devices, for launch.kind = "docker".

    The engine is that of DOCKER_HOST, or this host's. With --base debootstrap a minimal Debian is made on this host
    (root; two minutes, once) and nothing is pulled.

    Exit code 0: made. 1: the build failed. 2: no engine, or something else is missing; one line says what.
    """
    import time

    from rich.console import Console

    from emulator.containers.engine import DockerEngine
    from testbed.launch import image as images

    begun = time.monotonic()
    console = Console(highlight=False)
    engine = DockerEngine()
    try:
        images.build(engine, tag, base, lambda text: console.print(text, style="dim"))
        size_bytes = engine.do("look at the image", engine.client.images.get, tag).attrs["Size"]
    finally:
        engine.close()
    console.print(
        f"image {tag}, {size_bytes / 1e6:.0f} MB, in {time.monotonic() - begun:.0f} s: make testbed LAUNCH=docker"
    )


def clean(
    everything: Annotated[bool, typer.Option("--all", help="Also of runs that are still going on.")] = False,
) -> None:
    """Remove what runs with launch.kind = "docker" have left behind, also after kill -9: their containers and networks.

    Only what carries the label cleave.run is touched, and nothing of a run whose process on this machine is alive.

    Exit code 0: clean. 1: the engine could not remove something. 2: you may not use the engine.
    """
    from emulator.containers.engine import DockerEngine, NoEngine
    from testbed.launch.owners import alive

    try:
        engine = DockerEngine()
    except NoEngine as error:
        print(f"nothing to clean: {error}")
        return
    try:
        containers, networks, spared = 0, 0, []
        for run, owner in sorted(engine.runs().items()):
            if alive(owner) and not everything:
                spared.append(run)
                continue
            containers += engine.remove_containers(run)
            networks += engine.remove_networks(run)
    finally:
        engine.close()
    print(f"removed {containers} containers and {networks} networks")
    if spared:
        print(f"still going on, and left alone: {', '.join(spared)} (cleave clean --all removes them too)")
