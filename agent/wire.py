"""Messages <-> ZeroMQ frames.

A message is a fixed header and a few body frames. Rare messages carry JSON, frequent ones carry tables (structured
arrays, one row a block) and raw operand bytes, so that a thousand blocks cost as many Python steps as one.
Nothing is pickled, every field is checked here or where its meaning is known, and whatever does not fit raises
WireError: a peer that sends garbage is answered, never obeyed.

The first five bytes (magic, version) never change, so that two versions can at least tell each other apart.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.profile import PROFILE, check_profiles

MAGIC = b"CLVE"
VERSION = 2
MAX_FRAMES = 260
MAX_FRAME_BYTES = 1 << 30  # also given to ZeroMQ as MAXMSGSIZE
MAX_TEXT_BYTES = 4 << 20
ZERO_COPY_BYTES = 1 << 16
MAX_ROWS = 1 << 20  # blocks in one message, devices in one join
MAX_TOKEN = 128
MAX_PROBE_BYTES = 8 << 20  # each way, to measure a link
MAX_AWAY_S = 1e8  # three years: until when a device says that it is away

_HEADER = struct.Struct("<4sBBHIQ")  # magic, version, kind, reserved, count, stamp_ns


class Kind(IntEnum):
    JOIN = 1
    WELCOME = 2
    REFUSED = 3
    WORK = 4
    RESULT = 5
    CANCEL = 6
    HEARTBEAT = 7
    LEAVE = 8
    GOODBYE = 9
    PROBE = 10


# How the inner dimension lies in a piece: [batch, outer, inner] or [batch, inner, outer]. Both are sent as they lie in
# the server's memory; products take either, so nobody transposes.
OUTER_MAJOR, INNER_MAJOR = 0, 1

PIECE = np.dtype([("piece", "<u4"), ("layout", "<u4"), ("batch", "<u4"), ("outer", "<u4"), ("inner", "<u4")])
BLOCK = np.dtype(
    [
        ("device", "<u4"),  # index of the device within its connection
        ("job", "<u8"),
        ("block", "<u4"),
        ("left", "<u4"),  # pieces, and where in them this block's operands begin
        ("right", "<u4"),
        ("left_batch", "<u4"),
        ("left_outer", "<u4"),
        ("right_batch", "<u4"),
        ("right_outer", "<u4"),
        ("batch", "<u4"),
        ("rows", "<u4"),
        ("columns", "<u4"),
        # A block whose operands do not fit into the device's memory comes in chunks along the inner dimension, in their
        # order, one row a chunk. Its pieces are for this row alone: dropped when it is computed, and added up.
        ("chunk", "<u4"),
        ("chunks", "<u4"),  # 1: it comes whole
        ("down_bytes", "<u8"),  # what this device downloads for it: a pod's socket may carry less, for several devices
    ]
)
ANSWER = np.dtype(
    [
        ("device", "<u4"),
        ("job", "<u8"),
        ("block", "<u4"),
        ("status", "<u4"),
        ("cells", "<u4"),  # float32 values of this block in the data frame; 0 unless DONE
        ("compute_s", "<f4"),
        ("due_ns", "<u8"),  # when an emulated device's answer had to reach the server; 0 for a real one
    ]
)
REFERENCE = np.dtype([("device", "<u4"), ("job", "<u8"), ("block", "<u4")])
DONE, FAILED = 0, 1

Frame = Any  # whatever has a buffer: bytes, memoryview, contiguous array


class WireError(ValueError):
    """The frames are not a message of this protocol; the text says what is wrong."""


class VersionMismatch(WireError):
    def __init__(self, theirs: int) -> None:
        super().__init__(f"the other side speaks protocol version {theirs}, this side version {VERSION}")
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class Join:
    profiles: NDArray[np.void]  # PROFILE, one row a device; a row's index is the device's index in this connection
    labels: list[str]  # what people read in tables, one a device
    about: dict[str, str] = field(default_factory=dict)  # software and hardware, for the results folder
    token: str = ""  # of an invitation, until the server knows this device's key; only ever sent encrypted


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_s: float
    run: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str
    final: bool  # False: join again
    bundle_url: str = ""  # where an agent is that speaks the server's version; "" if it does not say
    bundle_sha256: str = ""  # and its checksum


@dataclass(frozen=True, slots=True)
class Work:
    stamp_ns: int  # the server's clock when it sent this; modelled time counts from here
    released: NDArray[np.uint32]  # pieces to be dropped, before new ones are taken in
    pieces: NDArray[np.void]
    blocks: NDArray[np.void]
    data: list[Frame]  # one a piece


@dataclass(frozen=True, slots=True)
class Result:
    answers: NDArray[np.void]
    data: Frame  # the DONE blocks' cells, float32, in the order of the answers
    stamp_ns: int = 0  # a pod's clock when it sent this, for the verdict; 0 from a real device


@dataclass(frozen=True, slots=True)
class Cancel:
    blocks: NDArray[np.void]  # REFERENCE


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


@dataclass(frozen=True, slots=True)
class Leave:
    devices: NDArray[np.uint32]
    reason: str
    until_s: float | None = None  # seconds from now until they may be back; None: nobody knows
    name: str = ""  # of a device that has not joined, because it may not work: it says so, and nothing else


@dataclass(frozen=True, slots=True)
class Goodbye:
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """To measure the link: answered with as many bytes as it asks for."""

    token: int
    wanted_bytes: int
    data: Frame


Message = Join | Welcome | Refused | Work | Result | Cancel | Heartbeat | Leave | Goodbye | Probe


def encode(message: Message) -> list[Frame]:
    match message:
        case Work():
            head = _HEADER.pack(MAGIC, VERSION, Kind.WORK, 0, len(message.blocks), message.stamp_ns)
            return [head, message.released, message.pieces, message.blocks, *message.data]
        case Result():
            head = _HEADER.pack(MAGIC, VERSION, Kind.RESULT, 0, len(message.answers), message.stamp_ns)
            return [head, message.answers, message.data]
        case Heartbeat():
            return [_head(Kind.HEARTBEAT, 0)]
        case Cancel():
            return [_head(Kind.CANCEL, len(message.blocks)), message.blocks]
        case Join():
            said = {"labels": message.labels, "about": message.about}
            text = _dump(said | {"token": message.token} if message.token else said)
            return [_head(Kind.JOIN, len(message.profiles)), message.profiles, text]
        case Welcome():
            return [_head(Kind.WELCOME, 0), _dump({"heartbeat_s": message.heartbeat_s, "run": message.run})]
        case Refused():
            refused: dict[str, Any] = {"reason": message.reason, "final": message.final}
            bundle = {"bundle_url": message.bundle_url, "bundle_sha256": message.bundle_sha256}
            return [_head(Kind.REFUSED, 0), _dump(refused | {key: value for key, value in bundle.items() if value})]
        case Leave():
            left: dict[str, Any] = {"reason": message.reason, "until_s": message.until_s}
            text = _dump(left | {"name": message.name} if message.name else left)
            return [_head(Kind.LEAVE, len(message.devices)), message.devices, text]
        case Goodbye():
            return [_head(Kind.GOODBYE, 0), _dump({"reason": message.reason})]
        case Probe():
            size = len(message.data)
            text = _dump({"token": message.token, "wanted_bytes": message.wanted_bytes, "data_bytes": size})
            return [_head(Kind.PROBE, 0), text, message.data]


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame], flags: int = 0) -> None:
    """Large frames leave from where they lie, small ones are copied: that is cheaper than keeping track of them."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = len(frame) if isinstance(frame, bytes | memoryview) else frame.nbytes
        socket.send(frame, flags if index == last else flags | zmq.SNDMORE, copy=size < ZERO_COPY_BYTES)


def decode(frames: Sequence[zmq.Frame | bytes]) -> Message:
    """The message in these frames, or WireError. Tables and data are views into the frames, not copies."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, at most {MAX_FRAMES} are allowed")
    buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
    head = bytes(buffers[0])
    if len(head) < 5 or head[:4] != MAGIC:
        raise WireError(f"not a Cleave message (it begins with {head[:8]!r})")
    if head[4] != VERSION:
        raise VersionMismatch(head[4])
    if len(head) != _HEADER.size:
        raise WireError(f"header of {len(head)} bytes, expected {_HEADER.size}")
    _, _, kind, _, count, stamp_ns = _HEADER.unpack(head)
    if count > MAX_ROWS:
        raise WireError(f"{count} rows in one message, at most {MAX_ROWS} are allowed")
    body = buffers[1:]
    match kind:
        case Kind.WORK:
            return _decode_work(body, count, stamp_ns)
        case Kind.RESULT:
            _expect(body, 2, "RESULT")
            answers = _table(body[0], ANSWER, count, "answers")
            if np.any(answers["status"] > FAILED):
                raise WireError("an answer has an unknown status")
            cells = int(answers["cells"].sum(dtype=np.uint64))
            if len(body[1]) != 4 * cells:
                raise WireError(f"{len(body[1])} bytes of results, {4 * cells} were announced")
            return Result(answers, body[1], stamp_ns)
        case Kind.CANCEL:
            _expect(body, 1, "CANCEL")
            return Cancel(_table(body[0], REFERENCE, count, "blocks"))
        case Kind.HEARTBEAT:
            _expect(body, 0, "HEARTBEAT")
            return Heartbeat()
        case Kind.JOIN:
            return _decode_join(body, count)
        case Kind.WELCOME:
            text = _load(body, 0, 1, "WELCOME")
            heartbeat_s = text.get("heartbeat_s")
            if not isinstance(heartbeat_s, int | float) or not 0.01 <= heartbeat_s <= 3600:
                raise WireError("WELCOME without a heartbeat_s between 0.01 and 3600")
            return Welcome(float(heartbeat_s), _text(text, "run", "WELCOME"))
        case Kind.REFUSED:
            return _decode_refused(body)
        case Kind.LEAVE:
            text = _load(body, 1, 2, "LEAVE")
            until_s = text.get("until_s")
            if until_s is not None and not (type(until_s) in (int, float) and 0 <= until_s <= MAX_AWAY_S):
                raise WireError(f"LEAVE whose until_s is not a number of seconds up to {MAX_AWAY_S:g}")
            devices = _table(body[0], np.dtype("<u4"), count, "devices")
            name = _text(text, "name", "LEAVE") if "name" in text else ""
            return Leave(devices, _text(text, "reason", "LEAVE"), None if until_s is None else float(until_s), name)
        case Kind.GOODBYE:
            return Goodbye(_text(_load(body, 0, 1, "GOODBYE"), "reason", "GOODBYE"))
        case Kind.PROBE:
            text = _load(body, 0, 2, "PROBE")
            token, wanted, size = (_count(text, key, "PROBE") for key in ("token", "wanted_bytes", "data_bytes"))
            if max(wanted, size) > MAX_PROBE_BYTES:
                raise WireError(f"PROBE of more than {MAX_PROBE_BYTES} bytes")
            if len(body[1]) != size:
                raise WireError(f"PROBE with {len(body[1])} bytes, {size} were announced")
            return Probe(token, wanted, body[1])
    raise WireError(f"unknown kind of message: {kind}")


def refusal_of_another_version(frames: Sequence[zmq.Frame | bytes]) -> Refused | None:
    """REFUSED keeps its form in all versions, so that an old agent learns where a new one is. None if it is not one."""
    buffers = [f if isinstance(f, bytes) else f.buffer for f in frames[:3]]
    head = bytes(buffers[0])
    if len(head) != _HEADER.size or head[5] != Kind.REFUSED:
        return None
    try:
        return _decode_refused(buffers[1:])
    except WireError:
        return None


def _decode_refused(body: Sequence[Any]) -> Refused:
    text = _load(body, 0, 1, "REFUSED")
    bundle = {key: _text(text, key, "REFUSED") for key in ("bundle_url", "bundle_sha256") if key in text}
    return Refused(_text(text, "reason", "REFUSED"), text.get("final") is True, **bundle)


def _decode_work(body: Sequence[Any], count: int, stamp_ns: int) -> Work:
    if len(body) < 3:
        raise WireError(f"WORK of {len(body)} body frames, at least 3 are needed")
    released = _table(body[0], np.dtype("<u4"), len(body[0]) // 4, "released pieces")
    pieces = _table(body[1], PIECE, len(body) - 3, "pieces")
    blocks = _table(body[2], BLOCK, count, "blocks")
    if np.any(pieces["layout"] > INNER_MAJOR):
        raise WireError("a piece has an unknown layout")
    for row, data in zip(pieces.tolist(), body[3:], strict=True):
        size = 4 * row[2] * row[3] * row[4]  # Python integers: no overflow
        if size == 0 or len(data) != size:
            raise WireError(f"piece {row[0]} has {len(data)} bytes, {size} were announced")
    if np.any(blocks["batch"] == 0) or np.any(blocks["rows"] == 0) or np.any(blocks["columns"] == 0):
        raise WireError("a block is empty")
    if np.any(blocks["chunk"] >= blocks["chunks"]):
        raise WireError("a block has a chunk beyond its last one")
    return Work(stamp_ns, released, pieces, blocks, list(body[3:]))


def _decode_join(body: Sequence[Any], count: int) -> Join:
    text = _load(body, 1, 2, "JOIN")
    profiles = _table(body[0], PROFILE, count, "profiles")
    if count == 0:
        raise WireError("JOIN without a device")
    try:
        check_profiles(profiles)
    except ValueError as error:
        raise WireError(f"JOIN with an impossible profile: {error}") from None
    labels, about = text.get("labels"), text.get("about")
    if not (isinstance(labels, list) and len(labels) == count and all(isinstance(x, str) for x in labels)):
        raise WireError(f"JOIN of {count} devices without {count} labels")
    if not (isinstance(about, dict) and all(isinstance(x, str) for x in about.values())):
        raise WireError("JOIN whose 'about' is not a table of texts")
    token = text.get("token", "")
    if not isinstance(token, str) or len(token) > MAX_TOKEN:
        raise WireError("JOIN whose token is none")
    return Join(profiles.copy(), labels, about, token)


def _head(kind: int, count: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, kind, 0, count, 0)


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _load(body: Sequence[Any], index: int, expected: int, kind: str) -> dict[str, Any]:
    _expect(body, expected, kind)
    raw = bytes(body[index])
    if len(raw) > MAX_TEXT_BYTES:
        raise WireError(f"{kind} with {len(raw)} bytes of text, at most {MAX_TEXT_BYTES} are allowed")
    try:
        value = json.loads(raw)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no text
    except (ValueError, RecursionError) as error:
        raise WireError(f"{kind} whose text is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError(f"{kind} whose text is not a JSON object")
    return value


def _text(value: dict[str, Any], key: str, kind: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise WireError(f"{kind} without the text '{key}'")
    return text


def _count(value: dict[str, Any], key: str, kind: str) -> int:
    number = value.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
        raise WireError(f"{kind} without the number '{key}'")
    return number


def _expect(body: Sequence[Any], expected: int, kind: str) -> None:
    if len(body) != expected:
        raise WireError(f"{kind} of {len(body)} body frames, expected {expected}")


def _table(buffer: Any, dtype: np.dtype[Any], count: int, what: str) -> NDArray[Any]:
    if len(buffer) != count * dtype.itemsize:
        raise WireError(f"{len(buffer)} bytes of {what}, expected {count} x {dtype.itemsize}")
    return np.frombuffer(buffer, dtype=dtype)
