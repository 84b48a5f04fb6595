"""Other people's clients against a simulated model: what they send is understood, what they read is what was said."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tandem.config import Settings

from .served import served

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or litellm fetches a price list when it is imported

pytestmark = pytest.mark.clients

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CALLS = 'Wait. <tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
CALLS += '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "clock")
]
EXPECTED = [("weather", {"city": "Ulm"}), ("clock", {})]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0)
    with served(settings, "sim:answer_tokens=12") as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model that always calls both tools."""
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0)
    with served(settings, f"sim:script={CALLS.replace(',', '%2C')}") as server:
        yield f"{server.url}/v1"


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_sdk_whole_and_streamed(url: str) -> None:
    client = sdk(url)
    whole = client.chat.completions.create(model="sim", messages=MESSAGES, seed=1)
    chunks = list(
        client.chat.completions.create(
            model="sim", messages=MESSAGES, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


@pytest.mark.anyio
async def test_sdk_async(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="sim", messages=MESSAGES, seed=2, n=2)
        stream = await client.chat.completions.create(model="sim", messages=MESSAGES, seed=2, n=2, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_sdk_stream_helper(url: str) -> None:
    with sdk(url).chat.completions.stream(model="sim", messages=MESSAGES, logprobs=True, top_logprobs=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].logprobs is not None
    tokens = final.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens) == final.choices[0].message.content


def test_sdk_tools(calling: str) -> None:
    whole = sdk(calling).chat.completions.create(model="sim", messages=MESSAGES, tools=TOOLS)
    assert whole.choices[0].finish_reason == "tool_calls"
    calls = whole.choices[0].message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == EXPECTED
    with sdk(calling).chat.completions.stream(model="sim", messages=MESSAGES, tools=TOOLS) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed] == EXPECTED
    assert len({call.id for call in streamed}) == 2


def test_sdk_completions(url: str) -> None:
    answer = sdk(url).completions.create(model="sim", prompt=["a", "b"], max_tokens=3, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text


def test_sdk_models(url: str) -> None:
    client = sdk(url)
    assert client.models.list().data[0].id == "sim"
    assert client.models.retrieve("sim").id == "sim"


def test_sdk_errors(url: str) -> None:
    client = sdk(url)
    with pytest.raises(openai.NotFoundError, match="nobody/knows") as missing:
        client.chat.completions.create(model="nobody/knows", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="context") as long:
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x" * 40_000}], stream=True)
    assert long.value.code == "context_length_exceeded"


def test_langchain(url: str, calling: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="sim", base_url=url, api_key="none", seed=3, stream_usage=True)  # type: ignore[arg-type]
    whole = chat.invoke("hi")
    chunks = list(chat.stream("hi"))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 13
    caller = ChatOpenAI(model="sim", base_url=calling, api_key="none").bind_tools(TOOLS)  # type: ignore[arg-type]
    assert [(call["name"], call["args"]) for call in caller.invoke("hi").tool_calls] == EXPECTED  # type: ignore[attr-defined]


def test_litellm(url: str, calling: str) -> None:
    import litellm

    arguments: dict[str, Any] = {"model": "openai/sim", "messages": MESSAGES, "api_key": "none"}
    whole = litellm.completion(**arguments, api_base=url, seed=4)
    chunks = list(litellm.completion(**arguments, api_base=url, seed=4, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    called = litellm.completion(**arguments, api_base=calling, tools=TOOLS).choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in called] == EXPECTED
