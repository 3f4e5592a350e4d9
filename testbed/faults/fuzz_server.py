"""The server that `testbed/faults/fuzz.py` attacks, in its own process. It computes and checks products all the time.
Prints lines of JSON: first its addresses; what it keeps, for each line of standard input; at the end of standard input,
the outcome."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.ma  # np.unique loads it at first use: 1.5 MiB that would look like growth

from emulator.pods.pod import die_with_parent
from ps.access.access_file import AccessFile
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server
from testbed.faults.memory import memory

SIZE = 32
PATIENCE_S = 60.0


def main() -> int:
    die_with_parent()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    access = AccessFile(Path(sys.argv[1]))
    said: Counter[str] = Counter()
    server = Server(heartbeat_s=0.2, listen=["tcp://127.0.0.1:0"], access=access)
    server.notice = lambda text: said.update([text.split(":")[0].split(" (")[0]])
    server.start()
    where = {
        "plain": server.address,
        "data": server.data_address,
        "encrypted": server.public_addresses[0],
        "enrolment": server.enrolment_addresses[0],
        "key": server.public_key,
        "pass": server.pod_pass,
    }
    print(json.dumps(where))
    sys.stdout.flush()
    ended = threading.Event()
    threading.Thread(target=_answer, args=(server, ended), daemon=True).start()
    rng, products, wrong = np.random.default_rng(0), 0, 0
    while not ended.wait(1.0):
        left, right = (rng.standard_normal((1, SIZE, SIZE), dtype=np.float32) for _ in range(2))
        out, done = np.zeros((1, SIZE, SIZE), np.float32), threading.Event()
        server.submit(Product(Operand(left), Operand(right), out, done.set))
        if not done.wait(PATIENCE_S):
            break
        products += 1
        wrong += not np.allclose(out, left @ right.transpose(0, 2, 1), rtol=1e-4, atol=1e-3)
    server.stop()
    outcome = {
        "products": products,
        "wrong": wrong,
        "waits": not ended.is_set(),
        "error": repr(server.error) if server.error else None,
        "dropped": server.totals.dropped_messages,
        "refused": server.refused,
        "said": dict(said.most_common(12)),
        "longest_turn_s": server.totals.longest_turn_s,
        "enrolled": len(access.read().enrolled),
        "kept": {
            "joined": server.roster.joined,
            "numbers": len(server.labels),
            "worked": len(set(server.records.columns().get("device", np.empty(0)).tolist())),
            "losses": len(server.records.losses),
        },
    }
    print(json.dumps(outcome))
    return 0


def _answer(server: Server, ended: threading.Event) -> None:
    """Answer every line of standard input, until its end."""
    for _ in sys.stdin:
        found = memory()
        look = {
            "devices": server.devices,
            "products": server.records.products,
            "memory": asdict(found) if found is not None else None,
        }
        print(json.dumps(look), flush=True)
    ended.set()


if __name__ == "__main__":
    sys.exit(main())
