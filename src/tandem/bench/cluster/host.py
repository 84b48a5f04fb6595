"""A program that holds some nodes of the bench's cluster and does with them what it is asked over standard input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.cluster.hosted import Hosted, Known
from tandem.bench.cluster.messages import HostSettings, Started
from tandem.bench.cluster.traffic import Load
from tandem.cluster.facts.gather import Sources
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.errors import DeadlineError, NotFoundError, TandemError
from tandem.placement.plan import PlacementRequest, place
from tandem.placement.preview import previews

STOP_SECONDS = 8.0


class Host:
    """The program's nodes, and the answers to the bench's questions."""

    def __init__(self, settings: HostSettings) -> None:
        sources = Sources(engines=Known(settings.engines))
        self.hosted = [Hosted(Node(_settings(settings, index), sources)) for index in range(settings.nodes)]

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the bench asks, by its `do`.

        Raises:
            DeadlineError: something did not happen in time.
            TandemError: a node's refusal.
        """
        do, deadline = question.pop("do"), question.pop("deadline", 60.0)
        try:
            async with asyncio.timeout(deadline):
                answer: dict[str, Any] = await getattr(self, f"do_{do}")(**question)
                return answer
        except TimeoutError as error:
            raise DeadlineError(f"'{do}' did not come about within {deadline:g} s. {self._view()}") from error

    async def do_start(self) -> dict[str, Any]:
        """All nodes at once."""
        called = time.monotonic()
        await asyncio.gather(*(one.start() for one in self.hosted))
        started = Started([one.node.node_id for one in self.hosted], called, time.monotonic())
        return msgspec.to_builtins(started)  # type: ignore[no-any-return]

    async def do_joined(self, ids: list[str]) -> dict[str, Any]:
        """When the last of `ids` was seen by the last of these nodes."""
        return {"at": max([await one.joined(ids) for one in self.hosted])}

    async def do_left(self, ids: list[str]) -> dict[str, Any]:
        """When the last of these nodes had dropped the last of `ids`."""
        return {"at": max([await one.left(ids) for one in self.hosted])}

    async def do_departures(self, ids: list[str]) -> dict[str, Any]:
        """How often a node was taken for gone that is not among `ids`, which were killed."""
        return {"count": sum(one.departures(ids) for one in self.hosted)}

    async def do_launch(self, references: list[str]) -> dict[str, Any]:
        """An instance on each of the first nodes."""
        for one, reference in zip(self.hosted, references, strict=False):
            await one.node.wait_ready(await one.node.launch(reference))
        return {}

    async def do_ready(self, model_id: str, count: int) -> dict[str, Any]:
        """Wait until every node here knows of so many ready instances."""
        for one in self.hosted:
            await one.ready(model_id, count)
        return {}

    async def do_traffic(
        self, model: str, streams: int, tokens: int, seconds: float, request_deadline: float
    ) -> dict[str, Any]:
        """Requests that enter at the nodes here."""
        nodes = [one.node for one in self.hosted]
        load = Load(nodes, model, streams=streams, tokens=tokens, seconds=seconds, deadline=request_deadline)
        return msgspec.to_builtins(await load.run())  # type: ignore[no-any-return]

    async def do_place(self, model: str, rounds: int) -> dict[str, Any]:
        """Milliseconds of a placement and of all previews of a model, one pair a round."""
        node = self.hosted[0].node
        card = await asyncio.to_thread(node.store.cards.get, model)
        if card is None:
            raise NotFoundError(f"There is no model card '{model}'. `tandem models` lists them.", param="model")
        request = PlacementRequest(card, card.model_id)
        placing, previewing, found = [], [], 0
        for index in range(rounds):
            world = node.world()
            began = time.perf_counter()
            # Whether the model fits is this machine's affair: a refusal looks at every node, too.
            with contextlib.suppress(TandemError):
                place(request, world, f"bench-{index}", launch=True)
            placed = time.perf_counter()
            found = len(previews(card, world, identify=lambda: "bench"))
            placing.append((placed - began) * 1e3)
            previewing.append((time.perf_counter() - placed) * 1e3)
            await asyncio.sleep(0)
        return {"place_ms": placing, "previews_ms": previewing, "previews": found, "nodes": len(world.nodes)}

    async def stop(self) -> None:
        """Leave the cluster."""
        await asyncio.gather(*(one.stop() for one in self.hosted), return_exceptions=True)

    def _view(self) -> str:
        seen = ", ".join(str(one.sees) for one in self.hosted)
        return f"The nodes of this program see {seen} nodes."


def _settings(settings: HostSettings, index: int) -> Settings:
    return Settings(
        home=Path(settings.home) / str(index),
        node_name=f"node {index}",
        cluster_name=settings.cluster_name,
        cluster_secret=settings.secret,
        cluster_port=0,
        cluster_peers="",
        cluster_discovery=True,
        cluster_open=False,
        offline=True,
        prefill_peers="",
        kv_port=0,
    )


async def main(settings: HostSettings) -> None:
    """Answer question after question until the input ends."""
    loop = asyncio.get_running_loop()
    questions: asyncio.Queue[str | None] = asyncio.Queue()
    threading.Thread(target=_read, args=(loop, questions), daemon=True).start()
    host = Host(settings)
    _say({"pid": os.getpid()})
    work: asyncio.Task[None] | None = None
    while (line := await questions.get()) is not None:
        work = asyncio.create_task(_reply(host, line))
        work.add_done_callback(_ended)
    if work is not None:
        work.cancel()
        await asyncio.wait({work})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await host.stop()


async def _reply(host: Host, line: str) -> None:
    try:
        _say(await host.answer(json.loads(line)))
    except TandemError as error:
        _say({"error": error.message})


def _ended(work: asyncio.Task[None]) -> None:
    """A fault of the program's own ends it: the bench shows the end of its log."""
    if not work.cancelled() and (error := work.exception()) is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)


def _read(loop: asyncio.AbstractEventLoop, questions: asyncio.Queue[str | None]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(questions.put_nowait, line)
    loop.call_soon_threadsafe(questions.put_nowait, None)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import uvloop

    from tandem import garbage

    garbage.settle()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=HostSettings)))
