"""Results that came in parts are written where they belong, wherever they were cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ps.transport.receiving import fill


@given(st.tuples(*[st.integers(1, 6)] * 3), st.lists(st.integers(1, 40), max_size=8))
def test_cells_go_where_they_would_go_as_a_whole(shape: tuple[int, int, int], cuts: list[int]) -> None:
    cells = np.arange(np.prod(shape), dtype=np.float32)
    out = np.full((shape[0] + 1, shape[1] + 2, shape[2] + 3), -1, np.float32)
    target = out[1:, 1:-1, 2:-1]
    fill(target, np.split(cells, sorted(min(cut, cells.size) for cut in cuts)))
    np.testing.assert_array_equal(target, cells.reshape(shape))
    assert (out == -1).sum() == out.size - cells.size, "and nowhere else"
