"""Starting and ending the runner subprocess itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.runner.messages import HEADER, MAX_FRAME_BYTES, FromRunner, ToRunner, frame, from_runner_decoder

logger = logging.getLogger("tandem.supervisor")

STDERR_TAIL_LINES = 40
STOP_SECONDS = 5.0


@dataclass(slots=True)
class RunnerProcess:
    """A running subprocess and the socket to it.

    Attributes:
        stderr_tail: the last lines of its standard error, for error messages.
    """

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    stderr_tail: deque[str]
    _stderr_task: asyncio.Task[None]

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def send(self, message: ToRunner) -> None:
        """Write a message; a runner that is gone is noticed by the reader, not here."""
        if not self.writer.is_closing():
            self.writer.write(frame(message))

    async def receive(self) -> FromRunner | None:
        """The next message, or None when the runner has closed its end."""
        try:
            header = await self.reader.readexactly(HEADER.size)
            (length,) = HEADER.unpack(header)
            if length > MAX_FRAME_BYTES:
                return None
            return from_runner_decoder.decode(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            return None

    def kill(self) -> None:
        """End the process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the exit after the socket closed; kill what lingers.

        Returns:
            The exit status, negative for a signal.
        """
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.kill()
            await self.process.wait()
        await asyncio.wait({self._stderr_task}, timeout=STOP_SECONDS)
        self.writer.close()
        # Otherwise the garbage collector closes its pipes, perhaps after the event loop is gone.
        self.process._transport.close()  # type: ignore[attr-defined]
        return self.process.returncode if self.process.returncode is not None else -1


async def launch(log_file: Path, python: Path) -> RunnerProcess:
    """Start `python -m tandem.runner.process` and connect to it.

    Args:
        log_file: its standard error is appended here.
        python: the interpreter of the engine's environment.
    """
    ours, theirs = socket.socketpair()
    try:
        # A session of its own: Ctrl-C in the terminal reaches the server, which then stops its runners in order.
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            "tandem.runner.process",
            "--fd",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
    tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
    assert process.stderr is not None
    stderr_task = asyncio.create_task(_keep_stderr(process.stderr, tail, log_file))
    return RunnerProcess(process, reader, writer, tail, stderr_task)


async def _keep_stderr(stream: asyncio.StreamReader, tail: deque[str], log_file: Path) -> None:
    """Read to the end, whatever happens to the file: a runner whose pipe is full stops."""
    log: BinaryIO | None = None
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = log_file.open("ab")
    except OSError as error:
        logger.warning("a runner's log cannot be kept: %s", error)
    try:
        while chunk := await stream.read(1 << 16):
            tail.extend(chunk.decode("utf-8", "replace").splitlines())
            if log is not None and not _written(log, chunk):
                log = None
    finally:
        if log is not None:
            with contextlib.suppress(OSError):
                log.close()


def _written(log: BinaryIO, chunk: bytes) -> bool:
    try:
        log.write(chunk)
        log.flush()
    except OSError as error:
        logger.warning("a runner's log is not kept any more: %s", error)
        return False
    return True
