"""Tasks that run beside everything else, and must not end unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine


def background(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Run `work` beside the caller. If a fault ends it, the event loop's handler hears of it at once."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"The task '{name}' ended by a fault.", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended. What it failed with was reported already."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
