"""The device image: its sources, its build, and a base for it if no registry can be reached.

`cleave image` passes the Dockerfile and the few folders it needs to the engine. The base is an image that the engine
has or can pull, or "debootstrap": a minimal Debian that debootstrap makes once on this host and keeps in its cache. In
that case this host's pip fetches the Python packages, so that the build itself needs no network.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.protocol.errors import Failure, UserError
from emulator.containers.engine import SOURCES_LABEL, DockerEngine

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "pyzmq", "pyroute2")  # as in the Dockerfile
RELEASE, INCLUDED = "bookworm", "python3,python3-pip"  # Debian's name, and packages added to the minimum
PYTHON = "3.11"  # of that release
NEEDLESS = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")

Say = Callable[[str], None]


def sources(root: Path = ROOT) -> list[Path]:
    """The files the image contains or is built from."""
    if not (root / "Dockerfile").is_file():
        raise UserError(f"there is no Dockerfile in {root}: the image is made in a checkout of the project")
    code = sorted(file for room in ("agent", "emulator") for file in (root / room).rglob("*.py"))
    return [root / "Dockerfile", root / "requirements.lock", *code]


def digest(root: Path = ROOT) -> str:
    """Digest of the sources; the image carries it, so that outdated images are noticed."""
    total = hashlib.sha256()
    for file in sources(root):
        total.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def build(engine: DockerEngine, image: str, base: str | None, say: Say) -> None:
    """`base`: an image, "debootstrap", or None for the Dockerfile's own."""
    with tempfile.TemporaryDirectory(prefix="cleave-image-") as folder:
        wheels: list[Path] = []
        arguments: dict[str, str] = {}
        if base == "debootstrap":
            say("fetching the Python packages of the image")
            wheels = _wheels(Path(folder))
            arguments = {"BASE": import_base(engine, say), "PIP_NO_INDEX": "1"}
        elif base is not None:
            arguments = {"BASE": base}
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as archive:
            for file in sources():
                archive.add(file, arcname=str(file.relative_to(ROOT)))
            for wheel in wheels:
                archive.add(wheel, arcname=f"wheels/{wheel.name}")
        context.seek(0)
        say(f"building {image}")
        lines = engine.do(
            "build the image",
            engine.client.api.build,
            fileobj=context,
            custom_context=True,
            tag=image,
            buildargs=arguments,
            labels={SOURCES_LABEL: digest()},
            rm=True,
            forcerm=True,
            decode=True,
        )
        said: list[str] = []
        for line in lines:
            said += [text for text in line.get("stream", "").splitlines() if text.strip()]
            if "error" in line:
                raise Failure(
                    f"the image could not be built: {line['error'].strip()}\n" + "\n".join(said[-10:]) + _advice(line)
                )


def _advice(line: dict[str, str]) -> str:
    if re.search(r"pull|manifest|registry|dial tcp|lookup", line["error"]):
        return "\nWithout a registry: make image BASE=debootstrap"
    return ""


def import_base(engine: DockerEngine, say: Say) -> str:
    """The name of the minimal Debian in the engine, imported from this host's cache if missing."""
    name = f"cleave-base:{base_key()}"
    if engine.image_sources(name) is None:
        file = cached_base(say)
        say("handing the base to the engine")
        repository, tag = name.split(":")
        engine.do("import the base", engine.client.api.import_image, src=str(file), repository=repository, tag=tag)
    return name


def base_key() -> str:
    return f"{RELEASE}-{platform.machine()}-{hashlib.sha256(INCLUDED.encode()).hexdigest()[:8]}"


def cached_base(say: Say) -> Path:
    """A tar file of the minimal Debian; takes about two minutes if it is not cached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleave"
    file = cache / f"base-{base_key()}.tar"
    if file.is_file():
        return file
    if shutil.which("debootstrap") is None:
        raise UserError("BASE=debootstrap needs debootstrap: install it (Debian, Ubuntu: apt install debootstrap)")
    if os.geteuid() != 0:
        raise UserError("debootstrap needs root: sudo make image BASE=debootstrap; or give BASE an image that is there")
    cache.mkdir(parents=True, exist_ok=True)
    say(f"debootstrap {RELEASE}; about two minutes, once")
    with tempfile.TemporaryDirectory(prefix="cleave-base-", dir=cache) as folder:
        rootfs = Path(folder) / "rootfs"
        command = ["debootstrap", "--variant=minbase", f"--include={INCLUDED}", RELEASE, str(rootfs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failure(f"debootstrap failed: {(done.stderr or done.stdout).strip()[-500:]}")
        for needless in NEEDLESS:
            for thing in _inside(rootfs / needless):
                shutil.rmtree(thing) if thing.is_dir() and not thing.is_symlink() else thing.unlink()
        with tarfile.open(Path(folder) / "base.tar", "w") as archive:
            archive.add(rootfs, arcname=".", filter=_no_devices)
        (Path(folder) / "base.tar").rename(file)  # atomic
    return file


def _inside(folder: Path) -> Iterator[Path]:
    return iter(list(folder.iterdir()) if folder.is_dir() else [])


def _no_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.isdev() and not member.isfile() else member  # the engine makes its own device files


def _wheels(folder: Path) -> list[Path]:
    """The image's packages for this host's processor and the base's Python, fetched by this host's pip."""
    pinned = [
        line
        for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
        if line.split("==")[0] in PACKAGES
    ]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--no-deps", "--python-version", PYTHON, "--dest", str(folder), *pinned]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"pip could not fetch the image's packages: {done.stderr.strip()[-500:]}")
    return sorted(folder.glob("*.whl"))
