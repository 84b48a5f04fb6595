"""The whole way: a real node, a runner in a real subprocess, a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tandem.api.openai.schema_responses import BenchChatCompletion, ChatCompletion, Completion, ModelList
from tandem.api.server import HttpServer, serve
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.errors import NotFoundError
from tandem.types import ChatPrompt, Finished, GenerationRequest, Message

from .double import DoubleNode
from .helpers import error_of, parse_sse, stream

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@contextlib.asynccontextmanager
async def running(settings: Settings, *references: str) -> AsyncIterator[tuple[Node, HttpServer, httpx.AsyncClient]]:
    node = Node(settings)
    await node.start()
    for instance in await node.run_here(references):
        await node.wait_ready(instance, 30)
    server = await serve(node, settings)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        yield node, server, client
    await server.stop(deadline=0.1)
    await node.stop()


@pytest.fixture(scope="module")
async def real(settings: Settings) -> AsyncIterator[tuple[Node, HttpServer, httpx.AsyncClient]]:
    async with running(settings, "sim:decode_tps=2000") as parts:
        yield parts


@pytest.fixture
def http(real: tuple[Node, HttpServer, httpx.AsyncClient]) -> httpx.AsyncClient:
    return real[2]


async def requests_in(node: Node, expected: int) -> None:
    """Until so many requests are in the node."""
    changed = asyncio.Event()
    forget = node.local.on_change(changed.set)
    async with asyncio.timeout(5):
        while sum(instance.running for instance in node.instances()) != expected:
            changed.clear()
            await changed.wait()
    forget()


async def test_chat(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=BODY)
    answer = ChatCompletion.model_validate_json(response.text)
    assert answer.model == "sim"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert len((answer.choices[0].message.content or "").split()) == 8


async def test_stream_equals_whole(http: httpx.AsyncClient) -> None:
    for fields in ({}, {"seed": 5, "temperature": 1}, {"n": 3, "seed": 7}):
        whole = (await http.post(CHAT, json={**BODY, **fields})).json()
        sse = await stream(http, CHAT, {**BODY, **fields})
        assert sse.done
        for choice in whole["choices"]:
            assert sse.text(choice["index"]) == choice["message"]["content"]


async def test_logprobs(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={**BODY, "logprobs": True, "top_logprobs": 3})
    content = ChatCompletion.model_validate_json(response.text).choices[0].logprobs
    assert content is not None
    assert len(content.content) == 8
    assert all(len(token.top_logprobs) == 3 for token in content.content)
    text = b"".join(bytes(token.bytes) for token in content.content).decode()
    assert text == response.json()["choices"][0]["message"]["content"]


async def test_stop_string(http: httpx.AsyncClient) -> None:
    text = (await http.post(CHAT, json=BODY)).json()["choices"][0]["message"]["content"]
    stop = text.split()[3]
    [choice] = (await http.post(CHAT, json={**BODY, "stop": stop})).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text[: text.index(stop)]


async def test_lm_eval_scoring(http: httpx.AsyncClient) -> None:
    body = {
        "model": "sim",
        "prompt": [[104, 105, 33], [111, 107]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    response = await http.post("/v1/completions", json=body)
    answer = Completion.model_validate_json(response.text)
    for choice, prompt in zip(answer.choices, ("hi!", "ok"), strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        assert choice.logprobs.tokens[: len(prompt)] == list(prompt)
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 1
        assert all(isinstance(value, float) for value in choice.logprobs.token_logprobs[1:])


async def test_scoring_alone(http: httpx.AsyncClient) -> None:
    body = {"model": "sim", "prompt": "hello", "max_tokens": 0, "logprobs": 2, "echo": True}
    answer = Completion.model_validate_json((await http.post("/v1/completions", json=body)).text)
    assert answer.choices[0].text == "hello"
    assert answer.usage.completion_tokens == 0


async def test_a_long_list_of_prompts(http: httpx.AsyncClient) -> None:
    prompts = [[number % 128 + 1, 65, 66] for number in range(200)]
    body = {"model": "sim", "prompt": prompts, "max_tokens": 2}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 200


async def test_bench(http: httpx.AsyncClient) -> None:
    response = await http.post("/bench/chat/completions", json={**BODY, "max_tokens": 100})
    answer = BenchChatCompletion.model_validate_json(response.text)
    assert answer.usage.completion_tokens == 100, "longer than the model's own answers"
    assert answer.generation_stats.generation_tokens == 100
    assert answer.generation_stats.generation_tps > 0


async def test_too_long_a_prompt(http: httpx.AsyncClient) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 40_000}]}
    for streaming in (False, True):
        response = await http.post(CHAT, json={**body, "stream": streaming})
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"


async def test_what_this_engine_cannot_do(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={**BODY, "response_format": {"type": "json_object"}})
    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported"


async def test_progress_of_a_long_prompt(http: httpx.AsyncClient) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 2000}]}
    sse = await stream(http, CHAT, body)
    progress = [json.loads(text.partition(" ")[2]) for text in sse.comments if text.startswith("prefill_progress")]
    counts = [one["PrefillProgressChunk"]["processed_tokens"] for one in progress]
    assert len(counts) >= 4
    assert counts == sorted(counts)


async def test_models_and_health(http: httpx.AsyncClient) -> None:
    models = ModelList.model_validate_json((await http.get("/v1/models")).text).data
    assert (models[0].id, models[0].state) == ("sim", "ready")
    assert (await http.get("/health")).json()["status"] == "green"


async def test_leaving_cancels(real: tuple[Node, HttpServer, httpx.AsyncClient]) -> None:
    node, _, client = real
    body = {**BODY, "max_tokens": 30_000, "ignore_eos": True}
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        pieces = response.aiter_text()
        while "content" not in await anext(pieces):
            pass
        assert sum(instance.running for instance in node.instances()) == 1
    await requests_in(node, 0)
    assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_many_at_once(real: tuple[Node, HttpServer, httpx.AsyncClient]) -> None:
    node, _, client = real
    alone = [(await client.post(CHAT, json={**BODY, "seed": seed})).json() for seed in range(20)]
    together = await asyncio.gather(*(stream(client, CHAT, {**BODY, "seed": seed}) for seed in range(20)))
    assert [sse.text() for sse in together] == [one["choices"][0]["message"]["content"] for one in alone]
    await requests_in(node, 0)


async def test_a_full_queue(settings: Settings) -> None:
    small = settings.model_copy(update={"max_batch": 1, "max_queue": 1})
    async with running(small, "sim:decode_tps=10") as (node, _, client):
        body = {**BODY, "max_tokens": 1000, "ignore_eos": True}
        tasks = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(2)]
        await requests_in(node, 2)
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "queue_full"
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await requests_in(node, 0)


async def test_a_runner_that_dies_in_the_middle(settings: Settings) -> None:
    async with running(settings, "sim:decode_tps=500,die_at_token=5,die_status=0") as (node, _, client):
        sse = parse_sse((await client.post(CHAT, json={**BODY, "stream": True})).text)
        assert sse.done
        assert len(sse.text().split()) == 4
        assert sse.events[-1]["error"]["code"] == "runner_died"
        [instance] = node.instances()
        await node.wait_ready(instance.instance_id, 20)
        assert (await client.post(CHAT, json={**BODY, "max_tokens": 3})).status_code == 200
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert error_of(response)["code"] == "runner_died"


async def test_a_model_that_does_not_load(settings: Settings) -> None:
    node = Node(settings)
    await node.start()
    [instance] = await node.run_here(["sim:fail_at_load=1"])
    with contextlib.suppress(Exception):
        await node.wait_ready(instance, 20)
    server = await serve(node, settings)
    async with httpx.AsyncClient(base_url=server.url) as client:
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "red"
        assert "told to fail" in health.json()["error"]["message"]
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert "told to fail" in error_of(response)["message"]
    await server.stop(deadline=0.1)
    await node.stop()


@pytest.mark.parametrize("kind", ["double", "real"])
async def test_both_nodes_keep_the_contract(
    kind: str, settings: Settings, real: tuple[Node, HttpServer, httpx.AsyncClient]
) -> None:
    node: Any = real[0] if kind == "real" else DoubleNode(settings)
    assert node.node_id
    [instance] = node.instances()
    assert instance.state == "ready"
    request = GenerationRequest(ChatPrompt((Message("user", "hi"),)), max_tokens=2)
    stream = node.generate("default", request)
    batches = [events async for events in stream]
    assert all(batches)
    assert isinstance(batches[-1][-1], Finished)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(NotFoundError, match=instance.model_id):
        node.generate("nobody", request)
    unread = node.generate(instance.model_id.upper(), request)
    await unread.aclose()
    assert all(model.model_id for model in await asyncio.to_thread(node.store.list))


async def test_prefill_peers(real: tuple[Node, HttpServer, httpx.AsyncClient]) -> None:
    node, _, client = real
    [instance] = node.instances()
    route = f"/instance/{instance.instance_id}/prefill_peers"
    assert (await client.get(route)).json() == {"prefill_peers": []}
    named = await client.put(route, json={"prefill_peers": [" 127.0.0.1:5000", "127.0.0.1:5000", "[::1]:5001"]})
    assert named.json() == {"prefill_peers": ["127.0.0.1:5000", "[::1]:5001"]}
    assert (await client.get(route)).json() == named.json()
    for wrong, words in (
        ({"prefill_peers": ["somewhere"]}, "host:port"),
        ({"prefill_peers": ["10.0.0.1:5000"]}, "cluster secret"),
        ({"prefill_peers": 3}, "prefill_peers"),
        ({"peers": []}, "peers"),
    ):
        response = await client.put(route, json=wrong)
        assert response.status_code == 400
        assert words in error_of(response)["message"]
    unknown = await client.get("/instance/nobody/prefill_peers")
    assert unknown.status_code == 404
    assert "GET /health" in error_of(unknown)["message"]
    assert (await client.put(route, json={"prefill_peers": []})).json() == {"prefill_peers": []}
    # The engine was told nothing that it minded.
    assert (await client.post(CHAT, json=BODY)).status_code == 200
