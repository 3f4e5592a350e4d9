"""Deploys the agent over adb to all attached phones in parallel, by cable or wireless adb.

A phone reaches the server through `adb reverse`, so it needs no Wi-Fi; the first time, Termux still fetches its
packages (Python, NumPy) from the internet. Results are reported per phone, and a phone that fails does not hold up
the others. Scripts run inside Termux through `android/channel.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent.protocol.errors import Failure, UserError
from android.adb import FACTS, Adb, Attached, Facts, parse_facts
from android.bundle import NAME
from android.channel import Channel, RunAs, Typed
from android.serving import Serving

AT_ONCE = 16  # phones
INSTALL_S, ORDER_S = 1200.0, 60.0  # time limits in Termux: an install that fetches packages, and one command
PUSHED = "/data/local/tmp/cleave"  # adb may write here, Termux may read
NO_TERMUX = "no Termux: install it from F-Droid or its GitHub releases (not the Play Store), open it once, try again"
EXAMPLE = Facts("EXAMPLE", "?", "?", None, "?", termux=True, run_as=True)


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on the phone's loopback. They differ from the server's own: adbd itself often listens on 5555."""

    server: int = 25555
    files: int = 25556
    enrolment: int = 25557


@dataclass(frozen=True, slots=True)
class Phone:
    """A phone's row in the result table."""

    serial: str
    facts: Facts | None = None
    kernel: str = ""
    gflops: float | None = None
    state: str = ""
    ok: bool = True
    log: str = ""

    @property
    def name(self) -> str:
        """The device name in a run's tables: the model and, as two may share it, the end of the serial."""
        model = self.facts.model if self.facts else "phone"
        return re.sub(r"[^A-Za-z0-9]+", "-", f"{model}-{self.serial[-4:]}").strip("-").lower()


class Deployment:
    def __init__(
        self, adb: Adb, serving: Serving, server_port: int, ports: Ports | None = None, enrol_port: int = 0
    ) -> None:
        """`server_port`: this machine's port for invited devices. `enrol_port`: the port that takes their invitation,
        by default the next one. `serving.url`: the URL that phones use."""
        self._adb, self._serving, self._server_port = adb, serving, server_port
        self._enrol_port = enrol_port or server_port + 1
        self.ports = ports or Ports()

    # ---- all phones

    def phones(self) -> list[Attached]:
        found = self._adb.devices()
        if not found and self._adb.dry:
            return [Attached("SERIAL", "device")]  # an example, to show what would be done
        if not found:
            raise UserError(
                "no phone is attached. On the phone: developer options, USB debugging on; then plug it in. Over Wi-Fi: "
                "wireless debugging on, then adb pair and adb connect. Without adb: cleave phones invite"
            )
        return found

    def each(self, action: Callable[[Phone, Channel], Phone]) -> list[Phone]:
        """Run the action on every usable phone; return a row for every phone."""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="phone") as pool:
            return list(pool.map(lambda attached: self._one(attached, action), self.phones()))

    def _one(self, attached: Attached, action: Callable[[Phone, Channel], Phone]) -> Phone:
        phone = Phone(attached.serial)
        if attached.trouble:
            return replace(phone, state=attached.trouble, ok=False)
        try:
            phone = replace(phone, facts=self._facts(attached.serial))
            assert phone.facts is not None
            if not phone.facts.termux:
                return replace(phone, state=NO_TERMUX, ok=False)
            return action(phone, self._channel(phone))
        except Failure as error:
            return replace(phone, state=str(error), ok=False)

    def _facts(self, serial: str) -> Facts:
        if self._adb.dry and serial == "SERIAL":
            self._adb(serial, "shell", FACTS)
            return EXAMPLE
        answer = self._adb(serial, "shell", FACTS, reads=True)
        if answer.code and not answer.out:
            raise Failure(f"it does not answer: {answer.last_words}")
        return parse_facts(answer.out)

    def _channel(self, phone: Phone) -> Channel:
        assert phone.facts is not None
        if phone.facts.run_as:
            return RunAs(self._adb, phone.serial)
        self._reverse(phone.serial, self.ports.files, self._serving.port)
        return Typed(self._adb, phone.serial, self._serving)

    def _reverse(self, serial: str, on_phone: int, here: int) -> None:
        answer = self._adb(serial, "reverse", f"tcp:{on_phone}", f"tcp:{here}")
        if answer.code:
            raise Failure(
                f"adb reverse was refused ({answer.last_words}): it needs Android 5, over wireless adb Android 9. "
                "Use a cable, or Wi-Fi without adb: cleave phones invite"
            )

    # ---- actions

    def start(self, phone: Phone, channel: Channel, link: str, options: Sequence[str] = ()) -> Phone:
        """Install or repair, then start, with an invitation that leads through the cable."""
        words = ["--no-boot", "--wake-lock", link, "--name", phone.name, *options]
        return self._install(phone, channel, words)

    def update(self, phone: Phone, channel: Channel) -> Phone:
        return self._install(phone, channel, ["update"])

    def _install(self, phone: Phone, channel: Channel, words: Sequence[str]) -> Phone:
        with TemporaryDirectory(prefix="cleave-") as folder:
            for name, data in ((NAME, self._serving.bundle.data), ("bootstrap.sh", self._serving.script)):
                path = Path(folder) / name
                path.write_bytes(data)
                path.chmod(0o644)
                pushed = self._adb(phone.serial, "push", str(path), f"{PUSHED}/{name}")
                if pushed.code:
                    raise Failure(f"the bundle could not be pushed: {pushed.last_words}")
        self._reverse(phone.serial, self.ports.server, self._server_port)
        self._reverse(phone.serial, self.ports.enrolment, self._enrol_port)
        self._reverse(phone.serial, self.ports.files, self._serving.port)
        code, said = channel.run(_install_script(self._serving, words), INSTALL_S)
        if code:
            return replace(phone, state=_last_line(said), ok=False, log=said)
        return replace(self.show(phone, channel), log=said)

    def show(self, phone: Phone, channel: Channel) -> Phone:
        code, said = channel.run("cleave-agent status --json", ORDER_S)
        if self._adb.dry:
            return phone
        return replace(phone, ok=code == 0, log=said, **read_status(code, said))

    def stop(self, phone: Phone, channel: Channel) -> Phone:
        code, said = channel.run("cleave-agent stop", ORDER_S)
        for port in (self.ports.server, self.ports.enrolment):
            self._adb(phone.serial, "reverse", "--remove", f"tcp:{port}")
        return replace(phone, state=_last_line(said), ok=code == 0, log=said)

    def logs(self, phone: Phone, channel: Channel, folder: Path) -> Phone:
        code, said = channel.run("cleave-agent log", ORDER_S)
        if self._adb.dry:
            return phone
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{phone.name}.log"
        path.write_text(said + "\n", encoding="utf-8")
        return replace(phone, state=f"{len(said.splitlines())} lines in {path}", ok=code == 0, log=said)


def _install_script(serving: Serving, words: Sequence[str]) -> str:
    """Installs from the pushed files or, where Android does not let Termux read them, over the cable. Checksums are
    verified either way: other apps may write to that folder and listen on that port."""
    checksum = hashlib.sha256(serving.script).hexdigest()
    return f"""script="$HOME/bootstrap.sh"
cp {PUSHED}/bootstrap.sh "$script" 2>/dev/null || curl -fsS -o "$script" {serving.url}/bootstrap.sh || exit 1
if ! echo "{checksum}  $script" | sha256sum -c - >/dev/null; then
    echo "the bootstrap script was changed on its way"
    exit 1
fi
CLEAVE_BUNDLE={PUSHED}/{NAME} sh "$script" {shlex.join(words)}"""


def read_status(code: int, said: str) -> dict[str, Any]:
    """Kernel, speed and state, from the output of the phone's `cleave-agent status --json`."""
    if code == 127:
        return {"state": "no agent: cleave phones start"}
    try:
        status = json.loads(_last_line(said))
        agent, running = status["agent"], status["running"]
    except (ValueError, KeyError, TypeError):
        return {"state": _last_line(said)}
    state = ": ".join(str(agent.get(key)) for key in ("state", "why")) if running else "stopped"
    gflops = agent["flops"] / 1e9 if isinstance(agent.get("flops"), float) else None
    return {"state": state, "kernel": str(agent.get("kernel", "")), "gflops": gflops}


def _last_line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1].removeprefix("cleave: ") if lines else "it said nothing"
