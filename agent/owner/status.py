"""`python -m agent status`: what this device's agent does, and if nothing, why. Reads the status file that the running
agent keeps in its state folder, and evaluates the owner's rules afresh."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from agent.identity.release import signer_fingerprint
from agent.identity.release_number import RELEASE
from agent.identity.state import open_folder, read_json, write_json
from agent.identity.update_state import last_refusal, pinned_signer, waiting_release
from agent.owner.data_cap import Meter
from agent.owner.rules_file import read_rules, rules_file
from agent.owner.watch import Watch
from agent.protocol.errors import UserError
from agent.protocol.units import format_duration, format_size

FILE = "status.json"


class Status:
    """The status file, written by the running agent."""

    def __init__(self, folder: Path, **about: Any) -> None:
        self._path, self._about = folder / FILE, {"pid": os.getpid(), **about}

    def tell(self, state: str, why: str, until_s: float | None) -> None:
        now = time.time()
        known = {"state": state, "why": why, "since": now, "until": None if until_s is None else now + until_s}
        with contextlib.suppress(UserError):  # a full disk must not stop the agent
            write_json(self._path, self._about | known, durable=False)


def found(folder: Path, rules: Path) -> dict[str, Any]:
    """The agent's own status, and what the rules say now. RulesError if they cannot be read."""
    with Watch(rules, read_rules(rules), Meter(folder / "traffic.json"), over_cable=False) as watch:
        decision, readings = watch.decision, watch.readings
    agent = read_json(folder / FILE)
    running = isinstance(agent.get("pid"), int) and agent.get("state") != "ended" and _alive(agent["pid"])
    return {
        "running": running,
        "agent": agent,
        "may_work": decision.may_work,
        "reason": decision.reason,
        "until_s": decision.until_s,
        "unknown": list(decision.unknown),
        "plugged": readings.plugged,
        "battery": readings.battery,
        "temperature": readings.temperature,
        "network": readings.network,
        "data_bytes_today": readings.data_bytes,
        "data_cap_bytes": watch.rules.data_cap_a_day,
        "updates": _updates(folder),
    }


def _updates(folder: Path) -> dict[str, Any]:
    signer, refused = pinned_signer(folder), last_refusal(folder)
    return {
        "release": RELEASE,
        "signer": signer_fingerprint(signer) if signer else None,
        "waiting": waiting_release(folder),
        "refused": refused and refused[1],
        "refused_at": refused and refused[0],
    }


def lines(status: dict[str, Any]) -> list[str]:
    agent = status["agent"]
    if not status["running"]:
        said = "the agent is not running"
        if agent.get("state") == "refused":
            said += f"; the server refused it: {agent.get('why')}"
    else:
        said = f"the agent {agent.get('name')} (process {agent.get('pid')}): {agent.get('state')}, {agent.get('why')}"
        if isinstance(until := agent.get("until"), int | float) and until > time.time():
            said += f", for another {format_duration(until - time.time())}"
    shown = [said]
    if status["may_work"]:
        shown.append("the owner's rules allow it to work now")
    else:
        wait = "" if status["until_s"] is None else f"; for another {format_duration(status['until_s'])}"
        shown.append(f"the owner's rules do not allow it to work now: {status['reason']}{wait}")
    shown += [f"the rule {rule} cannot be followed: its sensor is missing" for rule in status["unknown"]]
    cap = "" if status["data_cap_bytes"] is None else f" of {format_size(status['data_cap_bytes'])}"
    shown.append(f"moved today: {format_size(status['data_bytes_today'])}{cap}")
    updates = status["updates"]
    if updates["waiting"]:
        by = f"signed by {updates['signer']}"
        shown.append(f"release {updates['waiting']}, {by}, waits for your yes: python -m agent update")
    if updates["refused"]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(updates["refused_at"]))
        shown.append(f"an update was refused ({at}): {updates['refused']}")
    return shown


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m agent status", description="What the agent does, and why not.")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--state", metavar="FOLDER", help="of the agent, if it has its own")
    options = parser.parse_args(words)
    logging.disable(logging.WARNING)  # missing sensors are part of the output
    try:
        status = found(open_folder(options.state), rules_file())
    except UserError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(status | {"at": datetime.now().astimezone().isoformat(timespec="seconds")}))
    else:
        print("\n".join(lines(status)))
    return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
