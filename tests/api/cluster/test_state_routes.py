"""`/state`, its paths, and the events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.helpers import error_of
from tandem.api.cluster import state as routes
from tandem.cluster.bus.config import free_port
from tandem.cluster.events import EventLog
from tandem.models.cards import ModelCard

from .nodes import Served, serving, settings_for

pytestmark = pytest.mark.anyio

CARD: dict[str, Any] = {"storage_size": 7, "n_layers": 1, "hidden_size": 1, "supports_tensor": False}


async def add_card(served: Served, model_id: str) -> None:
    await served.node.commands.add_card(ModelCard(**CARD, model_id=model_id))


async def frames(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, str]]:
    """Server-sent events, comments left out."""
    found: dict[str, str] = {}
    async for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            found[name] = value
        elif not line and found:
            yield found
            found = {}


@contextlib.asynccontextmanager
async def following(http: httpx.AsyncClient, path: str, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, str]]]:
    async with http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        yield frames(lines)


async def test_paths(left: Served) -> None:
    await add_card(left, "org/with/slashes")
    http = left.http
    whole = (await http.get("/state/")).json()
    assert whole.keys() == (await http.get("/state")).json().keys()
    memory = (await http.get(f"/state/nodeMemory/{left.node.node_id}/ramTotal/inBytes")).json()
    assert memory == whole["nodeMemory"][left.node.node_id]["ramTotal"]["inBytes"]
    assert (await http.get("/state/topology/nodes/0")).json() == whole["topology"]["nodes"][0]
    for spelling in ("org/with/slashes", "org%2Fwith%2Fslashes"):
        card = await http.get(f"/state/customModelCards/{spelling}/storageSize")
        assert card.json() == {"inBytes": 7}


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "nodeMemory/nobody",
        "topology/nodes/9",
        "topology/nodes/-1",
        "topology/nodes/first",
        "lastEventAppliedIdx/0",
        "lastEventAppliedIdx/0/1",
        "node_memory",
    ],
)
async def test_paths_that_lead_nowhere(left: Served, path: str) -> None:
    """Into a scalar, too: exo answered the scalar."""
    response = await left.http.get(f"/state/{path}")
    assert response.status_code == 404
    assert error_of(response)["message"] == f"unable to find path '{path.replace('/', '.')}' in state json"


async def test_events_have_exos_form(left: Served) -> None:
    placed = await left.place(model_id="sim:model_id=seen")
    await left.http.delete(f"/instance/{placed['instance_id']}")
    await add_card(left, "test/event")
    assert (await left.http.delete("/models/custom/test/event")).status_code == 200
    events = (await left.http.get("/events")).json()
    assert all(len(event) == 1 for event in events)
    tags = [next(iter(event)) for event in events]
    for tag in ("NodeJoined", "InstanceCreated", "InstanceDeleted", "CustomModelCardAdded", "CustomModelCardDeleted"):
        assert tag in tags
    created = [event["InstanceCreated"] for event in events if "InstanceCreated" in event][-1]
    assert created["instance"]["SimInstance"]["instance_id"] == placed["instance_id"]
    assert created["event_id"].endswith(f"-{created['index']}")
    since = (await left.http.get("/events", params={"since": created["index"], "limit": 1})).json()
    assert since[0]["InstanceCreated"] == created


@pytest.mark.parametrize(
    ("path", "headers"), [("/events?follow=true", {}), ("/events", {"accept": "text/event-stream"})]
)
async def test_following(left: Served, path: str, headers: dict[str, str]) -> None:
    async with asyncio.timeout(20), following(left.http, path, **headers) as events:
        await add_card(left, "test/followed")
        async for event in events:
            if "CustomModelCardAdded" in event["data"]:
                break
        added = json.loads(event["data"])["CustomModelCardAdded"]
        assert event["id"] == added["event_id"]
    await add_card(left, "test/missed")
    header = {"last-event-id": event["id"]}
    async with asyncio.timeout(20), following(left.http, "/events?follow=true", **header) as events:
        again = json.loads((await anext(events))["data"])
        assert next(iter(again.values()))["index"] == added["index"] + 1


async def test_a_gap_is_marked(left: Served) -> None:
    strange = {"last-event-id": "another-life-7"}
    async with asyncio.timeout(20), following(left.http, "/events?follow=true", **strange) as events:
        gap = await anext(events)
        assert gap["event"] == "gap"
        assert json.loads(gap["data"])["end"] == left.node.control.log.next_index
    async with asyncio.timeout(20), following(left.http, "/events?follow=true&since=999999") as events:
        assert (await anext(events))["event"] == "gap"


async def test_a_small_log_marks_what_it_dropped(left: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    small = EventLog(left.node.state, capacity=2)
    monkeypatch.setattr(left.node.control, "log", small)
    for number in range(5):
        await add_card(left, f"test/small-{number}")
    assert len((await left.http.get("/events")).json()) == 2
    async with asyncio.timeout(20), following(left.http, "/events?follow=true&since=0") as events:
        gap = await anext(events)
        assert json.loads(gap["data"]) == {"first": 0, "end": small.first_index}
        first = json.loads((await anext(events))["data"])
        assert next(iter(first.values()))["index"] == small.first_index


async def test_silence_is_filled(left: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "KEEP_ALIVE_SECONDS", 0.01)
    async with asyncio.timeout(20), left.http.stream("GET", "/events?follow=true") as response:
        lines = response.aiter_lines()
        seen = 0
        async for line in lines:
            seen += line == ": keep-alive"
            if seen == 3:
                break


async def test_followers_end_with_the_server(tmp_path: Path) -> None:
    """They have no end of their own, and would hold the server up."""
    async with (
        serving(settings_for(tmp_path / "alone", free_port("tcp"))) as alone,
        asyncio.timeout(20),
        alone.http.stream("GET", "/events?follow=true") as events,
        alone.http.stream("GET", "/instance/await?model_id=never&timeout_seconds=0") as waiting,
    ):
        first, second = events.aiter_lines(), waiting.aiter_lines()
        assert await anext(first) == await anext(second) == ": keep-alive"
        began = asyncio.get_running_loop().time()
        await alone.server.stop(deadline=60)
        async for _ in first:
            pass
        assert any("shutting down" in line for line in [line async for line in second])
        assert asyncio.get_running_loop().time() - began < 10
    assert alone.server.context.followers == set()


async def test_a_client_that_leaves_is_forgotten(left: Served) -> None:
    async with left.http.stream("GET", "/events?follow=true") as response:
        assert await anext(response.aiter_lines()) == ": keep-alive"
        assert len(left.server.context.followers) == 1
    async with asyncio.timeout(10):
        while left.server.context.followers:  # noqa: ASYNC110 (nothing tells when the server notices)
            await asyncio.sleep(0.01)


async def test_what_the_cluster_can_do(left: Served) -> None:
    assert (await left.http.get("/v1/feature-flags")).json() == {"disaggregation": True}
    found = (await left.http.get("/capabilities")).json()
    assert found["node_id"] == left.node.node_id
    assert found["features"]["disaggregation"] is True
    assert found["features"]["downloads"] is False, "this node is offline"
    assert set(found["backends"]) == set(left.node.state.nodes)
