"""Which engines work on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tandem.cluster.facts.probe import MARK
from tandem.engines.installed import interpreter_of
from tandem.types.facts import Backend, EngineFact

PROBE_SECONDS = 120.0
"""A cold import of vLLM on a busy machine takes half a minute."""
STOP_SECONDS = 2.0
BACKENDS: tuple[Backend, ...] = ("MlxMetal", "MlxCuda", "MlxCpu", "Vllm")
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""An import has no business on the network."""


class _Answer(msgspec.Struct, frozen=True):
    available: bool
    version: str
    reason: str


class EngineProber:
    """Asks each engine in a subprocess, one after another, once; the answers are kept.

    Args:
        deadline: seconds for each engine.
        environment: variables on top of this process's.
        platform: as `sys.platform`.
        home: the data folder, where engines may have environments of their own; None for none.
    """

    def __init__(
        self,
        deadline: float = PROBE_SECONDS,
        environment: Mapping[str, str] | None = None,
        platform: str = sys.platform,
        home: Path | None = None,
    ) -> None:
        self._deadline = deadline
        self._environment = {**os.environ, **QUIET, **(environment or {})}
        self._platform = platform
        self._home = home
        self._lock = asyncio.Lock()
        self._known: dict[Backend, EngineFact] = {}

    async def engines(self) -> tuple[EngineFact, ...]:
        """Every engine. The first call takes some seconds."""
        return tuple([await self.engine(backend) for backend in BACKENDS])

    async def engine(self, backend: Backend) -> EngineFact:
        """One engine, probed at the first call only."""
        async with self._lock:
            if backend not in self._known:
                excuse = impossible(backend, self._platform)
                self._known[backend] = (
                    EngineFact(backend, available=False, reason=excuse) if excuse else await self._probe(backend)
                )
            return self._known[backend]

    def interpreter(self, backend: Backend) -> Path:
        """The Python that runners with this engine are started with."""
        if backend == "Vllm" and self._home is not None:
            return interpreter_of("vllm", self._home)
        return Path(sys.executable)

    async def _probe(self, backend: Backend) -> EngineFact:
        # One pipe for both: the answer is found by its mark, and the last line says why there is none.
        process = await asyncio.create_subprocess_exec(
            self.interpreter(backend),
            "-m",
            "tandem.cluster.facts.probe",
            backend,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._deadline):
                output, _ = await process.communicate()
        except TimeoutError:
            return EngineFact(backend, available=False, reason=f"its import took more than {self._deadline:g} seconds")
        finally:
            # The whole group, as an engine may start helpers; nothing is left when it ended by itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            process._transport.close()  # type: ignore[attr-defined]
        assert process.returncode is not None
        return read_answer(backend, output.decode("utf-8", "replace"), process.returncode)


def impossible(backend: Backend, platform: str) -> str:
    """Why an engine cannot run on a platform, without asking it; empty when it may. Pure."""
    if backend == "MlxMetal" and platform != "darwin":
        return "it needs macOS on Apple silicon"
    if backend == "MlxCuda" and platform != "linux":
        return "it needs Linux with an NVIDIA GPU"
    if backend == "Vllm" and platform != "linux":
        return "Tandem runs it on Linux only"
    return ""


def read_answer(backend: Backend, output: str, status: int) -> EngineFact:
    """What a probe's output and exit status mean. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(MARK)]
    if marked:
        with contextlib.suppress(msgspec.DecodeError):
            answer = msgspec.json.decode(marked[-1].removeprefix(MARK), type=_Answer)
            return EngineFact(backend, answer.version, answer.available, answer.reason)
    last = next((line for line in reversed(lines) if not line.startswith(MARK)), "")
    return EngineFact(backend, available=False, reason=f"its import {ending(status)}" + (f": {last}" if last else ""))


def ending(status: int) -> str:
    """How a process ended, in words. Pure."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
