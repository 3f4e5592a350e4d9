"""Promises of agent.protocol.wire: an encoded message is decoded unchanged, and anything else raises WireError."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.protocol.profile import MAX_RATE, PROFILE, Profile, pack_profiles
from agent.protocol.wire import (
    ANSWER,
    BLOCK,
    DONE,
    FAILED,
    INNER_MAJOR,
    JOIN_DEVICES,
    MAX_FRAMES,
    MAX_JOIN_BYTES,
    MAX_PARTS,
    MAX_PROBE_BYTES,
    MAX_ROWS,
    MAX_TEXT_BYTES,
    OUTER_MAJOR,
    PART_BYTES,
    PIECE,
    REFERENCE,
    TOO_LARGE,
    VERSION,
    Cancel,
    Frame,
    Goodbye,
    Heartbeat,
    Hello,
    Join,
    Kind,
    Leave,
    Message,
    Probe,
    Refused,
    Result,
    Ticket,
    VersionMismatch,
    Welcome,
    WireError,
    Work,
    decode,
    encode,
)

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test

# ---- messages of all kinds

texts = st.text(max_size=12)


@st.composite
def tables(draw: st.DrawFn, dtype: np.dtype[Any], max_rows: int = 4) -> NDArray[Any]:
    """Any table: its bytes are arbitrary."""
    rows = draw(st.integers(0, max_rows))
    raw = draw(st.binary(min_size=rows * dtype.itemsize, max_size=rows * dtype.itemsize))
    return np.frombuffer(raw, dtype=dtype).copy()


profiles = st.builds(
    Profile,
    flops=st.floats(1.0, MAX_RATE),
    overhead_s=st.floats(0.0, 3600.0),
    down_bps=st.floats(1.0, MAX_RATE),
    up_bps=st.floats(1.0, MAX_RATE),
    latency_s=st.floats(0.0, 60.0),
    memory_bytes=st.integers(0, 2**50),
    credit_blocks=st.integers(1, 2**20),
)


@st.composite
def joins(draw: st.DrawFn) -> Join:
    fleet = draw(st.lists(profiles, min_size=1, max_size=3))
    labels = draw(st.lists(texts, min_size=len(fleet), max_size=len(fleet)))
    return Join(pack_profiles(fleet), labels, draw(st.dictionaries(texts, texts, max_size=3)))


@st.composite
def works(draw: st.DrawFn) -> Work:
    small = st.integers(1, 3)
    shapes = draw(st.lists(st.tuples(small, small, small), max_size=3))
    pieces, data = np.empty(len(shapes), PIECE), []
    for row, (batch, outer, inner) in enumerate(shapes):
        layout = draw(st.sampled_from((OUTER_MAJOR, INNER_MAJOR)))
        pieces[row] = (draw(st.integers(0, 2**32 - 1)), layout, batch, outer, inner)
        size = 4 * batch * outer * inner
        data.append(draw(st.binary(min_size=size, max_size=size)))
    blocks = draw(tables(BLOCK))
    for name in ("batch", "rows", "columns"):
        blocks[name] = np.maximum(blocks[name], 1)
    blocks["chunks"] = np.maximum(blocks["chunks"], 1)
    blocks["chunk"] %= blocks["chunks"]
    released = draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
    return Work(draw(st.integers(0, 2**64 - 1)), np.array(released, "<u4"), pieces, blocks, data)


@st.composite
def results(draw: st.DrawFn) -> Result:
    answers = draw(tables(ANSWER))
    for row in range(len(answers)):
        done = draw(st.booleans())
        answers["status"][row] = DONE if done else FAILED
        answers["cells"][row] = draw(st.integers(0, 5)) if done else 0
        answers["compute_s"][row] = draw(st.floats(0, 1e6, width=32))
    size = 4 * int(answers["cells"].sum())
    stamp_ns = draw(st.integers(0, 2**64 - 1))
    return Result(answers, draw(st.binary(min_size=size, max_size=size)), stamp_ns)


messages: dict[str, st.SearchStrategy[Message]] = {
    "join": joins(),
    "welcome": st.builds(Welcome, st.floats(0.01, 3600), texts),
    "refused": st.builds(Refused, texts, st.booleans(), texts, texts),
    "work": works(),
    "result": results(),
    "cancel": st.builds(Cancel, tables(REFERENCE)),
    "heartbeat": st.just(Heartbeat()),
    "leave": st.builds(Leave, tables(np.dtype("<u4")), texts, st.none() | st.floats(0, 1e8), texts),
    "goodbye": st.builds(Goodbye, texts),
    "probe": st.builds(Probe, st.integers(0, 2**63 - 1), st.integers(0, MAX_PROBE_BYTES), st.binary(max_size=40)),
    "hello": st.builds(Hello, texts, texts),
    "ticket": st.builds(Ticket, st.integers(1, 65535), texts),
}
any_message = st.one_of(*messages.values())


def on_the_wire(message: Message) -> list[bytes]:
    """The frames as the receiving socket returns them."""
    return [as_bytes(frame) for frame in encode(message)]


def as_bytes(value: Frame) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return bytes(value)


def plain(message: Message) -> tuple[Any, ...]:
    """A message in a form that == can compare, tables with their types."""

    def value(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.dtype, x.tobytes()
        if isinstance(x, bytes | memoryview):
            return bytes(x)
        return [value(y) for y in x] if isinstance(x, list) else x

    return type(message), *(value(getattr(message, f.name)) for f in fields(message))


# ---- messages are decoded unchanged


@pytest.mark.slow
@pytest.mark.parametrize("kind", messages)
@settings(calm, max_examples=40)
@given(data=st.data())
def test_a_message_is_decoded_unchanged(kind: str, data: st.DataObject) -> None:
    message = data.draw(messages[kind])
    assert plain(decode(on_the_wire(message))) == plain(message)


@settings(calm, max_examples=60)
@given(any_message)
def test_a_message_is_decoded_from_zeromqs_frames(message: Message) -> None:
    assert plain(decode([zmq.Frame(frame) for frame in encode(message)])) == plain(message)


def test_every_kind_of_message_is_tested_here() -> None:
    assert {Kind[name.upper()] for name in messages} == set(Kind)


def test_tables_and_operands_are_views_of_the_frames_not_copies() -> None:
    pieces = np.array([(0, OUTER_MAJOR, 1, 1, 2)], PIECE)
    blocks = np.array([(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 8)], BLOCK)
    frames = on_the_wire(Work(0, np.empty(0, "<u4"), pieces, blocks, [b"operands"]))
    work = decode(frames)
    assert isinstance(work, Work)
    assert work.data[0] is frames[4]
    assert np.shares_memory(work.blocks, np.frombuffer(frames[3], np.uint8))


# ---- garbage raises WireError and does nothing else


def head(kind: int, count: int = 0, *, version: int = VERSION, stamp_ns: int = 0) -> bytes:
    return struct.pack("<4sBBHIQ", b"CLVE", version, kind, 0, count, stamp_ns)


def assert_sound(message: Message) -> None:
    """A decoded message must keep the guarantees that the rest of the program relies on."""
    match message:
        case Work():
            assert (message.pieces["layout"] <= INNER_MAJOR).all()
            for row, piece in zip(message.pieces.tolist(), message.data, strict=True):
                assert len(piece) == 4 * row[2] * row[3] * row[4] > 0
            assert all((message.blocks[name] > 0).all() for name in ("batch", "rows", "columns"))
            assert (message.blocks["chunk"] < message.blocks["chunks"]).all()
        case Result():
            assert np.isin(message.answers["status"], (DONE, FAILED)).all()
            assert len(message.data) == 4 * sum(message.answers["cells"].tolist())
        case Join():
            assert len(message.labels) == len(message.profiles) > 0
            for row in message.profiles.tolist():
                Profile(*row)  # refuses impossible figures
        case Welcome():
            assert 0.01 <= message.heartbeat_s <= 3600
    assert plain(decode(on_the_wire(message))) == plain(message)


def decode_or_refuse(frames: list[bytes]) -> None:
    try:
        message = decode(frames)
    except WireError:
        return
    assert_sound(message)


@settings(calm, max_examples=150)
@given(st.lists(st.binary(max_size=48), max_size=8))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


scalars = st.sampled_from([None, True, 0, -1, 1e999, "", "text", [], ["a"], {}, {"a": "b"}, {"a": 1}])
keys = st.sampled_from(["labels", "about", "reason", "final", "run", "heartbeat_s"])
bodies = st.one_of(
    st.binary(max_size=160),
    st.integers(0, 4).map(lambda rows: bytes(rows * BLOCK.itemsize)),
    scalars.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(keys, scalars, max_size=6).map(lambda value: json.dumps(value).encode()),
)


@settings(calm, max_examples=200)
@given(
    kind=st.one_of(st.sampled_from(sorted(Kind)), st.integers(0, 255)),
    count=st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)),
    body=st.lists(bodies, max_size=5),
)
@example(kind=int(Kind.HEARTBEAT), count=0, body=[])
def test_a_good_header_before_a_random_body_is_refused_or_sound(kind: int, count: int, body: list[bytes]) -> None:
    decode_or_refuse([head(kind, count), *body])


@settings(calm, max_examples=150)
@given(message=any_message, data=st.data())
def test_a_message_with_a_changed_byte_is_refused_or_sound(message: Message, data: st.DataObject) -> None:
    frames = on_the_wire(message)
    which = data.draw(st.sampled_from([i for i, frame in enumerate(frames) if frame]))
    changed = bytearray(frames[which])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    frames[which] = bytes(changed)
    decode_or_refuse(frames)


@settings(calm, max_examples=150)
@given(message=any_message, data=st.data())
def test_a_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    frames = on_the_wire(message)
    which = data.draw(st.sampled_from([i for i, frame in enumerate(frames) if frame]))
    kept = data.draw(st.integers(0, len(frames[which]) - 1))
    if isinstance(message, Work) and which == 1 and kept % 4 == 0:
        return  # fewer released pieces: their number is stated nowhere, and ZeroMQ does not cut frames
    frames[which] = frames[which][:kept]
    with pytest.raises(WireError):
        decode(frames)


@settings(calm, max_examples=100)
@given(message=any_message, data=st.data())
def test_a_message_that_lost_or_gained_a_frame_is_refused(message: Message, data: st.DataObject) -> None:
    frames = on_the_wire(message)
    at = data.draw(st.integers(0, len(frames) - 1))
    changed = frames[:at] + frames[at + 1 :] if data.draw(st.booleans()) else [*frames[: at + 1], *frames[at:]]
    with pytest.raises(WireError):
        decode(changed)


@settings(calm)
@given(version=st.integers(0, 255).filter(lambda v: v != VERSION), rest=st.binary(max_size=40))
def test_another_version_is_recognised_whatever_follows_it(version: int, rest: bytes) -> None:
    with pytest.raises(
        VersionMismatch, match=f"speaks protocol version {version}, this side version {VERSION}"
    ) as info:
        decode([b"CLVE" + bytes([version]) + rest, rest, rest])
    assert info.value.theirs == version


def test_the_error_for_another_protocol_shows_how_the_message_begins() -> None:
    with pytest.raises(WireError, match=r"not a Cleave message.*GET / HT"):
        decode([b"GET / HTTP/1.1\r\n"])


def test_no_frame_at_all_is_refused() -> None:
    with pytest.raises(WireError, match="0 frames"):
        decode([])


def test_too_many_frames_are_refused_before_any_is_read() -> None:
    frames = [head(Kind.WORK)] + [b""] * MAX_FRAMES
    with pytest.raises(WireError, match=f"{MAX_FRAMES + 1} frames, at most {MAX_FRAMES}"):
        decode(frames)


@pytest.mark.parametrize("kind", [Kind.WORK, Kind.RESULT, Kind.PROBE, 0])
def test_too_many_parts_are_refused_before_any_is_read(kind: int) -> None:
    most = MAX_PARTS + 2 if kind == Kind.RESULT else MAX_FRAMES
    with pytest.raises(WireError, match=f"{most + 1} frames, at most"):
        decode([head(kind)] + [b""] * most)


@pytest.mark.parametrize("cells", [PART_BYTES // 4, PART_BYTES // 4 + 1, 3 * PART_BYTES // 4])
def test_long_data_travel_in_parts_that_a_server_accepts(cells: int) -> None:
    answers = np.zeros(1, ANSWER)
    answers["cells"] = cells
    data = np.arange(cells, dtype=np.float32)
    frames = on_the_wire(Result(answers, data))
    assert max(map(len, frames)) <= PART_BYTES
    result = decode(frames)
    assert isinstance(result, Result)
    whole = b"".join(result.data) if isinstance(result.data, tuple) else result.data
    np.testing.assert_array_equal(np.frombuffer(whole, np.float32), data)
    if len(frames) > 3:
        cut = [*frames[:2], frames[2][:-4], frames[2][-4:], *frames[3:]]
        for damaged in (frames[:-1], [*frames, b""], cut):
            with pytest.raises(WireError):
                decode(damaged)


@pytest.mark.parametrize("kind", [Kind.WORK, Kind.RESULT, Kind.CANCEL, Kind.JOIN, Kind.LEAVE, Kind.HEARTBEAT])
@pytest.mark.parametrize("count", [MAX_ROWS + 1, 2**32 - 1])
def test_a_huge_number_of_rows_is_refused_before_memory_is_taken(kind: Kind, count: int) -> None:
    with pytest.raises(WireError, match=f"{count} rows in one message, at most {MAX_ROWS}"):
        decode([head(kind, count), b"", b"", b""])


def test_sizes_that_fit_only_by_overflow_are_refused() -> None:
    half = 2**31
    pieces = np.array([(7, OUTER_MAJOR, half, half, 4)], PIECE)  # 4 * batch * outer * inner = 2**66
    with pytest.raises(WireError, match=f"piece 7 has 0 bytes, {2**66} were announced"):
        decode([head(Kind.WORK), b"", pieces.tobytes(), b"", b""])


def test_results_whose_sizes_do_not_add_up_are_refused() -> None:
    answers = np.zeros(2, ANSWER)
    answers["cells"] = 2**31  # the sum is 0 in 32 bits
    with pytest.raises(WireError, match=f"4 bytes of results, {4 * 2**32} were announced"):
        decode([head(Kind.RESULT, 2), answers.tobytes(), bytes(4)])


def test_an_unknown_status_is_refused() -> None:
    answers = np.zeros(1, ANSWER)
    answers["status"] = TOO_LARGE + 1
    with pytest.raises(WireError, match="unknown status"):
        decode([head(Kind.RESULT, 1), answers.tobytes(), b""])


def test_an_unknown_layout_is_refused() -> None:
    pieces = np.array([(0, INNER_MAJOR + 1, 1, 1, 1)], PIECE)
    with pytest.raises(WireError, match="unknown layout"):
        decode([head(Kind.WORK), b"", pieces.tobytes(), b"", bytes(4)])


@pytest.mark.parametrize("name", ["batch", "outer", "inner"])
def test_an_empty_piece_is_refused(name: str) -> None:
    pieces = np.array([(5, OUTER_MAJOR, 1, 1, 1)], PIECE)
    pieces[name] = 0
    with pytest.raises(WireError, match="piece 5 has 0 bytes"):
        decode([head(Kind.WORK), b"", pieces.tobytes(), b"", b""])


@pytest.mark.parametrize("name", ["batch", "rows", "columns"])
def test_an_empty_block_is_refused(name: str) -> None:
    blocks = np.ones(1, BLOCK)
    blocks["chunk"] = 0
    blocks[name] = 0
    with pytest.raises(WireError, match="a block is empty"):
        decode([head(Kind.WORK, 1), b"", b"", blocks.tobytes()])


@pytest.mark.parametrize(("chunk", "chunks"), [(0, 0), (1, 1), (7, 3), (2**32 - 1, 2**32 - 1)])
def test_a_chunk_beyond_its_block_is_refused(chunk: int, chunks: int) -> None:
    blocks = np.ones(2, BLOCK)
    blocks["chunk"] = 0
    blocks["chunk"][1], blocks["chunks"][1] = chunk, chunks
    with pytest.raises(WireError, match="a chunk beyond its last one"):
        decode([head(Kind.WORK, 2), b"", b"", blocks.tobytes()])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_released_pieces_that_are_not_whole_numbers_are_refused(size: int) -> None:
    with pytest.raises(WireError, match="released pieces"):
        decode([head(Kind.WORK), bytes(size), b"", b""])


@pytest.mark.parametrize("kind", [0, len(Kind) + 1, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(WireError, match=f"unknown kind of message: {kind}"):
        decode([head(kind)])


GOOD = Profile(1e9, 0.0, 1e6, 1e6, 0.01, 1 << 20, 2)


@pytest.mark.parametrize("name", [f.name for f in fields(Profile)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 1e300])
def test_an_impossible_profile_is_refused(name: str, value: float) -> None:
    profile = pack_profiles([GOOD, GOOD])
    if profile.dtype[name].kind == "i":
        value = -1 if not value >= 0 else 2**62
    profile[name][1] = value
    with pytest.raises(WireError, match=f"impossible profile: device 1: {name} is"):
        decode([head(Kind.JOIN, 2), profile.tobytes(), b'{"labels":["a","b"],"about":{}}'])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"labels"',
        b"{}",
        b'{"labels":"a","about":{}}',
        b'{"labels":[],"about":{}}',
        b'{"labels":["a","b"],"about":{}}',
        b'{"labels":[1],"about":{}}',
        b'{"labels":["a"]}',
        b'{"labels":["a"],"about":[]}',
        b'{"labels":["a"],"about":{"pid":1}}',
        b'{"labels":["\xff"],"about":{}}',
        b"\xff\xfe\x00\xd8",
        b"[" * 100_000,
        b'{"labels":' + b"9" * 5000 + b"}",
    ],
)
def test_a_join_with_the_wrong_text_is_refused(text: bytes) -> None:
    with pytest.raises(WireError, match="JOIN"):
        decode([head(Kind.JOIN, 1), pack_profiles([GOOD]).tobytes(), text])


def test_a_join_without_a_device_is_refused() -> None:
    with pytest.raises(WireError, match="JOIN without a device"):
        decode([head(Kind.JOIN, 0), b"", b'{"labels":[],"about":{}}'])


@pytest.mark.parametrize("label", ["\ud800", "a\udfffb"])
def test_a_text_that_cannot_be_encoded_is_refused(label: str) -> None:
    """Half of a surrogate pair is valid in JSON, but raises wherever it is printed or stored later."""
    with pytest.raises(WireError):
        decode(on_the_wire(Join(pack_profiles([GOOD]), [label])))


@pytest.mark.parametrize("heartbeat", ["0", "-1", "0.009", "3601", "1e999", "NaN", "Infinity", '"1"', "null", "[1]"])
def test_a_heartbeat_out_of_bounds_is_refused(heartbeat: str) -> None:
    with pytest.raises(WireError, match="heartbeat_s between"):
        decode([head(Kind.WELCOME), f'{{"heartbeat_s":{heartbeat},"run":"r"}}'.encode()])


@pytest.mark.parametrize("kind", [Kind.REFUSED, Kind.GOODBYE, Kind.LEAVE])
@pytest.mark.parametrize("text", [b"{}", b'{"reason":1}', b'{"reason":null}', b"[]", b"reason"])
def test_a_leave_or_refusal_without_a_reason_is_refused(kind: Kind, text: bytes) -> None:
    body = [b"", text] if kind == Kind.LEAVE else [text]
    with pytest.raises(WireError, match=kind.name):
        decode([head(kind), *body])


def test_a_text_that_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(raw: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("agent.protocol.wire.json.loads", parse)
    with pytest.raises(WireError, match=f"at most {MAX_TEXT_BYTES}"):
        decode([head(Kind.GOODBYE), bytes(MAX_TEXT_BYTES + 1)])


def test_a_join_is_parsed_only_if_it_is_no_longer_than_its_devices_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(raw: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("agent.protocol.wire.json.loads", parse)
    with pytest.raises(WireError, match="bytes of text"):
        decode([head(Kind.JOIN, 1), pack_profiles([GOOD]).tobytes(), bytes(MAX_JOIN_BYTES + 1)])
    many = JOIN_DEVICES + 1
    with pytest.raises(WireError, match=f"at most {JOIN_DEVICES}"):
        decode([head(Kind.JOIN, many), pack_profiles([GOOD] * many).tobytes(), b"{}"])


def test_a_joined_fleet_does_not_keep_its_frames() -> None:
    frames = on_the_wire(Join(pack_profiles([GOOD]), ["phone"]))
    join = decode(frames)
    assert isinstance(join, Join)
    assert join.profiles.dtype == PROFILE
    assert not np.shares_memory(join.profiles, np.frombuffer(frames[1], np.uint8))
