"""Runs a shell script inside Termux from a computer, without root. There are two ways, neither made for the purpose.

- `run-as com.termux`, if this Termux is a debuggable build (the APKs of its GitHub releases are, F-Droid's are not).
  The script goes in on standard input and its output comes back; the screen may be off.
- Otherwise typing: bring Termux to the front and enter a short line as if on a keyboard. The line fetches the script
  over `adb reverse` and sends its output back the same way. The screen must be on and unlocked.

Termux's own RUN_COMMAND intent does not work: it needs a permission that adb's user cannot be given.
"""

from __future__ import annotations

import threading
from typing import Protocol

from agent.protocol.errors import Failure
from android.adb import Adb
from android.serving import Serving

FILES = "/data/data/com.termux/files"
ENVIRONMENT = f"HOME={FILES}/home PREFIX={FILES}/usr PATH={FILES}/usr/bin TMPDIR={FILES}/usr/tmp LANG=en_US.UTF-8"
PRELUDE = """cd || exit 1
library="$PREFIX/lib/libtermux-exec.so"
[ ! -e "$library" ] || export LD_PRELOAD="$library"
"""
EXIT = "cleave-exit="  # marks the script's exit code, in the last line
FOCUS_TRIES, FOCUS_PAUSE_S = 20, 0.25


class ChannelError(Failure):
    """Termux cannot be reached; the text says what to do."""


class Channel(Protocol):
    name: str

    def run(self, script: str, limit_s: float) -> tuple[int, str]:
        """Exit code and output."""
        ...


class RunAs:
    name = "run-as"

    def __init__(self, adb: Adb, serial: str) -> None:
        self._adb, self._serial = adb, serial

    def run(self, script: str, limit_s: float) -> tuple[int, str]:
        words = f"run-as com.termux files/usr/bin/env {ENVIRONMENT} sh"
        answer = self._adb(self._serial, "shell", "-T", words, stdin=_wrapped(script), limit_s=limit_s)
        if self._adb.dry:
            return 0, ""
        return _unwrapped(answer.out) or (answer.code or 1, answer.out + answer.error)


class Typed:
    name = "typed"

    def __init__(self, adb: Adb, serial: str, serving: Serving) -> None:
        self._adb, self._serial, self._serving = adb, serial, serving

    def run(self, script: str, limit_s: float) -> tuple[int, str]:
        phone_script = self._serving.phone_script(_wrapped(script))
        place = f"{self._serving.url.removeprefix('http://')}/{phone_script.name}"
        line = f"curl -s {place}|sh 2>&1|curl -s --data-binary @- {place}"
        opened = self._adb(self._serial, "shell", "am start -n com.termux/.app.TermuxActivity")
        if opened.code or "Error" in opened.out + opened.error:
            raise ChannelError(f"Termux could not be opened: {opened.last_words}")
        self._wait_for_focus()
        for typed in (f"input text '{line.replace(' ', '%s')}'", "input keyevent 66"):
            done = self._adb(self._serial, "shell", typed)
            if done.code or "SecurityException" in done.out + done.error:
                raise ChannelError(
                    f"this phone does not let adb type ({done.last_words}): switch on 'USB debugging (Security "
                    "settings)' in its developer options, or install Termux's debuggable build from GitHub"
                )
        if self._adb.dry:
            return 0, ""
        said = phone_script.wait(limit_s)
        if said is None:
            raise ChannelError(
                f"Termux did not answer within {limit_s:.0f} s: look at its screen. Is a program running in it, or has "
                "it never been opened before?"
            )
        return _unwrapped(said) or (1, said)

    def _wait_for_focus(self) -> None:
        """Wait until Termux has the focus, so that nothing is typed into another app."""
        for _ in range(FOCUS_TRIES):
            focus = self._adb(self._serial, "shell", "dumpsys window | grep mCurrentFocus")
            if "com.termux/" in focus.out or self._adb.dry:
                return
            threading.Event().wait(FOCUS_PAUSE_S)
        raise ChannelError("Termux is not on the phone's screen: unlock the phone, leave it on, and try again")


def _wrapped(script: str) -> str:
    return f'{PRELUDE}(\n{script}\n) </dev/null 2>&1\ncode=$?\necho\necho "{EXIT}$code"\n'


def _unwrapped(said: str) -> tuple[int, str] | None:
    output, mark, code = said.rpartition(EXIT)
    if not mark or not code.strip().isdigit():
        return None
    return int(code), output.rstrip("\n")
