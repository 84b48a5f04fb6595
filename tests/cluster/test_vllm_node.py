"""A node that runs a model with real vLLM: placed, loaded within its promise, answering, removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest

from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.models.packaged import INSTALL_HINT, packaged_gguf
from tandem.placement.plan import PlacementRequest
from tandem.placement.planner import Plan, Planner
from tandem.types import Finished, GenerationRequest, Sampling, TextDelta, TextPrompt

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(packaged_gguf() is None, reason=INSTALL_HINT),
]
DEADLINE = 300.0


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    node = Node(Settings(home=tmp_path_factory.mktemp("vllm")))
    await node.start()
    yield node
    await node.stop()


async def test_an_instance_is_placed_loads_within_its_promise_and_answers(node: Node) -> None:
    model = await node.models.obtain("demo")
    assert not isinstance(model, str)
    async with asyncio.timeout(DEADLINE), node.control.log.subscribe() as events:
        while not any(one.backend == "Vllm" for facts in node.state.nodes.values() for one in facts.engines):
            await anext(events)
    [vllm] = [one for one in node.state.nodes[node.node_id].engines if one.backend == "Vllm"]
    assert vllm.available, vllm.reason
    wish = PlacementRequest(model.card, model.model_id, meta="Vllm", context_length=1024)
    planned = Planner(model.card, node.world(), wish.constraints()).attempt("Pipeline", "Vllm", 1)
    assert isinstance(planned, Plan)
    intent = await node.commands.place(wish)
    assert intent.meta == "Vllm"
    assert intent.options["cache_bytes"] > 0
    await node.wait_ready(intent.instance_id, DEADLINE)
    [status] = [one for one in node.instances() if one.instance_id == intent.instance_id]
    assert status.info is not None
    assert (status.info.engine, status.info.context_length) == ("vllm", 1024)
    text = ""
    request = GenerationRequest(TextPrompt("The capital of France is"), max_tokens=6, sampling=Sampling(temperature=0))
    async with asyncio.timeout(DEADLINE):
        async for batch in node.generate("demo", request):
            text += "".join(event.text for event in batch if isinstance(event, TextDelta))
            last = batch[-1]
    assert isinstance(last, Finished)
    assert "Paris" in text
    assert status.pid is not None
    taken = psutil.Process(status.pid).memory_info().rss
    assert taken <= planned.needs[0], f"{taken / 1e9:.2f} GB taken, {planned.needs[0] / 1e9:.2f} GB planned"
    await node.commands.remove(intent.instance_id)
