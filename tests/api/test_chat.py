"""Chat completions as clients read them, in one piece and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion as SdkCompletion
from openai.types.chat import ChatCompletionChunk as SdkChunk

from tandem.api.openai.schema_responses import BenchChatCompletion, ChatCompletion
from tandem.types import (
    Accepted,
    GenerationRequest,
    PrefillProgress,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)

from .double import MODEL, DoubleNode, Step, finished
from .helpers import stream

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def thinking(request: GenerationRequest) -> list[Step]:
    return [
        Accepted(10, 4),
        TextDelta("Let me ", reasoning=True),
        TextDelta("think.", reasoning=True),
        TextDelta("42"),
        finished(prompt=10, completion=7, cached=4, reasoning=5),
    ]


def calling(request: GenerationRequest) -> list[Step]:
    return [
        Accepted(5, 0),
        TextDelta("I look. "),
        [ToolCallDelta(0, "call_1", "weather", ""), ToolCallDelta(0, None, None, '{"city":')],
        ToolCallDelta(0, None, None, '"Ulm"}'),
        ToolCallDelta(1, "call_2", "time", "{}"),
        finished("tool_calls"),
    ]


def logprobs(request: GenerationRequest) -> list[Step]:
    top = [TopLogprob("Hé", 7, -0.1, [72, 195, 169]), TopLogprob("x", 8, float("-inf"), [120])]
    return [
        Accepted(5, 0),
        TextDelta("", logprobs=[TokenLogprob("Hé", 7, -0.1, [72, 195, 169], top)]),
        TextDelta("Hé\n", logprobs=[TokenLogprob("\n", 9, -0.5, [10], [])]),
        finished(),
    ]


async def whole(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    ChatCompletion.model_validate_json(response.text)
    SdkCompletion.model_validate_json(response.text)
    body: dict[str, Any] = response.json()
    assert response.headers["x-request-id"] == body["id"]
    return body


async def test_whole_answer(client: httpx.AsyncClient) -> None:
    body = await whole(client)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (
        5,
        2,
        7,
    )


async def test_whole_answer_with_reasoning(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = thinking
    body = await whole(client)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me think.", "42")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


async def test_whole_answer_with_tool_calls(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = calling
    [choice] = (await whole(client))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look. "
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]


async def test_content_is_null_when_there_are_only_tool_calls(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [ToolCallDelta(0, "c", "f", "{}"), finished("tool_calls")]
    [choice] = (await whole(client))["choices"]
    assert choice["message"]["content"] is None


EXPECTED_LOGPROBS = [
    {
        "token": "Hé",
        "logprob": -0.1,
        "bytes": [72, 195, 169],
        "top_logprobs": [
            {"token": "Hé", "logprob": -0.1, "bytes": [72, 195, 169]},
            {"token": "x", "logprob": -9999.0, "bytes": [120]},
        ],
    },
    {"token": "\n", "logprob": -0.5, "bytes": [10], "top_logprobs": []},
]


async def test_whole_logprobs(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = logprobs
    [choice] = (await whole(client, logprobs=True, top_logprobs=2))["choices"]
    assert choice["logprobs"] == {"content": EXPECTED_LOGPROBS, "refusal": None}


async def test_several_answers(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [TextDelta(f"seed {request.sampling.seed}"), finished(prompt=5, completion=2)]
    body = await whole(client, n=9, seed=100)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [f"seed {seed}" for seed in range(100, 109)]
    assert [choice["index"] for choice in body["choices"]] == list(range(9))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 18)


async def test_one_batch_of_answers_runs_at_a_time(client: httpx.AsyncClient, node: DoubleNode) -> None:
    gate = asyncio.Event()
    node.play = lambda request: [gate, TextDelta("x"), finished()]
    task = asyncio.create_task(whole(client, n=9))
    await node.was_started.wait()
    assert node.open == node.settings.max_batch == 4
    gate.set()
    assert len((await task)["choices"]) == 9


async def test_answers_wait_for_room_when_the_queue_is_full(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.full_after = 2
    assert len((await whole(client, n=7))["choices"]) == 7


async def test_streamed_answer(client: httpx.AsyncClient) -> None:
    sse = await stream(client, PATH, BODY)
    assert sse.done
    assert sse.comments[0] == "keep-alive"
    assert sse.comments[-1].startswith("generation_stats ")
    for event in sse.events:
        SdkChunk.model_validate(event, strict=True)
        assert event["object"] == "chat.completion.chunk"
        assert event["model"] == MODEL
        assert event["id"] == sse.events[0]["id"]
        assert "usage" not in event
    assert sse.deltas() == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in sse.events]
    assert reasons == [None, None, None, "stop"]


async def test_statistics_comment(client: httpx.AsyncClient) -> None:
    sse = await stream(client, PATH, BODY)
    name, _, value = sse.comments[-1].partition(" ")
    stats = json.loads(value)
    assert name == "generation_stats"
    assert stats["peak_memory_usage"] == {"in_bytes": 123}
    assert stats["generation_tps"] == 50.0
    assert {"prompt_tps", "prompt_tokens", "generation_tokens", "prefix_cache_hit"} <= set(stats)


async def test_usage_chunk(client: httpx.AsyncClient) -> None:
    sse = await stream(client, PATH, {**BODY, "stream_options": {"include_usage": True}})
    *chunks, last = sse.events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    SdkChunk.model_validate(last, strict=True)


async def test_streamed_reasoning(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = thinking
    sse = await stream(client, PATH, BODY)
    assert sse.deltas()[1:-1] == [
        {"reasoning_content": "Let me "},
        {"reasoning_content": "think."},
        {"content": "42"},
    ]


async def test_streamed_tool_calls(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = calling
    sse = await stream(client, PATH, BODY)
    for event in sse.events:
        SdkChunk.model_validate(event, strict=True)
    calls = [call for delta in sse.deltas() for call in delta.get("tool_calls", ())]
    assert calls == [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Ulm"}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert sse.events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_streamed_logprobs(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = logprobs
    sse = await stream(client, PATH, {**BODY, "logprobs": True, "top_logprobs": 2})
    found = [token for event in sse.events for token in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert found == EXPECTED_LOGPROBS
    assert sse.text() == "Hé\n"


async def test_streamed_progress(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [Accepted(9000, 0), PrefillProgress(4096, 9000), TextDelta("x"), finished()]
    sse = await stream(client, PATH, BODY)
    [progress] = [comment for comment in sse.comments if comment.startswith("prefill_progress ")]
    assert json.loads(progress.partition(" ")[2]) == {
        "PrefillProgressChunk": {"model": MODEL, "processed_tokens": 4096, "total_tokens": 9000}
    }


async def test_several_streamed_answers(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [TextDelta("seed "), TextDelta(str(request.sampling.seed)), finished()]
    sse = await stream(client, PATH, {**BODY, "n": 6, "seed": 1, "stream_options": {"include_usage": True}})
    assert [sse.text(index) for index in range(6)] == [f"seed {seed}" for seed in range(1, 7)]
    for index in range(6):
        assert [delta["role"] for delta in sse.deltas(index) if "role" in delta] == ["assistant"]
    assert sse.events[-1]["usage"]["completion_tokens"] == 12
    assert sum(comment.startswith("generation_stats") for comment in sse.comments) == 6
    order = [event["choices"][0]["index"] for event in sse.events[:-1]]
    assert order != sorted(order), "the answers should be interleaved"


async def test_odd_text_survives(client: httpx.AsyncClient, node: DoubleNode) -> None:
    odd = 'quote " backslash \\ newline \n return \r tab \t nul \x00 separator \u2028 emoji 🦩 data: [DONE]\n\n'
    node.play = lambda request: [TextDelta(odd), finished()]
    assert (await stream(client, PATH, BODY)).text() == odd
    assert (await whole(client))["choices"][0]["message"]["content"] == odd


async def test_bench_adds_statistics(client: httpx.AsyncClient) -> None:
    response = await client.post("/bench/chat/completions", json=BODY)
    BenchChatCompletion.model_validate_json(response.text)
    assert response.json()["generation_stats"]["peak_memory_usage"] == {"inBytes": 123}
    sse = await stream(client, "/bench/chat/completions", BODY)
    assert sse.done


async def test_ollama_alias(client: httpx.AsyncClient) -> None:
    response = await client.post("/ollama/v1/chat/completions", json=BODY)
    assert response.json()["choices"][0]["message"]["content"] == "Hello"


async def test_default_model(client: httpx.AsyncClient) -> None:
    assert (await whole(client, model="default"))["model"] == MODEL
