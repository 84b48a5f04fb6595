"""`litellm`, unmodified: `openai/` and `text-completion-openai/` models at our address."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from .server import Server
from .test_openai_chat import ANSWER, CAPITAL
from .test_openai_tools import CLOCK, NAMED, QUESTION, WEATHER, check_call

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
"""What these packages warn of lies within them."""
real = pytest.mark.real_model

CHAT: dict[str, Any] = {"messages": CAPITAL["messages"], "max_tokens": 16, "temperature": 0}


def at(server: Server, model: str = "openai/demo") -> dict[str, Any]:
    return {"model": model, "api_base": server.v1, "api_key": "unused", "timeout": 240, "num_retries": 0}


@real
def test_completion(real_server: Server) -> None:
    response = litellm.completion(**at(real_server), **CHAT)
    assert response.choices[0].message.content == ANSWER
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens == 8


@real
def test_streaming(real_server: Server) -> None:
    chunks = list(litellm.completion(**at(real_server), **CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    rebuilt = litellm.stream_chunk_builder(chunks, messages=CHAT["messages"])
    assert rebuilt is not None
    assert rebuilt.choices[0].message.content == ANSWER
    assert rebuilt.choices[0].finish_reason == "stop"
    assert rebuilt.usage.completion_tokens == 8


@real
@pytest.mark.anyio
async def test_acompletion(real_server: Server) -> None:
    response = await litellm.acompletion(**at(real_server), **CHAT)
    assert response.choices[0].message.content == ANSWER
    stream = await litellm.acompletion(**at(real_server), **CHAT, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


@real
@pytest.mark.parametrize("stream", [False, True])
def test_tools(real_server: Server, stream: bool) -> None:
    body: dict[str, Any] = {
        "messages": QUESTION,
        "tools": [WEATHER, CLOCK],
        "tool_choice": NAMED,
        "temperature": 0,
        "max_tokens": 64,
    }
    response = litellm.completion(**at(real_server), **body, stream=stream)
    if stream:
        response = litellm.stream_chunk_builder(list(response))
    [choice] = response.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    check_call(call.function.name, call.function.arguments)


def test_a_tool_that_the_model_chose(sim_server: Server) -> None:
    response = litellm.completion(**at(sim_server, "openai/caller"), messages=QUESTION, tools=[WEATHER], max_tokens=200)
    [call] = response.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_text_completion(sim_server: Server) -> None:
    where = at(sim_server, "text-completion-openai/fast")
    response = litellm.text_completion(**where, prompt="hello", max_tokens=5)
    assert len(response.choices[0].text.split()) == 5
    pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**where, prompt="hello", stream=True)]
    assert "".join(pieces).startswith(response.choices[0].text)


def test_errors(sim_server: Server) -> None:
    with pytest.raises(litellm.NotFoundError, match="gpt-9"):
        litellm.completion(**at(sim_server, "openai/gpt-9"), **CHAT)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**at(sim_server, "openai/fast"), **{**CHAT, "temperature": -1})
    # litellm's fallbacks to models with more room hang on this class.
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**at(sim_server, "openai/small"), messages=[{"role": "user", "content": "x" * 100}])
