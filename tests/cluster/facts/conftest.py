"""What the tests of facts share."""

from __future__ import annotations

import threading

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def join_readers() -> None:
    """Wait for the threads that read the machine, as after one that hung was let go."""
    for thread in threading.enumerate():
        if thread.name == "tandem-facts":
            thread.join(20.0)
            assert not thread.is_alive()
