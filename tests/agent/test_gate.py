"""The agent's gate counts what has arrived against what was delivered."""

from __future__ import annotations

import pytest

from agent.protocol import incoming as gate
from agent.protocol.incoming import InboundLimit, Unfinished, on_wire

SIZE = 1 << 20


class Frame:
    def __len__(self) -> int:
        return SIZE


def test_what_was_delivered_before_the_first_look_is_not_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast line brings the first message before the gate has found the connection."""
    seen: list[Unfinished] = []
    ended = []

    def judge(unfinished: Unfinished) -> str:
        seen.append(unfinished)
        watch._ended.set()
        return ""

    watch = InboundLimit("tcp://127.0.0.1:5555", False, judge, lambda: ended.append(1))
    watch.heard([Frame()])  # type: ignore[list-item]
    monkeypatch.setattr(gate, "_descriptors", lambda: [7])
    arrived = on_wire(SIZE, False) + gate.HANDSHAKE_BYTES
    monkeypatch.setattr(gate, "counted_bytes", lambda fd, port: (arrived, 0) if fd == 7 else None)
    watch.run()
    assert seen == [Unfinished(0, 0)]
    assert not ended


def test_a_verdict_is_asked_twice_before_a_connection_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two readings a message may have been delivered, which counts as unfinished and as held for a moment."""
    answers = iter(["too much", "", "too much", "too much"])
    shut: list[str] = []
    watch = InboundLimit("tcp://127.0.0.1:5555", False, lambda _: next(answers), lambda: None)
    monkeypatch.setattr(gate, "_descriptors", lambda: [7])
    monkeypatch.setattr(gate, "counted_bytes", lambda fd, port: (1, 0) if fd == 7 else None)
    monkeypatch.setattr(watch, "_shut", lambda: shut.append(watch.cut))
    watch.run()
    assert shut == ["too much"]
    assert next(answers, None) is None
