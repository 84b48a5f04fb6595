"""An in-memory node that keeps `tandem.cluster.node.Node`'s contract and plays what a test tells it to.

`test_contract.py` holds it against the real one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

from tandem.cluster.node import InstanceStatus
from tandem.cluster.state import ClusterState
from tandem.config import Settings
from tandem.errors import InstanceNotReadyError, NotFoundError, QueueFullError, TandemError
from tandem.models.cards import ModelCard
from tandem.models.store import LocalModel
from tandem.runner.messages import CacheIdentity
from tandem.runner.stream import Stream
from tandem.types import (
    Accepted,
    EngineLoad,
    Event,
    Failure,
    Finished,
    GenerationRequest,
    ModelInfo,
    Statistics,
    TextDelta,
    Usage,
)

MODEL = "test/model"

Step = Event | list[Event] | asyncio.Event | TandemError
"""Events that come together, a gate to wait at, or the error that ends the stream."""


def card(model_id: str = MODEL, aliases: tuple[str, ...] = ("tiny",)) -> ModelCard:
    return ModelCard(
        model_id=model_id,
        storage_size=64 << 20,
        n_layers=2,
        hidden_size=64,
        supports_tensor=True,
        context_length=4096,
        family="test",
        capabilities=("text", "tools"),
        aliases=aliases,
    )


def finished(
    reason: str = "stop", prompt: int = 5, completion: int = 2, cached: int = 0, reasoning: int = 0
) -> Finished:
    statistics = Statistics(
        prompt_tokens=prompt,
        generation_tokens=completion,
        cached_tokens=cached,
        prefix_cache_hit="partial" if cached else "none",
        generation_tps=50.0,
        peak_memory=123,
    )
    return Finished(reason, Usage(prompt, completion, cached, reasoning), statistics)  # type: ignore[arg-type]


def hello(request: GenerationRequest) -> list[Step]:
    return [Accepted(5, 0), TextDelta("Hel"), TextDelta("lo"), finished()]


class DoubleNode:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self.reset()

    def reset(self) -> None:
        self.node_id = "node-of-the-double"
        self.play: Callable[[GenerationRequest], Iterable[Step]] = hello
        self.runner_state = "ready"
        self.error: str | None = None
        self.cards = [card()]
        self.full_after: int | None = None
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.cancelled: list[str] = []
        self.was_cancelled = asyncio.Event()
        self.was_started = asyncio.Event()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def state(self) -> ClusterState:
        return ClusterState()

    @property
    def models(self) -> SimpleNamespace:
        return SimpleNamespace(expected=())

    def instances(self) -> list[InstanceStatus]:
        return [
            InstanceStatus(
                instance_id=f"instance-of-{card.model_id}",
                model_id=card.model_id,
                card=card,
                state=self.runner_state,  # type: ignore[arg-type]
                error=self.error,
                info=ModelInfo(card.model_id, "sim", "sim", 2048, 1000, "float32"),
                load=EngineLoad(waiting=1, prefilling=2, decoding=self.open, steps=17),
                progress=None,
                running=self.open,
                restarts=3,
                created=1700000000.5,
                pid=1,
                kv_address=None,
                identity=CacheIdentity(),
            )
            for card in self.cards
        ]

    def on_disk(self) -> list[LocalModel]:
        found = card("disk/only", ())
        return [LocalModel(found.model_id, Path("/nowhere"), "folder", found, 1)]

    @property
    def store(self) -> SimpleNamespace:
        known = SimpleNamespace(all=lambda: [card(), card("known/only", ())], get=lambda name: None)
        return SimpleNamespace(list=self.on_disk, cards=known)

    def generate(self, model: str, request: GenerationRequest) -> Stream:
        names = {name.lower() for card in self.cards for name in (card.model_id, *card.aliases)}
        if model.lower() not in names and not (model == "default" and len(self.cards) == 1):
            served = ", ".join(card.model_id for card in self.cards)
            raise NotFoundError(f"No instance serves the model '{model}'. This node serves {served}.", param="model")
        if self.runner_state != "ready":
            raise InstanceNotReadyError(f"The model is {self.runner_state}.", retry_after=2.5)
        if self.full_after is not None and self.open >= self.full_after:
            raise QueueFullError("Too many requests are waiting.", retry_after=3)
        self.requests.append(request)
        self.open += 1
        self.was_started.set()

        def on_close(still_running: bool) -> None:
            self.open -= 1
            if still_running:
                self.cancelled.append(stream.request_id)
                self.was_cancelled.set()

        stream = Stream(str(uuid.uuid4()), on_close)
        task = asyncio.create_task(self._perform(stream, list(self.play(request))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _perform(self, stream: Stream, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, TandemError):
                stream.push([Failure.of(step)])
            else:
                stream.push(step if isinstance(step, list) else [step])
                await asyncio.sleep(0)
