"""A stand-in for Termux: its folders, and its commands as scripts that behave as the real ones do.

PATH holds only what Termux has from the start, as links to this machine's programs, so that a script which needs more
fails here as on a phone. `pkg` and `pip` "install" by making packages of this test's Python visible; others cannot be
imported. Outputs were taken from reports of real phones. Unlike the real one, `pkg` works for root, and the processor
is this machine's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import debian
import psutil

BASE_TOOLS = """
    basename cat chmod cmp cp cut date dirname env false grep head kill ln ls mkdir mv nohup printf
    rm rmdir sed sha256sum sleep sort tail tee touch tr true uname wc
"""
SITE = Path(sysconfig.get_path("purelib"))
PACKAGES = {
    "python-numpy": ("numpy", "numpy.libs"),
    "python-onnxruntime": ("onnxruntime", "onnxruntime.libs", "flatbuffers", "google", "packaging"),
    "pyzmq": ("zmq", "pyzmq.libs"),
}
# `import onnxruntime` in Termux after its Python was updated to 3.13 (termux-packages, issue 28769)
NO_STATE = "raise ModuleNotFoundError(\"No module named 'onnxruntime.capi.onnxruntime_pybind11_state'\")\n"
CRASHES = "import os\nos.kill(os.getpid(), 11)\n"

BATTERY = """{
  "present": true,
  "technology": "Li-ion",
  "health": "GOOD",
  "plugged": "PLUGGED_USB",
  "status": "CHARGING",
  "temperature": 29.8,
  "voltage": 4099,
  "current": 420000,
  "percentage": 85,
  "level": 85,
  "scale": 100
}
"""
WIFI = """{
  "bssid": "02:00:00:00:00:00",
  "frequency_mhz": 5220,
  "ip": "192.0.2.44",
  "link_speed_mbps": 433,
  "mac_address": "02:00:00:00:00:00",
  "network_id": 0,
  "rssi": -51,
  "ssid": "<unknown ssid>",
  "ssid_hidden": true,
  "supplicant_state": "COMPLETED"
}
"""

_PKG = r"""#!/bin/sh
printf 'pkg %s\n' "$*" >>"$TERMUX_STANDIN/calls"
[ "$1" = uninstall ] && { shift 2; for name in "$@"; do rm -f "$TERMUX_STANDIN/installed/$name"; done; exit 0; }
[ "$1" = install ] || exit 1
if [ -e "$TERMUX_STANDIN/no-network" ]; then
    echo "Testing the available mirrors:"
    echo "[*] (1) https://packages-cf.termux.dev/apt/termux-main: bad"
    echo "Error: None of the mirrors are accessible"
    exit 1
fi
shift 2
if [ -e "$TERMUX_STANDIN/no-room" ]; then
    echo "Need to get 47.1 MB of archives."
    echo "E: You don't have enough free space in /data/data/com.termux/cache/apt/archives/."
    exit 100
fi
for name in "$@"; do
    [ -e "$TERMUX_STANDIN/repository/$name" ] || { echo "E: Unable to locate package $name"; exit 100; }
    echo "Setting up $name ..."
    sh "$TERMUX_STANDIN/repository/$name" || exit 100
done
"""

_DPKG = r"""#!/bin/sh
printf 'dpkg %s\n' "$*" >>"$TERMUX_STANDIN/calls"
case "$*" in
    --audit) cat "$TERMUX_STANDIN/half-installed" 2>/dev/null ;;
    "--configure -a") rm -f "$TERMUX_STANDIN/half-installed" ;;
esac
exit 0
"""

_PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then shift 2; exec "$TERMUX_STANDIN/pip" "$@"; fi
PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}$PREFIX/lib/site-packages" exec {python} -s -S "$@"
"""

_PIP = """#!/bin/sh
printf 'pip %s\\n' "$*" >>"$TERMUX_STANDIN/calls"
[ "$1" = --version ] && exit 0
if [ -e "$TERMUX_STANDIN/no-network" ]; then
    echo "WARNING: Retrying (Retry(total=0, connect=None, read=None)) after connection broken" \\
        "by 'NewConnectionError('[Errno 7] No address associated with hostname')': /simple/pyzmq/" >&2
    none=yes
fi
case "$*" in *only-binary*) [ ! -e "$TERMUX_STANDIN/no-wheel" ] || none=yes ;; esac
if [ -n "${none-}" ]; then
    echo "ERROR: Could not find a version that satisfies the requirement pyzmq (from versions: none)" >&2
    echo "ERROR: No matching distribution found for pyzmq" >&2
    exit 1
fi
sh "$TERMUX_STANDIN/repository/pyzmq"
echo "Successfully installed pyzmq-27.3.0"
"""


_CURL = """#!/bin/sh
exec {curl} --config "$TERMUX_STANDIN/curlrc" "$@"
"""


@dataclass
class Termux:
    root: Path
    shell: str

    @property
    def prefix(self) -> Path:
        return self.root / "data/data/com.termux/files/usr"

    @property
    def home(self) -> Path:
        return self.root / "data/data/com.termux/files/home"

    @property
    def standin(self) -> Path:
        return self.root / "standin"

    def make(self, onnxruntime: bool = False) -> Termux:
        """`onnxruntime`: pkg offers it; it takes a second to load."""
        for folder in (self.prefix / "bin", self.prefix / "lib/site-packages", self.home, self.standin / "repository"):
            folder.mkdir(parents=True)
        for tool in BASE_TOOLS.split():
            found = shutil.which(tool)
            assert found is not None, tool
            self._link(self.prefix / "bin" / tool, Path(found))
        self._script(self.prefix / "bin/curl", _CURL.format(curl=debian.program("curl", "curl")))
        (self.standin / "curlrc").touch()
        self._link(self.prefix / "bin/sh", Path(f"/bin/{self.shell}"))
        self._script(self.prefix / "bin/pkg", _PKG)
        self._script(self.prefix / "bin/dpkg", _DPKG)
        for lock in ("termux-wake-lock", "termux-wake-unlock"):
            self._script(self.prefix / "bin" / lock, f'#!/bin/sh\nprintf "{lock}\\n" >>"$TERMUX_STANDIN/calls"\n')
        for name, said in (("termux-battery-status", BATTERY), ("termux-wifi-connectioninfo", WIFI)):
            self._script(self.prefix / "bin" / name, f"#!/bin/sh\ncat <<'EOF'\n{said}EOF\n")
        python = _PYTHON.format(python=getattr(sys, "_base_executable", sys.executable))
        self._script(self.standin / "python", python)
        self._script(self.standin / "pip", _PIP)
        self.repository("python", 'cp "$TERMUX_STANDIN/python" "$PREFIX/bin/python"\n')
        for name, folders in PACKAGES.items():
            parts = [SITE / folder for folder in folders if (SITE / folder).exists()]
            self.repository(name, "".join(f'ln -sf "{part}" "$PREFIX/lib/site-packages/"\n' for part in parts))
        if not onnxruntime:
            self.repository("python-onnxruntime", None)
        return self

    def repository(self, package: str, install: str | None) -> None:
        """Set what `pkg install` of that package does; None: there is no such package."""
        path = self.standin / "repository" / package
        if install is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(install)

    def broken_onnxruntime(self, code: str) -> None:
        folder = "$PREFIX/lib/site-packages/onnxruntime"
        quoted = code.replace("'", "'\\''")
        self.repository(
            "python-onnxruntime", f"mkdir -p \"{folder}\"\nprintf '%s' '{quoted}' >\"{folder}/__init__.py\"\n"
        )

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PREFIX": str(self.prefix),
            "PATH": str(self.prefix / "bin"),
            "TERMUX_VERSION": "0.118.3",
            "TERMUX_STANDIN": str(self.standin),
        }

    def run(self, *words: str, before: tuple[str, ...] = (), limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in a Termux session without a terminal."""
        return subprocess.run(
            [*before, *words],
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            start_new_session=True,
        )

    def sh(self, line: str, **options: object) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.prefix / "bin/sh"), "-c", line, **options)  # type: ignore[arg-type]

    @property
    def calls(self) -> list[str]:
        path = self.standin / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def ours(self) -> list[str]:
        """New files in the home folder and among the commands."""
        left = [str(p.relative_to(self.home)) for p in self.home.rglob("*")]
        return left + [p.name for p in (self.prefix / "bin").glob("cleave*")]

    def end(self) -> None:
        """End everything that still runs in here, found by its environment."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("TERMUX_STANDIN") == str(self.standin):
                    process.kill()
            except (psutil.Error, OSError):  # gone, or another user's
                continue

    def _script(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def _link(self, path: Path, target: Path) -> None:
        path.symlink_to(target)
