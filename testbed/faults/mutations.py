"""Mutated messages: valid messages of every kind, damaged as machines and attackers would damage them. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    ANSWER,
    BLOCK,
    DONE,
    FAILED,
    OUTER_MAJOR,
    PIECE,
    REFERENCE,
    Cancel,
    Goodbye,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    Probe,
    Refused,
    Result,
    Ticket,
    Welcome,
    Work,
    encode,
)

Frames = list[bytes]
PROFILE = Profile(1e9, 1e-4, 1e8, 1e7, 0.01, 1 << 28, 4)
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
ODD_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    float("inf"),
    "",
    "x" * 5000,
    [],
    {},
    [[[]]],
    "\ud800",
    "\x1b[2J",
    2**70,
)


def valid_messages(token: str) -> list[Frames]:
    """One message of every kind, including those that only a server sends."""
    profiles = pack_profiles([PROFILE])
    answers = np.array([(0, 3, 1, DONE, 4, 0.1, 0), (0, 3, 2, FAILED, 0, 0.0, 0)], ANSWER)
    work = Work(
        1,
        np.array([5], np.uint32),
        np.array([(1, OUTER_MAJOR, 1, 2, 2), (2, OUTER_MAJOR, 1, 2, 2)], PIECE),
        np.array([(0, 3, 1, 1, 2, 0, 0, 0, 0, 1, 2, 2, 0, 1, 32)], BLOCK),
        [bytes(16), bytes(16)],
    )
    messages: list[Message] = [
        Join(profiles, ["fuzz"], {"kernel": "none"}),
        Join(np.repeat(profiles, 3), ["a", "b", "c"], {}),
        Welcome(0.5, "run"),
        Refused("no", final=False),
        work,
        Result(answers, np.arange(4, dtype=np.float32)),
        Cancel(np.array([(0, 3, 1)], REFERENCE)),
        Heartbeat(),
        Leave(np.array([0], np.uint32), "going"),
        Goodbye("over"),
        Probe(7, 10, bytes(5)),
        Hello("fuzz", token),
        Ticket(5555, "x" * 22),
    ]
    return [[bytes(frame) for frame in encode(message)] for message in messages]


def mutated(frames: Frames, rng: random.Random) -> Frames:
    """The same message with one to three mutations."""
    frames = list(frames)
    for _ in range(rng.choice((1, 1, 2, 3))):
        frames = rng.choice(_MUTATIONS)(frames, rng)
    return frames


def raw_bytes(recorded: bytes, rng: random.Random) -> bytes:
    """What may arrive on a bare TCP connection: noise, another protocol, or a damaged recorded handshake."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 9, 64, 300, 5000)))
        case 1:
            return rng.choice((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n"))
        case 2:
            return recorded[: rng.randrange(len(recorded) + 1)]
        case _:
            return b"".join(_flip([recorded], rng))


def _pick(frames: Frames, rng: random.Random) -> int:
    return rng.randrange(len(frames)) if frames else -1


def _flip(frames: Frames, rng: random.Random) -> Frames:
    at = _pick(frames, rng)
    if at < 0 or not frames[at]:
        return frames
    changed = bytearray(frames[at])
    for _ in range(rng.choice((1, 1, 1, 4, 16))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return [*frames[:at], bytes(changed), *frames[at + 1 :]]


def _number(frames: Frames, rng: random.Random) -> Frames:
    """Replace a number with one that programs tend to mishandle."""
    at = _pick(frames, rng)
    if at < 0 or len(frames[at]) < 4:
        return frames
    size = rng.choice((1, 2, 4, 8))
    value = (rng.choice(INTERESTING) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    start = rng.randrange(len(frames[at]))
    changed = (frames[at][:start] + value + frames[at][start + size :])[: len(frames[at])]
    return [*frames[:at], changed, *frames[at + 1 :]]


def _length(frames: Frames, rng: random.Random) -> Frames:
    at = _pick(frames, rng)
    if at < 0:
        return frames
    frame = frames[at]
    shorter = frame[: rng.randrange(len(frame) + 1)]
    return [*frames[:at], rng.choice((shorter, frame + rng.randbytes(rng.randrange(1, 40)))), *frames[at + 1 :]]


def _frames(frames: Frames, rng: random.Random) -> Frames:
    """One frame too many or too few, another order, or very many."""
    at = _pick(frames, rng)
    match rng.randrange(5):
        case 0:
            return frames[:at] + frames[at + 1 :]
        case 1:
            return [*frames, rng.randbytes(rng.randrange(50))]
        case 2:
            return rng.sample(frames, len(frames))
        case 3:
            return [*frames, *[b""] * rng.choice((1, 10, 300))]
        case _:
            return [*frames[: at + 1], *frames[at:]]


def _kind(frames: Frames, rng: random.Random) -> Frames:
    """Header and body of different kinds."""
    if not frames or len(frames[0]) < 8:
        return frames
    head = bytearray(frames[0])
    head[rng.choice((4, 5, 5, 5, 5))] = rng.randrange(16)
    return [bytes(head), *frames[1:]]


def _text(frames: Frames, rng: random.Random) -> Frames:
    """JSON with another value, or not JSON at all."""
    places = [at for at, frame in enumerate(frames) if frame[:1] == b"{"]
    if not places:
        return frames
    at = rng.choice(places)
    try:
        value = json.loads(frames[at])
    except ValueError:
        return frames
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        value[key] = rng.choice(ODD_VALUES)
    else:
        value = rng.choice(ODD_VALUES)
    text = json.dumps(value).encode()
    if rng.random() < 0.1:
        text = b"[" * rng.choice((10, 100_000))
    return [*frames[:at], text, *frames[at + 1 :]]


_MUTATIONS: tuple[Callable[[Frames, random.Random], Frames], ...] = (
    _flip,
    _flip,
    _number,
    _number,
    _length,
    _frames,
    _kind,
    _text,
)
