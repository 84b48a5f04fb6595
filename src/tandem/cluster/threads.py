"""Long work in threads that ends when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from tandem.errors import CancelledError

Check: TypeAlias = Callable[[], None]
"""Called at every step of the work; raises once it was given up."""
T = TypeVar("T")


async def in_thread(work: Callable[[Check], T]) -> T:
    """Do `work` in a thread. Cancelling returns at once, and ends the work at its next step.

    Raises:
        whatever `work` raises.
    """
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise CancelledError("Nobody waits for this any more. What has arrived is kept.")

    try:
        return await asyncio.to_thread(work, check)
    finally:
        given_up.set()
