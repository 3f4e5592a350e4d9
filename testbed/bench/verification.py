"""Verification: is an honest block accused (testbed/bench/honest.py), and are lies found (testbed/bench/lies.py)?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.bench import honest, lies

BLOCKS = 10_000_000


def measure(blocks: int = BLOCKS, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    return {"honest": honest.measure(blocks, say), **lies.measure(say)}
