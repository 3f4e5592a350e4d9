"""Builds the bundle that phones install: the agent package in one zip file, which Python runs without unpacking.

One file is replaced atomically, so an interrupted update leaves the old agent or the new one. Entries are neither
compressed nor dated: the same sources give the same bytes on every machine, and the checksum identifies the agent.
`bootstrap.sh` is included for the phone's `cleave-agent` command. A release carries its number; a build without one is
for development, and older than any release.

    python -m android.bundle --out agent.zip
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import agent
from agent.identity.release import BUNDLE
from agent.protocol.errors import UserError

NAME = BUNDLE
SCRIPT = Path(__file__).with_name("bootstrap.sh")
NUMBERED = "agent/identity/release_number.py"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest date that a zip can hold


@dataclass(frozen=True, slots=True)
class Bundle:
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def build(package: Path | None = None, release: int = 0) -> Bundle:
    """Pack the modules of the agent package and the script, sorted by name. The same sources and number give the same
    bytes."""
    folder = package or Path(agent.__file__).parent
    files = {f"agent/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")}
    files[SCRIPT.name] = SCRIPT
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.create_system = 3  # Unix, whatever the build host
            entry.external_attr = 0o644 << 16
            data = files[name].read_bytes()
            archive.writestr(entry, _numbered(data, release) if name == NUMBERED and release else data)
    return Bundle(out.getvalue())


def _numbered(source: bytes, release: int) -> bytes:
    text = re.sub(rb"^RELEASE = 0\b.*$", b"RELEASE = %d" % release, source, count=1, flags=re.MULTILINE)
    if text == source:
        raise UserError(f"{NUMBERED} has no line for the number of the release; take a checkout that is whole")
    return text


def bootstrap(bundle: Bundle, url: str) -> bytes:
    """The script for a phone, with the bundle's URL and checksum filled in."""
    text = SCRIPT.read_text(encoding="utf-8")
    return text.replace("@URL@", url.rstrip("/")).replace("@SHA256@", bundle.sha256).encode()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m android.bundle", description="Write the agent as one file.")
    parser.add_argument("--out", type=Path, default=Path(NAME), help="the file (%(default)s)")
    options = parser.parse_args(arguments)
    bundle = build()
    try:
        options.out.write_bytes(bundle.data)
    except OSError as error:
        print(f"bundle: cannot write {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{bundle.sha256}  {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
