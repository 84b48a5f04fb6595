"""What every test of the running plane leaves behind: nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every thread that a test started has ended."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(10)
    assert not [thread.name for thread in left if thread.is_alive()]
