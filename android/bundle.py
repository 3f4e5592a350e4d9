"""What a phone installs: the agent package in one zip, from which Python runs it without unpacking.

One file is replaced in one move, so an update that is cut off leaves the old agent or the new one. Nothing in it is
compressed or dated: the same sources give the same bytes on every machine, and the checksum says which agent it is.
`bootstrap.sh` rides along, for the phone's own `cleave-agent` command.

    python -m android.bundle --out agent.zip
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import agent

NAME = "agent.zip"
SCRIPT = Path(__file__).with_name("bootstrap.sh")
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say


@dataclass(frozen=True, slots=True)
class Bundle:
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def build(package: Path | None = None) -> Bundle:
    """The modules of the agent package and the script, in the order of their names."""
    folder = package or Path(agent.__file__).parent
    files = {f"agent/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")}
    files[SCRIPT.name] = SCRIPT
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name].read_bytes())
    return Bundle(out.getvalue())


def bootstrap(bundle: Bundle, url: str) -> bytes:
    """The script as a phone gets it: it knows where the bundle is, and which one is the right one."""
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
