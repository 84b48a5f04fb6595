"""Text completions as clients read them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import Completion as SdkCompletion

from tandem.api.openai.schema_responses import Completion
from tandem.types import (
    Accepted,
    GenerationRequest,
    PromptScored,
    TextDelta,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    TopLogprob,
)

from .double import DoubleNode, Step, finished
from .helpers import stream

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Say hé"}


def token(text: str, logprob: float | None, *top: tuple[str, float]) -> TokenLogprob:
    alternatives = [TopLogprob(other, 1, value, list(other.encode())) for other, value in top]
    return TokenLogprob(text, 0, logprob, list(text.encode()), alternatives)


def scoring(request: GenerationRequest) -> list[Step]:
    prompt = [token("Say", None), token(" hé", -2.0, (" it", -0.5)), token("!", -0.25, ("!", -0.25))]
    answer = [token(" ok", -1.0, (" ok", -1.0))]
    return [
        Accepted(3, 0),
        PromptScored("Say hé!", prompt if request.prompt_logprobs is not None else []),
        *([TextDelta(" ok", logprobs=answer)] if request.max_tokens else []),
        finished("length", prompt=3, completion=1 if request.max_tokens else 0),
    ]


async def whole(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    Completion.model_validate_json(response.text)
    if not fields.get("echo"):
        # The SDK's types know nothing of the null that OpenAI documents for a prompt's first token.
        SdkCompletion.model_validate_json(response.text)
    body: dict[str, Any] = response.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    return body


async def test_whole(client: httpx.AsyncClient) -> None:
    body = await whole(client)
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 7


async def test_what_lm_eval_asks_for(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = scoring
    body = await whole(
        client, prompt=[[1, 2, 3], [4, 5, 6]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Say", " hé", "!", " ok"],
        "token_logprobs": [None, -2.0, -0.25, -1.0],
        "top_logprobs": [None, {" it": -0.5, " hé": -2.0}, {"!": -0.25}, {" ok": -1.0}],
        "text_offset": [0, 3, 6, 7],
    }
    assert body["choices"][0]["text"] == "Say hé! ok"
    assert [request.prompt for request in node.requests] == [TokenPrompt((1, 2, 3)), TokenPrompt((4, 5, 6))]
    assert body["usage"]["prompt_tokens"] == 6


async def test_scoring_without_generating(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = scoring
    [choice] = (await whole(client, echo=True, max_tokens=0, logprobs=1))["choices"]
    assert choice["text"] == "Say hé!"
    assert len(choice["logprobs"]["tokens"]) == 3
    [choice] = (await whole(client, echo=True, max_tokens=0))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Say hé!", None)


async def test_logprobs_of_the_answer_alone(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = lambda request: [
        TextDelta("a", logprobs=[token("a", -1.0)]),
        TextDelta("bc", logprobs=[token("b", -1.0), token("c", float("-inf"))]),
        finished(),
    ]
    [choice] = (await whole(client, logprobs=0))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-1.0, -1.0, -9999.0],
        "top_logprobs": [{"a": -1.0}, {"b": -1.0}, {"c": -9999.0}],
        "text_offset": [0, 1, 2],
    }


async def test_tokens_that_are_no_characters_keep_apart(client: httpx.AsyncClient, node: DoubleNode) -> None:
    # é as two byte tokens; an engine shows each half as U+FFFD.
    halves = [
        TokenLogprob("\ufffd", 1, -1.0, [0xC3], [TopLogprob("\ufffd", 2, -0.5, [0xC4])]),
        TokenLogprob("\ufffd", 3, -1.5, [0xA9], []),
        TokenLogprob("x", 4, -0.5, [120], []),
    ]
    node.play = lambda request: [TextDelta("éx", logprobs=halves), finished()]
    logprobs = (await whole(client, logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xc4": -0.5, "bytes:\\xc3": -1.0}
    assert logprobs["text_offset"] == [0, 0, 1]


async def test_two_tokens_of_one_text_keep_the_likelier(client: httpx.AsyncClient, node: DoubleNode) -> None:
    twins = TokenLogprob("a", 1, -3.0, [97], [TopLogprob("a", 2, -0.1, [97])])
    node.play = lambda request: [TextDelta("a", logprobs=[twins]), finished()]
    logprobs = (await whole(client, logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-3.0]
    assert logprobs["top_logprobs"] == [{"a": -0.1}]


async def test_the_token_that_ends_the_answer_counts(client: httpx.AsyncClient, node: DoubleNode) -> None:
    """lm-eval takes all scores but the last for the text's: with one missing, it would lose one of the text's."""
    prompt = [token("Say", None), token(" hé", -2.0), token("!", -0.25)]
    node.play = lambda request: [Accepted(3, 0), PromptScored("Say hé!", prompt), finished("stop", 3, 1)]
    [choice] = (await whole(client, echo=True, logprobs=1, max_tokens=1))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.25, None]
    assert choice["logprobs"]["text_offset"] == [0, 3, 6, 7]
    sse = await stream(client, PATH, {**BODY, "echo": True, "logprobs": 1, "max_tokens": 1})
    assert sse.events[-1]["choices"][0]["logprobs"]["tokens"] == [""]


async def test_prompts_times_answers(client: httpx.AsyncClient, node: DoubleNode) -> None:
    def play(request: GenerationRequest) -> list[Step]:
        assert isinstance(request.prompt, TextPrompt)
        return [TextDelta(f"{request.prompt.text}{request.sampling.seed}"), finished()]

    node.play = play
    body = await whole(client, prompt=["a", "b", "c"], n=2, seed=0)
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (15, 12)


async def test_streamed(client: httpx.AsyncClient) -> None:
    sse = await stream(client, PATH, {**BODY, "stream_options": {"include_usage": True}})
    assert sse.done
    for event in sse.events:
        assert event["object"] == "text_completion"
    assert [event["choices"][0]["text"] for event in sse.events[:-1]] == ["Hel", "lo", ""]
    assert [event["choices"][0]["finish_reason"] for event in sse.events[:-1]] == [None, None, "stop"]
    assert sse.events[-1]["choices"] == []
    assert sse.events[-1]["usage"]["total_tokens"] == 7


async def test_streamed_echo_and_logprobs(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = scoring
    sse = await stream(client, PATH, {**BODY, "echo": True, "logprobs": 1})
    texts = [event["choices"][0]["text"] for event in sse.events]
    offsets = [
        offset
        for event in sse.events
        for offset in (event["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert texts == ["Say hé!", " ok", ""]
    assert offsets == [0, 3, 6, 7]


async def test_streamed_echo_alone_has_no_logprobs(client: httpx.AsyncClient, node: DoubleNode) -> None:
    node.play = scoring
    sse = await stream(client, PATH, {**BODY, "echo": True, "max_tokens": 0})
    assert [event["choices"][0]["logprobs"] for event in sse.events] == [None, None]
