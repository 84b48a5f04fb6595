"""Answering in this process: a node with one instance, on an event loop in a thread of its own.

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
from tandem.cluster.background import LoopThread
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.errors import TandemError
from tandem.types import Event, GenerationRequest


@contextmanager
def local_answerer(settings: Settings, reference: str) -> Iterator[LocalAnswerer]:
    """Load `reference`, showing how far it is, and stop it at the end.

    Raises:
        TandemError: it cannot be obtained or loaded.
    """
    with LoopThread() as loop:
        node = Node(settings)
        try:
            with progress_view() as view:
                with interruptible() as interrupted:
                    model = obtain(node.store, reference, view, interrupted)
                instance = loop.call(_launch(node, model))
                loop.call(show_loading(node, [instance], view))
            yield LocalAnswerer(loop, node)
        finally:
            loop.call(node.stop())


async def _launch(node: Node, model: Any) -> str:
    return node.launch(model)


class LocalAnswerer:
    """Answers from the node's one instance."""

    def __init__(self, loop: LoopThread, node: Node) -> None:
        self._loop = loop
        self._node = node

    @property
    def model_id(self) -> str:
        """The model that answers."""
        return self._node.instances()[0].model_id

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
            stream = self._node.generate("default", request)
            try:
                async for events in stream:
                    arrived.put(events)
            finally:
                await stream.aclose()
        except TandemError as error:
            arrived.put(error)
        else:
            arrived.put(None)
