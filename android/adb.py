"""Talks to phones through `adb`: lists them, reads their facts, explains their errors.

Parsing is pure. `Adb` runs the program with a time limit per call; in a dry run it prints every command and runs only
those that change nothing.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from agent.protocol.errors import UserError

LIMIT_S = 30.0

# adb's states, explained to the person at the cable
STATES = {
    "unauthorized": "not allowed yet: unlock the phone and accept 'Allow USB debugging?' on its screen",
    "authorizing": "being allowed: look at the phone's screen, then try again",
    "offline": "offline: unplug it and plug it in again, or reconnect wireless debugging (adb connect)",
    "connecting": "connecting: try again in a moment",
    "no permissions": "no permission for the USB port: apt install android-sdk-platform-tools-common, plug it in again",
    "recovery": "in recovery mode: start Android",
    "sideload": "in recovery mode: start Android",
    "rescue": "in recovery mode: start Android",
    "bootloader": "in its bootloader: start Android",
}

# everything that adb's own user may read, in one call; run-as works if this Termux is a debuggable build
FACTS = """echo "model=$(getprop ro.product.model)"
echo "android=$(getprop ro.build.version.release)"
echo "soc=$(getprop ro.soc.model)"
echo "board=$(getprop ro.board.platform)"
echo "memory=$(grep MemTotal /proc/meminfo)"
echo "termux=$(pm path com.termux 2>/dev/null | head -n 1)"
echo "run_as=$(run-as com.termux echo yes 2>/dev/null)"
dumpsys battery"""


@dataclass(frozen=True, slots=True)
class Attached:
    serial: str
    state: str  # "device" means ready

    @property
    def trouble(self) -> str:
        """Why the phone cannot be used; empty if it can."""
        if self.state == "device":
            return ""
        known = next((words for state, words in STATES.items() if self.state.startswith(state)), None)
        return known or f"adb calls it {self.state!r}: unplug it and plug it in again"


@dataclass(frozen=True, slots=True)
class Facts:
    model: str
    android: str
    soc: str
    memory_bytes: int | None
    battery: str
    termux: bool
    run_as: bool


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    error: str

    @property
    def last_words(self) -> str:
        lines = (self.error or self.out).strip().splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


def parse_devices(text: str) -> list[Attached]:
    """Parse `adb devices -l`: a serial, a state that may have spaces and a hint in brackets, then key:value pairs."""
    found = []
    for line in text.splitlines():
        match = re.match(r"(\S+)\s+(no permissions|[a-z]+)(?=\s|$)", line)
        if match and not line.startswith(("List of devices", "*", "adb")):
            found.append(Attached(match[1], match[2]))
    return found


def parse_facts(text: str) -> Facts:
    pairs = dict(line.partition("=")[::2] for line in text.splitlines() if re.match(r"[a-z_]+=", line))
    battery = dict(re.findall(r"^\s+([A-Za-z ]+): (.*)$", text, flags=re.MULTILINE))
    powered = any(battery.get(f"{source} powered") == "true" for source in ("AC", "USB", "Wireless", "Dock"))
    level = battery.get("level", "").strip()
    memory = re.search(r"(\d+) kB", pairs.get("memory", ""))
    return Facts(
        model=pairs.get("model", "").strip() or "unknown",
        android=pairs.get("android", "").strip() or "?",
        soc=pairs.get("soc", "").strip() or pairs.get("board", "").strip() or "?",
        memory_bytes=1024 * int(memory[1]) if memory else None,
        battery=f"{level}%{', charging' if powered else ''}" if level else "?",
        termux=pairs.get("termux", "").startswith("package:"),
        run_as=pairs.get("run_as", "").strip() == "yes",
    )


class Adb:
    def __init__(self, program: str = "adb", dry_run: Callable[[str], None] | None = None) -> None:
        """`dry_run` is called with every command; only commands that change nothing are then run."""
        self._program, self._tell = program, dry_run

    @property
    def dry(self) -> bool:
        return self._tell is not None

    def devices(self) -> list[Attached]:
        answer = self._run(["devices", "-l"], "", LIMIT_S, reads=True)
        if answer.code:
            raise UserError(f"adb does not work here: {answer.last_words}")
        return parse_devices(answer.out)

    def __call__(
        self, serial: str, *words: str, stdin: str = "", limit_s: float = LIMIT_S, reads: bool = False
    ) -> Answer:
        """`reads`: the command changes nothing on the phone."""
        return self._run(["-s", serial, *words], stdin, limit_s, reads)

    def _run(self, words: list[str], stdin: str, limit_s: float, reads: bool) -> Answer:
        if self._tell is not None:
            self._tell("\n  | ".join([shlex.join([self._program, *words]), *stdin.splitlines()]))
            if not reads:
                return Answer(0, "", "")
        try:
            done = subprocess.run(
                [self._program, *words],
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                start_new_session=True,  # adb's own server survives our Ctrl-C
            )
        except FileNotFoundError:
            raise UserError(
                f"{self._program} is not installed. Debian, Ubuntu: apt install adb; macOS: brew install "
                "android-platform-tools; or do without a cable: cleave phones invite"
            ) from None
        except subprocess.TimeoutExpired:
            return Answer(124, "", f"no answer within {limit_s:.0f} s")
        return Answer(done.returncode, done.stdout.replace("\r\n", "\n"), done.stderr)
