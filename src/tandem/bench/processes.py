"""Servers as subprocesses: started, watched, measured, and ended by their process id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tandem.errors import DeadlineError, UnavailableError

HOST = "127.0.0.1"
STOP_SECONDS = 15.0
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """User plus system time since the start: of the process that serves HTTP, and of all its descendants."""

    server: float
    children: float

    def since(self, earlier: CpuSeconds) -> CpuSeconds:
        """What was spent between two readings."""
        return CpuSeconds(self.server - earlier.server, self.children - earlier.children)

    @property
    def total(self) -> float:
        """Both together."""
        return self.server + self.children


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """Async context manager around one server process.

    Args:
        name: for messages.
        command: starts a server on `port` of the loopback address.
        environment: added to our own.
        log_file: gets its standard output and error.
        start_seconds: until `GET /health` must answer 200.
        connect: makes a connection to a port of the server's loopback address, or raises an OSError. None connects
            from here; a server in a network namespace of its own is reached in another way.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log_file: Path,
        start_seconds: float = 180.0,
        connect: Callable[[int], socket.socket] | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self._connect = connect or _connect
        self._command = list(command)
        self._environment = environment
        self._log_file = log_file
        self._start_seconds = start_seconds
        self._process: psutil.Popen | None = None

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        pid: int = self._process.pid
        return pid

    async def __aenter__(self) -> ServerProcess:
        with self._log_file.open("wb") as log:
            # A session of its own: Ctrl-C reaches the bench alone, which then ends the servers in order.
            self._process = psutil.Popen(
                self._command,
                env=os.environ | dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._healthy()
        except TimeoutError as error:
            await self.stop()
            raise DeadlineError(
                f"{self.name} was not ready after {self._start_seconds:.0f} s. It said: {self._last_words()}"
            ) from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _healthy(self) -> None:
        assert self._process is not None
        while True:
            status = self._process.poll()
            if status is not None:
                raise UnavailableError(
                    f"{self.name} ended with status {status} instead of serving. It said: {self._last_words()}"
                )
            if await _health(self.port, self._connect) == 200:
                return
            await asyncio.sleep(POLL_SECONDS)

    def cpu(self) -> CpuSeconds:
        """What the process and its descendants have used so far."""
        assert self._process is not None
        children = 0.0
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                children += times.user + times.system
        own = self._process.cpu_times()
        return CpuSeconds(own.user + own.system, children)

    async def stop(self) -> None:
        """End the process and what it started: first asked to, then killed. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        family: list[psutil.Process] = [process]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        # In a thread, and shielded: a second Ctrl-C must not leave a server behind.
        await asyncio.shield(asyncio.to_thread(_end, family))

    def _last_words(self) -> str:
        tail = self._log_file.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return tail or "nothing"


def _end(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_SECONDS)


def _connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), CONNECT_SECONDS)


async def _health(port: int, connect: Callable[[int], socket.socket]) -> int | None:
    """The status of `GET /health`; None while nothing answers."""
    try:
        reader, writer = await asyncio.open_connection(sock=await asyncio.to_thread(connect, port))
    except OSError:
        return None
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n\r\n".encode())
        line = (await reader.readline()).split()
        return int(line[1]) if len(line) > 1 else None
    except OSError:
        return None
    finally:
        writer.close()
