"""A server in its own process, for attacks that may end it:
`python tests/helpers/lone_server.py FOLDER [predictable]`.

Prints its addresses in one line of JSON, and ends with its standard input. "predictable": the names of its connections
begin at libzmq's unseeded first one, so that the attacker's guess is always right.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from pathlib import Path

from ps.access import listening
from ps.access.access_file import AccessFile
from ps.transport.server import Server


def main(folder: str, *options: str) -> None:
    if "predictable" in options:
        listening.unpredictable = lambda: ctypes.CDLL(None).srand(1)  # type: ignore[attr-defined]
    server = Server(listen=["tcp://127.0.0.1:0"], access=AccessFile(Path(folder)))
    server.notice = lambda text: None
    server.start()
    where = {
        "address": server.address,
        "enrolment": server.enrolment_addresses[0],
        "key": server.public_key,
        "data": server.data_address,
        "password": server.pod_pass["password"],
    }
    print(json.dumps(where), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    server.stop()
    print(f"ended {server.error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
