"""Training text: bytes as tokens. The default corpus is the Python standard library's own source, which every machine
has without a download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

from agent.protocol.errors import UserError

STANDARD_LIBRARY_BYTES = 4 << 20  # enough for any short run, and quick to read


class TextError(UserError):
    """The text cannot be used; the message says why and what to do."""


def read_text(source: str) -> bytes:
    if source == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        parts, size = [], 0
        for path in sorted(folder.glob("*.py")):
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size >= STANDARD_LIBRARY_BYTES:
                break
        return b"".join(parts)
    try:
        return Path(source).expanduser().read_bytes()
    except OSError as error:
        raise TextError(
            f'cannot read the text {source}: {error.strerror}. Give a path to a file, or "stdlib" for the default'
        ) from None


def batches(text: bytes, count: int, batch: int, sequence: int, seed: int) -> list[torch.Tensor]:
    """`count` batches of random windows of the text, the same for the same seed."""
    if len(text) <= sequence:
        raise TextError(f"the text has {len(text)} bytes; a sequence of {sequence} needs more")
    rng = np.random.default_rng(seed)
    data = np.frombuffer(text, np.uint8)
    starts = rng.integers(0, len(data) - sequence, size=(count, batch))
    windows = data[starts[..., None] + np.arange(sequence)]
    return list(torch.from_numpy(windows.astype(np.int64)))
