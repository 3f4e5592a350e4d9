"""A stand-in for adb and the phones behind it; run as a program named `adb`.

It answers like the real one (Debian's 1.0.41), refusals with their words and exit codes. Inside a phone is a stand-in
Termux (tests/helpers/termux.py): commands really run there. `phones.json` beside it lists the attached phones; calls
are written to `adb-calls`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(sys.argv[0]).resolve().parent
UNAUTHORIZED = """adb: device unauthorized.
This adb server's $ADB_VENDOR_KEYS is not set
Try 'adb kill-server' if that seems wrong.
Otherwise check for a confirmation dialog on your device."""


def end(code: int, out: str = "", error: str = "") -> NoReturn:
    print(out, end="" if out.endswith("\n") or not out else "\n")
    print(error, end="" if not error else "\n", file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)


def main(words: list[str]) -> None:
    phones: dict[str, dict[str, Any]] = json.loads((HERE / "phones.json").read_text())
    with (HERE / "adb-calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words == ["devices", "-l"]:
        lines = [
            f"{serial:<22} {phone['state']} {phone.get('more', 'transport_id:1')}" for serial, phone in phones.items()
        ]
        end(0, "\n".join(["List of devices attached", *lines, ""]))
    assert words[0] == "-s", words
    serial, command = words[1], words[2:]
    if serial not in phones:
        end(1, error=f"adb: device '{serial}' not found")
    phone = phones[serial]
    if phone["state"] == "unauthorized":
        end(1, error=UNAUTHORIZED)
    if phone["state"] != "device":
        end(1, error="adb: device offline")
    match command:
        case ["push", source, target]:
            place = HERE / serial / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
            end(0, f"{source}: 1 file pushed, 0 skipped. 21.4 MB/s ({place.stat().st_size} bytes in 0.009s)")
        case ["reverse", *_] if "reverse" in phone:
            end(1, error=phone["reverse"])
        case ["reverse", "--remove", _]:
            end(0)
        case ["reverse", there, here]:
            reverse(phone, there.removeprefix("tcp:"), here.removeprefix("tcp:"))
            end(0, there.removeprefix("tcp:"))
        case ["shell", *script]:
            shell(serial, phone, next(word for word in script if word != "-T"))
    end(1, error=f"adb: unknown command {command[0]}")


def reverse(phone: dict[str, Any], there: str, here: str) -> None:
    """The phone's loopback is this machine's: its curl is redirected."""
    path = Path(phone["environment"]["TERMUX_STANDIN"]) / "curlrc"
    others = [line for line in path.read_text().splitlines() if f'"127.0.0.1:{there}:' not in line]
    path.write_text("\n".join([*others, f'connect-to = "127.0.0.1:{there}:127.0.0.1:{here}"', ""]))


def shell(serial: str, phone: dict[str, Any], script: str) -> None:
    if "getprop" in script:
        end(0, facts(phone))
    if script.startswith("run-as"):
        if not phone["run_as"]:
            end(1, error="run-as: package not debuggable: com.termux")
        termux(serial, phone, sys.stdin.read(), wait=True)
    if script.startswith("am start"):
        end(0, "Starting: Intent { cmp=com.termux/.app.TermuxActivity }")
    if script.startswith("dumpsys window"):
        end(0, f"  mCurrentFocus=Window{{8c1f0d6 u0 {phone.get('focus', 'com.termux/com.termux.app.TermuxActivity')}}}")
    keyboard = HERE / serial / "keyboard"
    if typed := re.fullmatch(r"input text '(.*)'", script):
        if "typing" in phone:
            end(255, error=phone["typing"])
        keyboard.parent.mkdir(exist_ok=True)
        keyboard.write_text(typed[1].replace("%s", " "))
        end(0)
    if script == "input keyevent 66":
        termux(serial, phone, keyboard.read_text(), wait=False)
    end(127, error=f"/system/bin/sh: {script.split()[0]}: inaccessible or not found")


def facts(phone: dict[str, Any]) -> str:
    termux = "package:/data/app/~~x==/com.termux-y==/base.apk" if phone["termux"] else ""
    return f"""model={phone["model"]}
android=14
soc={phone.get("soc", "Tensor G2")}
board=gs201
memory=MemTotal:        7787208 kB
termux={termux}
run_as={"yes" if phone["run_as"] else ""}
Current Battery Service state:
  AC powered: false
  USB powered: true
  Wireless powered: false
  Dock powered: false
  Max charging current: 500000
  status: 2
  health: 2
  present: true
  level: 85
  scale: 100
  voltage: 4099
  temperature: 298
  technology: Li-ion
"""


def termux(serial: str, phone: dict[str, Any], script: str, wait: bool) -> None:
    """In the stand-in Termux of this phone, whose folders differ from a real one's."""
    script = script.replace("/data/local/tmp", str(HERE / serial / "data/local/tmp"))
    process = subprocess.Popen(
        [f"{phone['environment']['PREFIX']}/bin/sh", "-c", script],
        env=phone["environment"],
        cwd=phone["environment"]["HOME"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if wait else subprocess.DEVNULL,
        stderr=subprocess.STDOUT if wait else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    said = process.communicate()[0] if wait else ""
    end(process.returncode if wait else 0, said)


main(sys.argv[1:])
