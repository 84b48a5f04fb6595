"""The official `openai` package: chats with the real model."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob

from .server import Server

pytestmark = [pytest.mark.clients, pytest.mark.real_model, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
CAPITAL: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_completion_tokens": 16,
    "temperature": 0,
}
ANSWER = "The capital of France is Paris."


def test_an_answer(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**CAPITAL)
    [choice] = completion.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 8
    assert completion._request_id == completion.id, "the SDK shows X-Request-Id to its users"


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**CAPITAL, stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert choices[-1].finish_reason == "stop"
    assert {(chunk.id, chunk.object, chunk.model, chunk.created) for chunk in chunks} == {
        (chunks[0].id, "chat.completion.chunk", MODEL, chunks[0].created)
    }
    assert all(chunk.usage is None for chunk in chunks), "nobody asked for it"
    assert len(chunks) == len(choices)


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(**CAPITAL, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert last.usage.prompt_tokens_details is not None


@pytest.mark.anyio
async def test_async_both_ways_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def streamed() -> str:
        stream = await async_client.chat.completions.create(**CAPITAL, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def whole() -> str | None:
        return (await async_client.chat.completions.create(**CAPITAL)).choices[0].message.content

    assert await asyncio.gather(streamed(), whole()) == [ANSWER, ANSWER]


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CAPITAL, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == ANSWER
    assert [event.content for event in events if event.type == "content.done"] == [ANSWER]
    assert final.choices[0].message.content == ANSWER
    assert final.usage is not None
    assert final.usage.completion_tokens == 8


def test_stop_strings(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**CAPITAL, stop=[" Par", "unseen"])
    assert completion.choices[0].message.content == ANSWER[: ANSWER.index(" Par")]
    assert completion.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**CAPITAL, stop="is Paris.", stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == ANSWER[: ANSWER.index("is Paris.")]


def test_a_limit(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**{**CAPITAL, "max_completion_tokens": 3})
    assert completion.choices[0].message.content == "The capital of"
    assert completion.choices[0].finish_reason == "length"


def texts(completion: ChatCompletion) -> list[str | None]:
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.message.content for choice in completion.choices]


def test_several_answers_with_a_seed(client: openai.OpenAI) -> None:
    body = {**CAPITAL, "messages": [{"role": "user", "content": "Tell me a story."}], "max_completion_tokens": 8}
    body |= {"temperature": 1.2, "seed": 42}
    first = client.chat.completions.create(**body, n=2)
    assert len(set(texts(first))) == 2
    assert first.usage is not None
    assert first.usage.completion_tokens == 16
    assert texts(client.chat.completions.create(**body, n=2)) == texts(first), "same seed, same text"
    gathered = ["", ""]
    for chunk in client.chat.completions.create(**body, n=2, stream=True):
        for choice in chunk.choices:
            gathered[choice.index] += choice.delta.content or ""
    assert gathered == texts(first)
    assert texts(client.chat.completions.create(**{**body, "seed": 43})) != texts(first)[:1]


def check_logprobs(tokens: list[ChatCompletionTokenLogprob] | None, text: str | None, alternatives: int) -> None:
    assert tokens
    assert text is not None
    joined = b""
    for token in tokens:
        assert token.bytes is not None
        joined += bytes(token.bytes)
        assert token.logprob <= 0
        assert len(token.top_logprobs) == alternatives
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        named = [top.bytes for top in token.top_logprobs]
        assert len({bytes(one or ()) for one in named}) == alternatives, "every alternative is another text"
    assert joined.decode() == text


def test_logprobs(client: openai.OpenAI) -> None:
    body = {**CAPITAL, "logprobs": True, "top_logprobs": 3}
    [choice] = client.chat.completions.create(**body).choices
    assert choice.message.content == ANSWER
    assert choice.logprobs is not None
    check_logprobs(choice.logprobs.content, ANSWER, 3)
    for token in choice.logprobs.content or ():
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert token.top_logprobs[0].logprob == token.logprob
    chunks = client.chat.completions.create(**body, stream=True)
    streamed = [chunk.choices[0].logprobs.content or [] for chunk in chunks if chunk.choices[0].logprobs]
    tokens = list(itertools.chain.from_iterable(streamed))
    check_logprobs(tokens, ANSWER, 3)
    assert [token.token for token in tokens] == [token.token for token in choice.logprobs.content or ()]
    assert [token.logprob for token in tokens] == pytest.approx(
        [token.logprob for token in choice.logprobs.content or ()], abs=1e-3
    )


def test_logprobs_of_characters_that_span_tokens(client: openai.OpenAI) -> None:
    text = "\N{PARTY POPPER}\u6f22\u00e9"
    schema = {"type": "string", "enum": [text]}
    [choice] = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Party!"}],
        response_format={"type": "json_schema", "json_schema": {"name": "party", "schema": schema}},
        logprobs=True,
        max_completion_tokens=16,
    ).choices
    assert choice.message.content == f'"{text}"'
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    check_logprobs(tokens, choice.message.content, 0)
    parts = [bytes(token.bytes or ()) for token in tokens]
    assert any(not is_utf8(part) for part in parts), f"the model has these as single tokens: {parts}"


def is_utf8(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**CAPITAL)
    turns = [*CAPITAL["messages"], first.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(**{**CAPITAL, "messages": turns})
    assert second.usage is not None
    assert first.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    # The answer itself was never read as a prompt: what follows it shows that it was kept.
    assert first.usage.prompt_tokens < details.cached_tokens < second.usage.prompt_tokens


def test_content_parts_and_a_developer_message(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "developer", "content": "You answer with one word."},
            {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
        ],
        max_completion_tokens=4,
        temperature=0,
    )
    assert completion.choices[0].message.content


def test_leaving_a_stream_frees_the_engine(client: openai.OpenAI, real_server: Server) -> None:
    body = {**CAPITAL, "max_completion_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**body, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    real_server.wait_busy(MODEL)
    stream.close()
    real_server.wait_idle(MODEL)
    test_an_answer(client)


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert listed[0].id == MODEL
    for name in (MODEL, "demo"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "tandem")
