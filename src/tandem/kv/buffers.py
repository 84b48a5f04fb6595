"""Rows of buffers that one system call fills or sends."""

from __future__ import annotations

MAX_BUFFERS = 512
"""Per system call; all platforms take 1024."""


def split(views: list[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes of the buffers, and the rest. No buffer may be empty, and none comes out empty."""
    for index, view in enumerate(views):
        if count < len(view):
            before = [*views[:index], view[:count]] if count else views[:index]
            return before, [view[count:], *views[index + 1 :]]
        count -= len(view)
    return views, []


def pieces(views: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """What to receive next, at most `nbytes` and `MAX_BUFFERS` buffers, and what comes after that."""
    now, later = split(views[:MAX_BUFFERS], nbytes)
    return now, [*later, *views[MAX_BUFFERS:]]
