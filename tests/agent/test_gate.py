"""The agent's gate compares the bytes that arrived with those that were delivered."""

from __future__ import annotations

import pytest

from agent.protocol import incoming as gate
from agent.protocol.incoming import InboundLimit, Unfinished, on_wire

SIZE = 1 << 20


class Frame:
    def __len__(self) -> int:
        return SIZE


def test_messages_delivered_before_the_first_check_are_not_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast line brings the first message before the gate has found the connection."""
    seen: list[Unfinished] = []
    ended: list[int] = []
    lost: list[int] = []

    def judge(unfinished: Unfinished) -> str:
        seen.append(unfinished)
        watch._ended.set()
        return ""

    watch = InboundLimit("tcp://127.0.0.1:5555", False, judge, lambda: ended.append(1), lost.append)
    watch.heard([Frame()])  # type: ignore[list-item]
    monkeypatch.setattr(gate, "_descriptors", lambda: [7])
    arrived = on_wire(SIZE, False) + gate.HANDSHAKE_BYTES
    monkeypatch.setattr(gate, "counted_bytes", lambda fd, port: (arrived, 0) if fd == 7 else None)
    watch.run()
    assert seen == [Unfinished(0, 0)]
    assert not ended
    assert not lost


def test_a_verdict_is_confirmed_before_a_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message delivered between two readings counts, for a moment, both as unfinished and as held."""
    answers = iter(["too much", "", "too much", "too much"])
    shut: list[str] = []
    watch = InboundLimit("tcp://127.0.0.1:5555", False, lambda _: next(answers), lambda: None, lambda size: None)
    monkeypatch.setattr(gate, "_descriptors", lambda: [7])
    monkeypatch.setattr(gate, "counted_bytes", lambda fd, port: (1, 0) if fd == 7 else None)
    monkeypatch.setattr(watch, "_shut", lambda: shut.append(watch.cut))
    watch.run()
    assert shut == ["too much"]
    assert next(answers, None) is None


def test_what_a_lost_connection_had_brought_of_an_unfinished_message_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the first connection one message and 500 bytes of another one have come, over the second one 70 bytes."""
    brought: list[int | None] = [on_wire(SIZE, False) + 500, None, 70, None]
    lost: list[int] = []

    def judge(_: Unfinished) -> str:
        del brought[0]  # the connection ends
        return ""

    def ring() -> None:
        del brought[0]  # the next one is there
        if not brought:
            watch._ended.set()

    def counted(fd: int, port: int) -> tuple[int, int] | None:
        there = brought[0] if brought else None
        return (there + gate.HANDSHAKE_BYTES, 0) if fd == 7 and there is not None else None

    watch = InboundLimit("tcp://127.0.0.1:5555", False, judge, ring, lost.append)
    watch.heard([Frame()])  # type: ignore[list-item]
    monkeypatch.setattr(gate, "_descriptors", lambda: [7])
    monkeypatch.setattr(gate, "counted_bytes", counted)
    watch.run()
    assert lost == [500, 70]
