"""Faults that were found in exo, each as a test of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.helpers import error_of, parse_sse, stream
from tandem.api.cluster.state import MOST_EVENTS
from tandem.cluster.bus.config import free_port
from tandem.cluster.reconciler import instance_here
from tandem.models.cards import ModelCard, builtin_cards

from .nodes import Served, killable, serving, settings_for

pytestmark = pytest.mark.anyio

CARD: dict[str, Any] = {"storage_size": 1, "n_layers": 1, "hidden_size": 1, "supports_tensor": False}
CHAT = "/v1/chat/completions"


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **more}


async def test_a1_a_model_that_only_prefills_is_refused_at_once(left: Served, right: Served) -> None:
    """A chat to it would hang for ever: keep-alives, and no answer."""
    for name, served in (("alpha", left), ("beta", right)):
        intent = instance_here(served.node.node_id, f"sim:model_id={name}", name)
        card = {**intent.card, "base_model": "one", "quantization": "4bit"}
        await left.node.commands.create(msgspec.structs.replace(intent, card=card))
    link = {"prefill_instances": ["alpha"], "decode_instances": ["beta"]}
    linked = await left.http.put("/v1/instance-links/roles", json=link)
    assert linked.status_code == 200, linked.text
    await left.ready("beta")
    for streaming in (False, True):
        async with asyncio.timeout(10):
            answer = await left.http.post(CHAT, json=chat("alpha", stream=streaming))
        assert answer.status_code == 409
        assert "only prefills" in error_of(answer)["message"]
    assert (await left.http.post(CHAT, json=chat("beta"))).status_code == 200


@pytest.mark.parametrize("where", [0, 1], ids=["here", "elsewhere"])
async def test_a3_an_instance_that_is_removed_ends_its_streams(
    left: Served, two: tuple[Served, Served], where: int
) -> None:
    """Streams would end without a finish and without `[DONE]`, and plain requests with an assertion."""
    placed = await left.place(
        model_id="sim:model_id=short-lived,decode_tps=20,answer_tokens=100000", node_ids=[two[where].node.node_id]
    )
    await left.ready(placed["instance_id"])
    body = chat("short-lived", max_tokens=10_000)
    plain = asyncio.create_task(left.http.post(CHAT, json=body))
    text = ""
    async with left.http.stream("POST", CHAT, json={**body, "stream": True}) as response:
        async for piece in response.aiter_text():
            if "content" in piece and "content" not in text:
                removed = await left.http.delete(f"/instance/{placed['instance_id']}")
                assert removed.status_code == 200
            text += piece
    sse = parse_sse(text)
    assert sse.done
    assert sse.events[-1]["error"]["code"] == "runner_died"
    async with asyncio.timeout(10):
        answer = await plain
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "runner_died"


@pytest.mark.parametrize("where", [0, 1], ids=["here", "elsewhere"])
async def test_a8_the_first_words_are_never_lost(left: Served, two: tuple[Served, Served], where: int) -> None:
    """A queue that is registered after the command was sent drops what came first."""
    placed = await left.place(model_id="sim:model_id=fast,answer_tokens=6", node_ids=[two[where].node.node_id])
    await left.ready(placed["instance_id"])
    expected = (await left.http.post(CHAT, json=chat("fast"))).json()["choices"][0]["message"]["content"]
    assert len(expected.split()) == 6
    streams = await asyncio.gather(*(stream(left.http, CHAT, chat("fast")) for _ in range(20)))
    assert [sse.text() for sse in streams] == [expected] * 20


async def test_a9_a_placement_that_fails_says_so(left: Served) -> None:
    """`Command received.`, and nothing ever comes of it."""
    unknown = await left.http.post("/place_instance", json={"model_id": "nobody/knows"})
    assert unknown.status_code == 404
    assert "nobody/knows" in error_of(unknown)["message"]
    crowd = await left.http.post("/place_instance", json={"model_id": "sim", "min_nodes": 9})
    assert crowd.status_code in (409, 422)
    assert error_of(crowd)["message"]
    card = max(builtin_cards(), key=lambda card: card.storage_size)
    huge = await left.http.post("/place_instance", json={"model_id": card.model_id})
    assert huge.status_code in (409, 422)
    assert card.model_id.rpartition("/")[2] in error_of(huge)["message"]
    assert left.node.state.instances == {}
    several = await left.http.post("/place_instance", json={"model_id": "sim", "min_nodes": 2})
    assert several.status_code == 422
    assert "later version" in error_of(several)["message"]


async def test_a12_events_are_bounded(left: Served) -> None:
    """The whole log was written out from the event loop, however long it had become."""
    assert len(left.node.control.log._ring) <= MOST_EVENTS
    for number in range(5):
        await left.node.commands.add_card(ModelCard(**CARD, model_id=f"test/card-{number}"))
    few = (await left.http.get("/events", params={"limit": 3})).json()
    indices = [next(iter(event.values()))["index"] for event in few]
    assert len(indices) == 3
    assert indices == list(range(indices[0], indices[0] + 3))
    assert indices[-1] >= 4
    assert (await left.http.get("/events", params={"limit": MOST_EVENTS + 1})).status_code == 400


async def test_runners_and_ports_go_with_their_instance(left: Served, right: Served) -> None:
    """They stayed in the state for ever, and prompts were sent to a port that nobody listened at."""
    placed = await left.place(model_id="sim:model_id=gone", node_ids=[right.node.node_id])
    instance_id = placed["instance_id"]
    await left.ready(instance_id)
    [runner] = placed["instance"]["SimInstance"]["shardAssignments"]["runnerToShard"]
    assert (await left.http.get(f"/state/prefillServerPorts/{runner}")).json() > 0
    assert (await left.http.delete(f"/instance/{instance_id}")).status_code == 200
    state = (await left.http.get("/state")).json()
    assert runner not in state["runners"]
    assert runner not in state["prefillServerPorts"]
    assert instance_id not in state["instances"]
    assert instance_id not in state["instanceHealth"]
    await right.until(lambda: not right.node.world().nodes[right.node.node_id].runners)
    assert runner not in (await right.http.get("/state")).json()["runners"]


async def test_a_node_that_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its identity, engines, runners and ports stayed."""
    ports = [free_port("tcp"), free_port("tcp")]
    async with serving(settings_for(tmp_path / "stays", ports[0], ports[1])) as stays:
        async with killable(tmp_path / "goes", ports[1], ports[0]) as goes:
            await stays.meets(goes.node_id)
            placed = await stays.place(model_id="sim:model_id=there", node_ids=[goes.node_id])
            await stays.ready(placed["instance_id"])
            [runner] = placed["instance"]["SimInstance"]["shardAssignments"]["runnerToShard"]
            before = (await stays.http.get("/state")).json()
            assert runner in before["runners"]
            goes.kill()
            await stays.until(lambda: goes.node_id not in stays.node.state.nodes)
        after = (await stays.http.get("/state")).json()
        for section in (
            "nodeIdentities", "nodeMemory", "nodeDisk", "nodeSystem", "nodeNetwork", "nodeBackends", "downloads",
            "lastSeen",
        ):  # fmt: skip
            assert set(before[section]) == {stays.node.node_id, goes.node_id}
            assert set(after[section]) == {stays.node.node_id}, section
        assert after["topology"]["nodes"] == [stays.node.node_id]
        assert goes.node_id not in str(after["topology"])
        assert runner not in after["runners"]
        assert runner not in after["prefillServerPorts"]
        health = after["instanceHealth"][placed["instance_id"]]
        assert health["health"] == "dead"
        assert goes.node_id in health["reason"]
        async with asyncio.timeout(10):
            answer = await stays.http.post(CHAT, json=chat("there"))
        assert answer.status_code == 503
        assert goes.node_id in error_of(answer)["message"]
