"""What the server remembers of a connection."""

from __future__ import annotations

import numpy as np
import pytest

from ps.transport.operands import MESSAGE_BYTES, Operand, parcels
from ps.transport.peers import BUNDLE_S, Peer


def test_pieces_of_a_device_that_left_are_released_when_the_product_ends() -> None:
    """Found by the loop world: blocks of a device that left its connection open stayed in the server's memory."""
    peer = Peer(b"a", {})
    peer.add([0])
    left, right = (Operand(np.ones((1, 4, 3), np.float32)) for _ in range(2))
    held = peer.held(7, (left.id, right.id), kept=0)
    boxes, one = np.array([[0, 1, 0, 4, 0, 4]]), np.zeros(1, np.int64)
    for parcel in parcels(7, (left, right), boxes, one, one, one, held, peer.piece_ids, shared=False):
        peer.lend(7, held, 0, parcel)
    assert peer.lent
    peer.finished(7)
    assert not peer.lent
    assert sorted(peer.take_released().tolist()) == [0, 1], "each piece is released once"
    peer.answered(7, 0)
    assert not peer.owes_release, "a late answer releases nothing again"


def test_a_message_to_one_device_takes_its_line_a_few_milliseconds_and_one_to_a_pod_may_take_longer() -> None:
    phone, pod = Peer(b"a", {}, down_bps=8e6), Peer(b"b", {}, down_bps=8e6)
    phone.add([0])
    pod.add([1, 2])
    assert 8 * phone.message_bytes / phone.down_bps == pytest.approx(BUNDLE_S, abs=1e-3)
    assert pod.message_bytes == MESSAGE_BYTES
    phone.down_bps = 1e12
    assert phone.message_bytes <= MESSAGE_BYTES + 1
