"""Answering in this process: one instance and no cluster, on an event loop in a thread of its own.

The loop must run all the time, also while a person types: it hears the runner's heartbeats.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.cli.loading import interruptible, obtain, show_loading
from tandem.cli.progress import progress_view
from tandem.cluster.identity import node_id
from tandem.cluster.instances import LocalInstances
from tandem.cluster.loop_thread import LoopThread
from tandem.config import Settings
from tandem.engines.base import EngineName
from tandem.engines.installed import require
from tandem.engines.sim.profile import is_sim_reference
from tandem.errors import TandemError
from tandem.models.store import ModelStore
from tandem.types import Event, GenerationRequest


@contextmanager
def local_answerer(settings: Settings, reference: str) -> Iterator[LocalAnswerer]:
    """Load `reference`, showing how far it is, and stop it at the end.

    Raises:
        TandemError: it cannot be obtained or loaded.
    """
    with LoopThread() as loop:
        instances = LocalInstances(settings, node_id(settings.home))
        try:
            if not is_sim_reference(reference):
                require(settings.engine, settings.home)
            with progress_view() as view:
                with interruptible() as interrupted:
                    model = obtain(ModelStore(settings), reference, view, interrupted)
                instance_id = loop.call(_launch(instances, model, settings.engine))
                loop.call(show_loading(instances, [instance_id], view))
            yield LocalAnswerer(loop, instances, instance_id)
        finally:
            loop.call(instances.stop())


async def _launch(instances: LocalInstances, model: Any, engine: EngineName) -> str:
    # Nobody else is to be served, in whatever way.
    return instances.launch(model, engine=engine, kv_port=-1)


class LocalAnswerer:
    """Answers from one instance."""

    def __init__(self, loop: LoopThread, instances: LocalInstances, instance_id: str) -> None:
        self._loop = loop
        self._instances = instances
        self._instance_id = instance_id

    @property
    def model_id(self) -> str:
        """The model that answers."""
        return self._instances.get(self._instance_id).card.model_id

    def answer(self, request: GenerationRequest) -> Generator[Event]:
        """See `Answerer.answer`."""
        arrived: queue.SimpleQueue[list[Event] | TandemError | None] = queue.SimpleQueue()
        reading = asyncio.run_coroutine_threadsafe(self._read(request, arrived), self._loop.loop)
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, TandemError):
                    raise item
                yield from item
        finally:
            reading.cancel()

    async def _read(
        self, request: GenerationRequest, arrived: queue.SimpleQueue[list[Event] | TandemError | None]
    ) -> None:
        try:
            stream = self._instances.submit(self._instance_id, request)
            try:
                async for events in stream:
                    arrived.put(events)
            finally:
                await stream.aclose()
        except TandemError as error:
            arrived.put(error)
        else:
            arrived.put(None)
