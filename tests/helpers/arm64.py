"""An arm64 Python with the wheels that a phone's processor gets, run by qemu's user-mode emulation.

Debian's arm64 packages and PyPI's aarch64 wheels, in the versions of requirements.lock, unpacked into a folder under
/var/tmp that is kept for the next time: about 15 s, once. A program runs in it by chroot, in a mount namespace that
ends with it. It has no /sys: ONNX Runtime would take the host's processor for its own. Emulated arithmetic is hundreds
of times slower than native: good for promises, not for timings.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import debian
from places import ROOT

WHEELS = ("numpy", "pyzmq", "onnxruntime", "flatbuffers", "packaging", "protobuf")
DEBS = ("python3", "libstdc++6", "libgomp1")
KEPT_S = 7 * 86400.0  # lifetime of a folder of other versions: another checkout's test may use it


def command(root: Path, python_path: str, *words: str) -> list[str]:
    """The command that runs python3 with these words inside; root only."""
    enter = (
        'mount -t proc proc "$1/proc" && exec env -i PYTHONPATH="$2" HOME=/tmp PATH=/usr/bin '
        '/usr/sbin/chroot "$1" /usr/bin/qemu-aarch64-static /usr/bin/python3 "${@:3}"'
    )
    return ["unshare", "--mount", "bash", "-c", enter, "enter", str(root), python_path, *words]


def rootfs() -> Path:
    """The folder; created if missing."""
    qemu = debian.program("qemu-aarch64-static", "qemu-user-static")
    pinned = sorted(set(re.findall(rf"^(?:{'|'.join(WHEELS)})==\S+$", (ROOT / "requirements.lock").read_text(), re.M)))
    assert len(pinned) == len(WHEELS), pinned
    key = hashlib.sha256("\n".join([*pinned, *DEBS, Path(__file__).read_text()]).encode()).hexdigest()[:12]
    folder = Path(f"/var/tmp/cleave-arm64-{key}")
    with Path("/var/tmp/cleave-arm64.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            for old in Path("/var/tmp").glob("cleave-arm64-*"):
                if old == folder or time.time() - old.stat().st_mtime > KEPT_S:
                    shutil.rmtree(old)
            _make(folder, pinned)
            shutil.copy(qemu, folder / "usr/bin/qemu-aarch64-static")
            (folder / "ready").touch()
    return folder


def _make(folder: Path, wheels: list[str]) -> None:
    work = folder / "work"
    for part in ("work/lists/partial", "work/cache/archives/partial", "work/wheels", "proc", "tmp", "opt/site"):
        (folder / part).mkdir(parents=True)
    apt = _apt(work)
    _run([*apt, "update"])
    _run([*apt, "install", "-y", "--download-only", *DEBS])
    for package in sorted((work / "cache/archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(folder)])
    python = next((folder / "usr/bin").glob("python3.*")).name.removeprefix("python")
    platforms = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (28, 27, 26, 17)]
    abis = [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    fitting = [f"--python-version={python}", *abis, *platforms, "--platform=manylinux2014_aarch64"]
    _run([*download, *fitting, f"--dest={work / 'wheels'}", *wheels])
    for wheel in (work / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "opt/site")
    shutil.rmtree(work)


def _apt(work: Path) -> list[str]:
    """apt-get for arm64, with its own folders: this machine's packages are not touched."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"]
    lines = [line.split() for line in _run(asked).splitlines()]
    repository = next(uri for uri, release in lines if not release.endswith(("-security", "-updates")))
    release = next(release for uri, release in lines if uri == repository and "-" not in release)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (work / "sources.list").write_text(f"deb [arch=arm64 signed-by={keys}] {repository} {release} main\n")
    (work / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "root",
        "Dir::Etc::sourcelist": str(work / "sources.list"),
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": str(work / "lists"),
        "Dir::State::status": str(work / "status"),
        "Dir::Cache": str(work / "cache"),
        "Debug::NoLocking": "1",
    }
    return ["apt-get", "-qq", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
