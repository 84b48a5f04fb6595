"""Rows of buffers against one long string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.kv import buffers

rows = st.lists(st.binary(min_size=1, max_size=5), max_size=12)


@given(rows=rows, count=st.integers(0, 70))
def test_splitting_loses_nothing(rows: list[bytes], count: int) -> None:
    before, after = buffers.split([memoryview(row) for row in rows], count)
    assert b"".join(before) == b"".join(rows)[:count]
    assert b"".join(after) == b"".join(rows)[count:]
    assert all(len(view) for view in (*before, *after))


@given(rows=rows, nbytes=st.integers(1, 70))
def test_pieces_come_in_order_and_are_small_enough(rows: list[bytes], nbytes: int) -> None:
    left, received = [memoryview(row) for row in rows], b""
    while left:
        now, left = buffers.pieces(left, nbytes)
        assert 0 < sum(map(len, now)) <= nbytes
        received += b"".join(now)
    assert received == b"".join(rows)


def test_a_system_call_gets_no_more_buffers_than_it_takes() -> None:
    now, later = buffers.pieces([memoryview(b"x")] * (buffers.MAX_BUFFERS + 3), 1 << 20)
    assert (len(now), len(later)) == (buffers.MAX_BUFFERS, 3)
