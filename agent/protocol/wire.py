"""The wire format: messages <-> ZeroMQ frames.

A message is a fixed header and a few body frames. Rare messages carry JSON. Frequent ones carry tables (structured
arrays, one row per block) and raw operand bytes, so a thousand blocks cost as many Python steps as one.
Nothing is pickled. Every field is checked here or where its meaning is known, and invalid input raises WireError: a
peer that sends garbage is answered, never obeyed.

The first five bytes (magic, version) never change, so that different versions can at least recognise each other.
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

from agent.protocol.profile import PROFILE, check_profiles

MAGIC = b"CLVE"
VERSION = 3
MAX_FRAMES = 260  # per message, except RESULT, whose data come in parts
MAX_FRAME_BYTES = 1 << 30  # to a device; also given to ZeroMQ as MAXMSGSIZE
# Largest frame to the server; longer data are cut into parts. ZeroMQ buffers one frame of a caller that has not shown a
# key yet, so this bounds what a stranger can make it hold. 256 KiB gives about 2.9 GB/s on loopback, 1 MiB gives 4.
PART_BYTES = 1 << 18
MAX_PARTS = MAX_FRAME_BYTES // PART_BYTES
MAX_TEXT_BYTES = 4 << 10  # of JSON per message; parsing takes up to 140 ns per byte
MAX_JOIN_BYTES = 96 << 10  # of JSON in a JOIN: the profile takes up to 64 KiB, and is quoted
MAX_DEVICE_BYTES = 512  # more JSON for each further device of a pod
JOIN_DEVICES = 500  # per JOIN; a larger pod sends several
MAX_NAME_BYTES = 200
ZERO_COPY_BYTES = 1 << 16
MAX_ROWS = 1 << 20  # blocks in one message
MAX_TOKEN = 128
MAX_PROBE_BYTES = 8 << 20  # each way, to measure a link
MAX_AWAY_S = 1e8  # three years: the longest absence that a device may announce

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
    HELLO = 11
    TICKET = 12


# Layout of a piece: [batch, outer, inner] or [batch, inner, outer]. Either is sent as it lies in the server's memory;
# kernels take both, so nothing is transposed.
OUTER_MAJOR, INNER_MAJOR = 0, 1

PIECE = np.dtype([("piece", "<u4"), ("layout", "<u4"), ("batch", "<u4"), ("outer", "<u4"), ("inner", "<u4")])
BLOCK = np.dtype(
    [
        ("device", "<u4"),  # index of the device within its connection
        ("job", "<u8"),
        ("block", "<u4"),
        ("left", "<u4"),  # left, right: piece IDs; the next four fields: where this block's operands begin in them
        ("right", "<u4"),
        ("left_batch", "<u4"),
        ("left_outer", "<u4"),
        ("right_batch", "<u4"),
        ("right_outer", "<u4"),
        ("batch", "<u4"),
        ("rows", "<u4"),
        ("columns", "<u4"),
        # A block whose operands do not fit into the device's memory comes in chunks along the inner dimension, in
        # order, one row per chunk. A chunk's pieces serve its row only and are dropped once its product is added up.
        ("chunk", "<u4"),
        ("chunks", "<u4"),  # 1: the block is not split
        ("down_bytes", "<u8"),  # this device's download for the block; pieces that a pod's devices share travel once
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
        ("due_ns", "<u8"),  # when an emulated device's answer is due at the server; 0 for a real device
    ]
)
REFERENCE = np.dtype([("device", "<u4"), ("job", "<u8"), ("block", "<u4")])
DONE, FAILED, TOO_LARGE = 0, 1, 2  # TOO_LARGE: the block exceeds the memory that the owner lends

Frame = Any  # anything with a buffer: bytes, memoryview, contiguous array


class WireError(ValueError):
    """The frames are not a message of this protocol; the text says what is wrong."""


class VersionMismatch(WireError):
    def __init__(self, theirs: int) -> None:
        super().__init__(f"the other side speaks protocol version {theirs}, this side version {VERSION}")
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class Join:
    profiles: NDArray[np.void]  # PROFILE, one row per device; the row is the device's index in this connection
    labels: list[str]  # names for tables, one per device
    about: dict[str, str] = field(default_factory=dict)  # software and hardware, for the results folder


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for admission at the entrance. Answered with TICKET or REFUSED."""

    name: str  # of this device, as people know it
    token: str = ""  # of an invitation; enrols this device's key; only ever sent encrypted


@dataclass(frozen=True, slots=True)
class Ticket:
    """Admission: join at this port of the same host, with the key of the asking connection or else this password."""

    port: int
    password: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_s: float
    run: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str
    final: bool  # False: join again
    bundle_url: str = ""  # of an agent that speaks the server's version; "" if not given
    bundle_sha256: str = ""  # its checksum
    until_s: float | None = None  # seconds until it makes sense to join again; None: not given


@dataclass(frozen=True, slots=True)
class Work:
    stamp_ns: int  # the server's clock at the decision; modelled time counts from here
    released: NDArray[np.uint32]  # pieces to drop before new ones are taken in
    pieces: NDArray[np.void]
    blocks: NDArray[np.void]
    data: list[Frame]  # one frame per piece


@dataclass(frozen=True, slots=True)
class Result:
    answers: NDArray[np.void]
    data: Frame  # cells of DONE blocks, float32, in the order of the answers; a tuple if they came in parts
    stamp_ns: int = 0  # a pod's clock at sending, for the verdict; 0 from a real device


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
    until_s: float | None = None  # seconds until the devices may return; None: not known
    name: str = ""  # of a device that may not work and only explains why it does not join


@dataclass(frozen=True, slots=True)
class Goodbye:
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Measures the link; answered with `wanted_bytes` bytes."""

    token: int
    wanted_bytes: int
    data: Frame


Message = Join | Welcome | Refused | Work | Result | Cancel | Heartbeat | Leave | Goodbye | Probe | Hello | Ticket


def encode(message: Message) -> list[Frame]:
    match message:
        case Work():
            head = _HEADER.pack(MAGIC, VERSION, Kind.WORK, 0, len(message.blocks), message.stamp_ns)
            return [head, message.released, message.pieces, message.blocks, *message.data]
        case Result():
            head = _HEADER.pack(MAGIC, VERSION, Kind.RESULT, 0, len(message.answers), message.stamp_ns)
            return [head, message.answers, *_parts(message.data)]
        case Heartbeat():
            return [_head(Kind.HEARTBEAT, 0)]
        case Cancel():
            return [_head(Kind.CANCEL, len(message.blocks)), message.blocks]
        case Join():
            text = _dump({"labels": message.labels, "about": message.about})
            return [_head(Kind.JOIN, len(message.profiles)), message.profiles, text]
        case Hello():
            hello = {"name": message.name}
            return [_head(Kind.HELLO, 0), _dump(hello | {"token": message.token} if message.token else hello)]
        case Ticket():
            return [_head(Kind.TICKET, 0), _dump({"port": message.port, "password": message.password})]
        case Welcome():
            return [_head(Kind.WELCOME, 0), _dump({"heartbeat_s": message.heartbeat_s, "run": message.run})]
        case Refused():
            refused: dict[str, Any] = {"reason": message.reason, "final": message.final}
            bundle = {"bundle_url": message.bundle_url, "bundle_sha256": message.bundle_sha256}
            if message.until_s is not None:
                refused["until_s"] = message.until_s
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
            return [_head(Kind.PROBE, 0), text, *_parts(message.data)]


def _parts(data: Frame) -> list[Frame]:
    """The data as views of at most PART_BYTES, the largest frame that a server takes."""
    view = memoryview(data)
    if view.nbytes <= PART_BYTES:
        return [data]
    view = view.cast("B")
    return [view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)]


def send_frames(
    socket: zmq.Socket[bytes], frames: Sequence[Frame], flags: int = 0, track: bool = False
) -> zmq.MessageTracker | None:
    """Send large frames without copying; copy small ones, which is cheaper than tracking them.
    `track`: return a tracker of the last frame, whatever its size."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = len(frame) if isinstance(frame, bytes | memoryview) else frame.nbytes
        if track and index == last:
            socket.copy_threshold = 0
            tracker: zmq.MessageTracker = socket.send(frame, flags, copy=False, track=True)
            return tracker
        socket.send(frame, flags if index == last else flags | zmq.SNDMORE, copy=size < ZERO_COPY_BYTES)
    return None


def decode(frames: Sequence[zmq.Frame | bytes]) -> Message:
    """Decode a message, or raise WireError. Tables and data are views into the frames, not copies."""
    if not 1 <= len(frames) <= MAX_PARTS + 2:
        raise WireError(f"{len(frames)} frames, at most {MAX_PARTS + 2} are allowed")
    head = bytes((frames[0] if isinstance(frames[0], bytes) else frames[0].buffer)[: _HEADER.size + 1])
    if len(frames) > MAX_FRAMES and head[5:6] != bytes([Kind.RESULT]):
        raise WireError(f"{len(frames)} frames, at most {MAX_FRAMES} are allowed")
    buffers = [f if isinstance(f, bytes) else f.buffer for f in frames]
    if len(head) < 5 or head[:4] != MAGIC:
        raise WireError(f"not a Cleave message (it begins with {head[:8]!r})")
    if head[4] != VERSION:
        raise VersionMismatch(head[4])
    if len(head) != _HEADER.size:
        raise WireError(f"header of {len(head)} bytes, expected {_HEADER.size}")
    _, _, kind, _, count, stamp_ns = _HEADER.unpack(head)
    if count > MAX_ROWS:
        raise WireError(f"{count} rows in one message, at most {MAX_ROWS} are allowed")
    return _decode_body(kind, buffers[1:], count, stamp_ns)


def _decode_body(kind: int, body: Sequence[Any], count: int, stamp_ns: int) -> Message:
    match kind:
        case Kind.WORK:
            return _decode_work(body, count, stamp_ns)
        case Kind.RESULT:
            return _decode_result(body, count, stamp_ns)
        case Kind.CANCEL:
            _expect(body, 1, "CANCEL")
            return Cancel(_table(body[0], REFERENCE, count, "blocks"))
        case Kind.HEARTBEAT:
            _expect(body, 0, "HEARTBEAT")
            return Heartbeat()
        case Kind.JOIN:
            return _decode_join(body, count)
        case Kind.WELCOME:
            return _decode_welcome(body)
        case Kind.REFUSED:
            return _decode_refused(body)
        case Kind.LEAVE:
            return _decode_leave(body, count)
        case Kind.GOODBYE:
            return Goodbye(_text(_load(body, 0, 1, "GOODBYE"), "reason", "GOODBYE"))
        case Kind.PROBE:
            return _decode_probe(body)
        case Kind.HELLO:
            return _decode_hello(body)
        case Kind.TICKET:
            return _decode_ticket(body)
    raise WireError(f"unknown kind of message: {kind}")


def _decode_result(body: Sequence[Any], count: int, stamp_ns: int) -> Result:
    if len(body) < 2:
        raise WireError(f"RESULT of {len(body)} body frames, at least 2 are needed")
    answers = _table(body[0], ANSWER, count, "answers")
    if np.any(answers["status"] > TOO_LARGE):
        raise WireError("an answer has an unknown status")
    size = 4 * int(answers["cells"].sum(dtype=np.uint64))
    parts = _parts_of(body[1:], size, "results")
    return Result(answers, parts[0] if len(parts) == 1 else parts, stamp_ns)


def _decode_welcome(body: Sequence[Any]) -> Welcome:
    text = _load(body, 0, 1, "WELCOME")
    heartbeat_s = text.get("heartbeat_s")
    if not isinstance(heartbeat_s, int | float) or not 0.01 <= heartbeat_s <= 3600:
        raise WireError("WELCOME without a heartbeat_s between 0.01 and 3600")
    return Welcome(float(heartbeat_s), _text(text, "run", "WELCOME"))


def _decode_leave(body: Sequence[Any], count: int) -> Leave:
    text = _load(body, 1, 2, "LEAVE")
    until_s = text.get("until_s")
    if until_s is not None and not (type(until_s) in (int, float) and 0 <= until_s <= MAX_AWAY_S):
        raise WireError(f"LEAVE whose until_s is not a number of seconds up to {MAX_AWAY_S:g}")
    devices = _table(body[0], np.dtype("<u4"), count, "devices")
    name = _text(text, "name", "LEAVE") if "name" in text else ""
    return Leave(devices, _text(text, "reason", "LEAVE"), None if until_s is None else float(until_s), name)


def _decode_probe(body: Sequence[Any]) -> Probe:
    text = _load(body[:2], 0, 2, "PROBE")
    token, wanted, size = (_count(text, key, "PROBE") for key in ("token", "wanted_bytes", "data_bytes"))
    if max(wanted, size) > MAX_PROBE_BYTES:
        raise WireError(f"PROBE of more than {MAX_PROBE_BYTES} bytes")
    return Probe(token, wanted, b"".join(_parts_of(body[1:], size, "a PROBE")))


def _decode_hello(body: Sequence[Any]) -> Hello:
    text = _load(body, 0, 1, "HELLO")
    name, token = _text(text, "name", "HELLO"), text.get("token", "")
    if len(name) > MAX_NAME_BYTES or not isinstance(token, str) or len(token) > MAX_TOKEN:
        raise WireError("HELLO without a valid name or token")
    return Hello(name, token)


def _decode_ticket(body: Sequence[Any]) -> Ticket:
    text = _load(body, 0, 1, "TICKET")
    port, password = _count(text, "port", "TICKET"), _text(text, "password", "TICKET")
    if not 1 <= port <= 65535 or len(password) > MAX_TOKEN:
        raise WireError("TICKET without a valid port or password")
    return Ticket(port, password)


def refusal_of_another_version(frames: Sequence[zmq.Frame | bytes]) -> Refused | None:
    """A REFUSED of another protocol version, else None. Its format is the same in all versions, so that an old agent
    learns where to get a new one."""
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
    until_s = text.get("until_s")
    if until_s is not None and not (type(until_s) in (int, float) and 0 <= until_s <= MAX_AWAY_S):
        raise WireError(f"REFUSED whose until_s is not a number of seconds up to {MAX_AWAY_S:g}")
    return Refused(_text(text, "reason", "REFUSED"), text.get("final") is True, **bundle, until_s=until_s)


def _decode_work(body: Sequence[Any], count: int, stamp_ns: int) -> Work:
    if len(body) < 3:
        raise WireError(f"WORK of {len(body)} body frames, at least 3 are needed")
    released = _table(body[0], np.dtype("<u4"), len(body[0]) // 4, "released pieces")
    pieces = _table(body[1], PIECE, len(body) - 3, "pieces")
    blocks = _table(body[2], BLOCK, count, "blocks")
    if np.any(pieces["layout"] > INNER_MAJOR):
        raise WireError("a piece has an unknown layout")
    for row, data in zip(pieces.tolist(), body[3:], strict=True):
        size = 4 * row[2] * row[3] * row[4]  # Python integers do not overflow
        if size == 0 or len(data) != size:
            raise WireError(f"piece {row[0]} has {len(data)} bytes, {size} were announced")
    if np.any(blocks["batch"] == 0) or np.any(blocks["rows"] == 0) or np.any(blocks["columns"] == 0):
        raise WireError("a block is empty")
    if np.any(blocks["chunk"] >= blocks["chunks"]):
        raise WireError("a block has a chunk beyond its last one")
    return Work(stamp_ns, released, pieces, blocks, list(body[3:]))


def _parts_of(parts: Sequence[Any], size: int, what: str) -> tuple[Any, ...]:
    """Check data that may come in parts, each PART_BYTES long except the last."""
    found = sum(map(len, parts))
    if found != size:
        raise WireError(f"{found} bytes of {what}, {size} were announced")
    if len(parts) > 1 and (any(len(part) != PART_BYTES for part in parts[:-1]) or not len(parts[-1])):
        raise WireError(f"{what} in parts of the wrong length")
    return tuple(parts)


def _decode_join(body: Sequence[Any], count: int) -> Join:
    if count > JOIN_DEVICES:
        raise WireError(f"JOIN of {count} devices, at most {JOIN_DEVICES} are allowed at a time")
    text = _load(body, 1, 2, "JOIN", MAX_JOIN_BYTES + MAX_DEVICE_BYTES * max(0, count - 1))
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
    return Join(profiles.copy(), labels, about)


def _head(kind: int, count: int) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, kind, 0, count, 0)


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _load(
    body: Sequence[Any], index: int, expected: int, kind: str, most_bytes: int = MAX_TEXT_BYTES
) -> dict[str, Any]:
    _expect(body, expected, kind)
    if len(body[index]) > most_bytes:
        raise WireError(f"{kind} with {len(body[index])} bytes of text, at most {most_bytes} are allowed")
    try:
        raw = str(body[index], "utf-8")
        value = json.loads(raw)
        if "\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON but not text
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


def printable(label: str) -> str:
    """A name that is safe in a table or on a terminal: text chosen by strangers must not move the cursor."""
    label = label[:200]
    return label if label.isprintable() else "".join(c if c.isprintable() else "?" for c in label)
