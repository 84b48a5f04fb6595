"""Real supervisors around real runner subprocesses with the simulated engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.engines.base import EngineOptions
from tandem.engines.sim.profile import SimProfile
from tandem.runner.messages import FromRunner
from tandem.runner.stream import Stream
from tandem.runner.supervisor import RunnerState, Supervisor
from tandem.types import EngineLoad, Event, GenerationRequest, Sampling, TextDelta, TextPrompt

DEADLINE = 30.0


class Watched(Supervisor):
    """A supervisor whose state changes can be waited for."""

    changed: asyncio.Event

    def _handle(self, message: FromRunner) -> None:
        super()._handle(message)
        self.changed.set()

    async def heartbeat(self) -> EngineLoad:
        """The load that the next heartbeat reports."""
        self.load = None
        async with asyncio.timeout(DEADLINE):
            while self.load is None:
                self.changed.clear()
                await self.changed.wait()
        return self.load

    async def reach(self, *states: RunnerState, restarts: int = 0) -> None:
        """Wait for one of `states` after at least so many restarts."""
        async with asyncio.timeout(DEADLINE):
            while self.state not in states or self.restarts < restarts:
                self.changed.clear()
                await self.changed.wait()


MakeSupervisor = Callable[..., Awaitable[Watched]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def make_supervisor(tmp_path: Path) -> AsyncIterator[MakeSupervisor]:
    made: list[Watched] = []

    async def make(
        *,
        ready: bool = True,
        settings: dict[str, object] | None = None,
        options: dict[str, object] | None = None,
        **profile: object,
    ) -> Watched:
        limits = Settings(home=tmp_path, **(settings or {}))  # type: ignore[arg-type]
        engine = EngineOptions(
            engine="sim",
            model_id="sim",
            max_batch=limits.max_batch,
            profile=SimProfile(**profile).to_dict(),  # type: ignore[arg-type]
            **(options or {}),  # type: ignore[arg-type]
        )
        changed = asyncio.Event()
        supervisor = Watched(f"instance-{len(made)}", engine, limits, changed.set)
        supervisor.changed = changed
        made.append(supervisor)
        supervisor.start()
        if ready:
            await supervisor.reach("ready", "failed")
        return supervisor

    yield make
    for supervisor in made:
        pid = supervisor.pid
        await supervisor.stop()
        assert supervisor.running == 0
        assert pid is None or not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def ask(text: str = "hello", max_tokens: int | None = 8) -> GenerationRequest:
    """A greedy request."""
    return GenerationRequest(TextPrompt(text), max_tokens=max_tokens, sampling=Sampling(temperature=0))


async def collect(stream: Stream) -> list[Event]:
    """All events of a stream."""
    async with asyncio.timeout(DEADLINE):
        return [event async for events in stream for event in events]


def text_of(events: list[Event]) -> str:
    """The answer's text."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def first_text(stream: Stream) -> list[Event]:
    """Events up to the first that carries text."""
    seen: list[Event] = []
    async with asyncio.timeout(DEADLINE):
        async for events in stream:
            seen.extend(events)
            if any(isinstance(event, TextDelta) for event in events):
                return seen
    raise AssertionError("the stream ended without text")
