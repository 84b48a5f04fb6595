"""Reads that may block, kept off the event loop and given up after a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class BlockingRead(Generic[T]):
    """One function that is called in a thread of its own, never twice at once.

    The thread is a daemon: a read that hangs (a dead network disk, a stuck driver) keeps neither the event loop nor the
    process's exit waiting, and at most one such thread exists.

    Args:
        read: may block.
        deadline: seconds.
    """

    def __init__(self, read: Callable[[], T], deadline: float) -> None:
        self._read = read
        self._deadline = deadline
        self._running = False

    async def __call__(self) -> T | None:
        """What the function returned; None when it was too late, or when an earlier call still hangs.

        Raises:
            Exception: whatever the function raised in time.
        """
        if self._running:
            return None
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        self._running = True
        threading.Thread(target=self._work, args=(loop, outcome), name="tandem-facts", daemon=True).start()
        done, _ = await asyncio.wait((outcome,), timeout=self._deadline)
        if not done:
            outcome.cancel()
            return None
        return outcome.result()

    def _work(self, loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[T]) -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._read()
        except BaseException as raised:  # noqa: BLE001 - raised again where it is awaited
            error = raised
        self._running = False

        def settle() -> None:
            if outcome.done():
                return
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

        # The loop may be gone by the time that a late read comes back.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)


def run_tool(command: Sequence[str], deadline: float) -> str | None:
    """What a command prints. Blocks; call it in a worker thread.

    Returns:
        None when there is no such command, when it fails, or when it does not end within `deadline` seconds.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            output, _ = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            # The whole group: a child of the tool would keep the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None
    return output.decode("utf-8", "replace") if process.returncode == 0 else None


def read_text(path: os.PathLike[str] | str) -> str:
    """A small file's text without the blanks and zero bytes around it; empty when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16).strip("\0 \t\r\n")
    except OSError:
        return ""
