"""A kernel that has netem, for tests: Debian's user-mode Linux, an ordinary program that boots in seconds and sees this
machine's files, read-only. A command runs there as root, with namespaces and interfaces that exist only there.

The kernel and a static busybox (for `insmod`) are downloaded once as Debian packages and unpacked, not installed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import debian

CACHE = Path(os.environ.get("CLEAVE_TEST_CACHE", "/var/tmp/cleave-tests")) / "netem-kernel"
MODULES = ("sch_netem", "sch_htb", "cls_bpf", "veth")
MEMORY = "512M"
BOOT_S = 110.0  # includes the command; a busy machine needs long
_INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t devtmpfs dev /dev
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
export TMPDIR=/dev/shm
for module in {modules}; do {busybox} insmod "$module"; done
mount -t hostfs none /mnt -o {folder}
cd {here} && export PYTHONPATH={here}
{command} >/mnt/output 2>&1 </dev/null
echo $? >/mnt/code
{busybox} umount /mnt
{busybox} poweroff -f
"""


def why_not() -> str | None:
    """What this machine lacks; None if nothing."""
    if os.uname().machine != "x86_64":
        return "Debian has user-mode Linux for x86_64 only"
    if (CACHE / "ready").exists():
        return None
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "the packages user-mode-linux and busybox-static come from Debian's apt-get, which is not here"
    return None


def run(command: list[str], here: Path) -> subprocess.CompletedProcess[str]:
    """Run the command on the other kernel: its output, both streams, and its exit code."""
    fetch()
    busybox = CACHE / "root/bin/busybox"
    with tempfile.TemporaryDirectory(prefix="cleave-netem-") as text:
        folder = Path(text)
        init = folder / "init"
        init.write_text(
            _INIT.format(
                modules=" ".join(map(str, _modules())),
                busybox=busybox,
                folder=folder,
                here=shlex.quote(str(here)),
                command=shlex.join(command),
            )
        )
        init.chmod(0o755)
        kernel = [str(CACHE / "root/usr/bin/linux.uml"), f"mem={MEMORY}", "rootfstype=hostfs", "rootflags=/", "ro"]
        kernel += [
            f"init={init}",
            "con=null",
            "con0=null,fd:1",
            "quiet",
            f"umid={folder.name}",
            f"uml_dir={folder}/uml",
        ]
        console = _boot(kernel)
        code, output = folder / "code", folder / "output"
        if not code.exists():
            raise RuntimeError(f"the kernel did not come to the command's end; it said:\n{console}")
        return subprocess.CompletedProcess(command, int(code.read_text()), output.read_text(errors="replace"), "")


def _boot(kernel: list[str]) -> str:
    """Boot and return the console's output; all of the kernel's processes have ended then."""
    process = subprocess.Popen(
        kernel,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": "/dev/shm"},
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=BOOT_S)[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def fetch() -> None:
    """Download and unpack what is not there yet."""
    with debian.apt():
        if not (CACHE / "ready").exists():
            _unpack()


def _unpack() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)
    packages = CACHE / "packages"
    packages.mkdir(parents=True)
    download = ["apt-get", "download", "-q", "user-mode-linux", "busybox-static"]
    if subprocess.run(download, cwd=packages, capture_output=True).returncode:  # apt may have no package lists yet
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        subprocess.run(download, cwd=packages, check=True, capture_output=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(CACHE / "root")], check=True)
        package.unlink()
    (CACHE / "ready").touch()


def _modules() -> list[Path]:
    """The wanted modules and their dependencies, in load order."""
    (folder,) = (CACHE / "root/usr/lib/uml/modules").iterdir()
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        module, _, others = line.partition(":")
        needs[Path(module).stem] = [*reversed(others.split()), module]
    ordered = dict.fromkeys(path for name in MODULES for path in needs[name])
    return [folder / path for path in ordered]
