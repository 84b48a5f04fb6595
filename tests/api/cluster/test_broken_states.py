"""Every route is called in every state of disrepair, and answers in time with a status that it declares.

The routes come from the OpenAPI document: a new one is called without anybody thinking of it, or the test says that it
does not know how.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.bus.config import free_port

from .nodes import Killable, Served, killable, serving, settings_for

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CALL_SECONDS = 10.0
STATES = ("no instance", "instance loading", "runner dead", "node gone")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@dataclass
class Scene:
    """A node in some state.

    Attributes:
        model, instance_id, node_id: what is broken, or what is not there.
        instance: in exo's form, with an id of its own, for sending.
    """

    state: str
    served: Served
    model: str
    instance_id: str
    node_id: str
    instance: dict[str, Any]


ANSWERS = {"no instance": 404, "instance loading": 503, "runner dead": 503, "node gone": 503}
"""To whoever asks the broken model something."""


@pytest.fixture(scope="module", params=STATES)
async def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("broken")
    ports = [free_port("tcp"), free_port("tcp")]
    # A dead runner is given up at once: else it would be well again before anything is asked of it.
    stays = settings_for(folder / "stays", ports[0], ports[1], max_restarts=0, automatic_links=False)
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(stays))
        yield await set_the_scene(request.param, served, stack, folder / "goes", ports)


async def set_the_scene(
    state: str, served: Served, stack: contextlib.AsyncExitStack, folder: Path, ports: list[int]
) -> Scene:
    here = served.node.node_id
    previews = await served.http.get("/instance/previews", params={"model_id": "sim:model_id=other"})
    instance = previews.json()["previews"][0]["instance"]
    if state == "no instance":
        return Scene(state, served, "nobody", "nobody", here, instance)
    if state == "node gone":
        goes: Killable = await stack.enter_async_context(killable(folder, ports[1], ports[0]))
        await served.meets(goes.node_id)
        placed = await served.place(model_id="sim:model_id=broken", node_ids=[goes.node_id])
        await served.ready(placed["instance_id"])
        goes.kill()
        await served.until(lambda: goes.node_id not in served.node.state.nodes)
        return Scene(state, served, "broken", placed["instance_id"], goes.node_id, instance)
    slow = ",load_seconds=600" if state == "instance loading" else ""
    placed = await served.place(model_id=f"sim:model_id=broken{slow}")
    instance_id = placed["instance_id"]
    await served.until(lambda: instance_id in served.node.local)
    supervisor = served.node.local.get(instance_id).supervisor
    changed = asyncio.Event()
    served.node.local.on_change(changed.set)
    wanted = "loading"
    if state == "runner dead":
        await served.ready(instance_id)
        wanted = "failed"
        # The first life was ready, so that its death is forgiven; the next one dies before it is.
        await kill_until(supervisor, wanted, changed)
    async with asyncio.timeout(30):
        while supervisor.state != wanted:
            changed.clear()
            await changed.wait()
    return Scene(state, served, "broken", instance_id, here, instance)


async def kill_until(supervisor: Any, wanted: str, changed: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        while supervisor.state != wanted:
            if supervisor.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(supervisor.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), 0.05)
            changed.clear()


def arguments(scene: Scene) -> dict[str, str]:
    """Values of path and query parameters, by name."""
    return {
        "instance_id": scene.instance_id,
        "node_id": scene.node_id,
        "link_id": "some-link",
        "command_id": "chatcmpl-unknown",
        "model_id": scene.model,
        "path": f"instances/{scene.instance_id}",
        "query": "a",
        "timeout_seconds": "0.5",
    }


def bodies(scene: Scene) -> dict[str, Any]:
    """A body for every route that takes one."""
    link = {"prefill_instances": [scene.instance_id], "decode_instances": [scene.instance_id]}
    download = {"targetNodeId": scene.node_id, "modelId": scene.model}
    chat = {"model": scene.model, **CHAT}
    return {
        "POST /v1/chat/completions": chat,
        "POST /ollama/v1/chat/completions": chat,
        "POST /bench/chat/completions": chat,
        "POST /v1/completions": {"model": scene.model, "prompt": "hi", "max_tokens": 2},
        "POST /instance": {"instance": scene.instance},
        "POST /place_instance": {"model_id": scene.model, "node_ids": [scene.node_id]},
        "POST /v1/instance-links": link,
        "PUT /v1/instance-links/{link_id}": link,
        "POST /models/add": {"model_id": scene.model},
        "POST /download/start": download,
        "POST /download/cancel": download,
        "PUT /instance/{instance_id}/prefill_peers": {"prefill_peers": []},
    }


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Every route; those that take the instance away come last."""
    found = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return sorted(found, key=lambda one: (one[0] == "DELETE", one[0] != "GET", one[1]))


async def call(scene: Scene, method: str, path: str, operation: dict[str, Any], **more: Any) -> httpx.Response:
    values = arguments(scene)
    query = {}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", values[parameter["name"]])
        elif parameter["name"] in values:
            query[parameter["name"]] = values[parameter["name"]]
        else:
            assert not parameter.get("required"), f"{method} {path} needs {parameter['name']}: add it to `arguments`"
    return await scene.served.http.request(method, path, params=query, **more)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_question_is_refused(scene: Scene, streaming: bool) -> None:
    async with asyncio.timeout(CALL_SECONDS):
        body = {"model": scene.model, **CHAT, "stream": streaming}
        answer = await scene.served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == ANSWERS[scene.state], answer.text
    health = await scene.served.http.get("/health")
    assert health.status_code == 503


async def test_every_route_answers_in_time(scene: Scene) -> None:
    document = (await scene.served.http.get("/openapi.json")).json()
    called = 0
    for method, path, operation in operations(document):
        body = bodies(scene).get(f"{method} {path}")
        assert (body is not None) == ("requestBody" in operation), f"{method} {path}: add its body to `bodies`"
        variants: list[dict[str, Any]] = [{}] if body is None else [{"json": body}]
        if "/completions" in path:
            variants.append({"json": {**body, "stream": True}})
        for variant in variants:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await call(scene, method, path, operation, **variant)
            where = f"{method} {path}: {answer.status_code} {answer.text[:300]}"
            assert str(answer.status_code) in operation["responses"], where
            assert answer.status_code != 500, where
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"], where
            called += 1
    assert called > 35


async def test_a_removed_instance_leaves_nothing(scene: Scene) -> None:
    """After the walk above the instance is removed: nothing of it is left, whatever state it was in."""
    state = (await scene.served.http.get("/state")).json()
    assert scene.instance_id not in state["instances"]
    assert scene.instance_id not in state["instanceHealth"]
    assert not any(name.startswith(scene.instance_id) for name in state["runners"])
