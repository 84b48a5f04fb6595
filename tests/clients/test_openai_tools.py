"""The official `openai` package: tool calls, forced ones with the real model, chosen ones with a simulated one."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageToolCall
from pydantic import BaseModel, ConfigDict

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
real = pytest.mark.real_model

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": QUESTION,
    "tools": [WEATHER, CLOCK],
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_completion_tokens": 64,
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


def check_call(name: str, arguments: str) -> None:
    """The call is one that the schemas of `BODY` allow."""
    parsed = json.loads(arguments)
    if name == "get_weather":
        assert list(parsed) == ["city"]
        assert parsed["city"] in ("Paris", "Rome")
    else:
        assert name == "get_time"
        assert parsed == {}


@real
def test_a_required_call(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(**BODY, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageToolCall)
    assert call.id
    check_call(call.function.name, call.function.arguments)


@real
def test_a_named_call_and_what_its_result_leads_to(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**BODY, tool_choice=NAMED).choices[0].message
    assert first.tool_calls is not None
    [call] = first.tool_calls
    assert isinstance(call, ChatCompletionMessageToolCall)
    assert call.function.name == "get_weather"
    check_call(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    body = {**BODY, "messages": [*QUESTION, first, result], "max_completion_tokens": 12}
    second = client.chat.completions.create(**body, tool_choice="none").choices[0]
    assert second.message.content
    assert second.message.tool_calls is None


@real
def test_a_streamed_call(client: openai.OpenAI) -> None:
    arguments = ""
    with client.chat.completions.stream(**BODY, tool_choice=NAMED) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
                assert event.arguments == arguments
        final = stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.arguments == arguments
    assert call.function.name == "get_weather"
    check_call(call.function.name, arguments)
    whole = client.chat.completions.create(**BODY, tool_choice=NAMED).choices[0].message
    assert whole.tool_calls is not None
    assert isinstance(whole.tool_calls[0], ChatCompletionMessageToolCall)
    assert whole.tool_calls[0].function.arguments == arguments


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@real
def test_a_pydantic_tool(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.parse(
        model="demo",
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=64,
    ).choices
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_call_that_the_model_chose(sim_client: openai.OpenAI) -> None:
    body = {**BODY, "model": "caller", "max_completion_tokens": 200}
    [choice] = sim_client.chat.completions.create(**body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageToolCall)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    with sim_client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls is not None
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    assert not streamed.content


def test_a_call_that_was_forbidden(sim_client: openai.OpenAI) -> None:
    body = {**BODY, "model": "caller", "max_completion_tokens": 200}
    [choice] = sim_client.chat.completions.create(**body, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")


def test_a_choice_that_is_no_tool(sim_client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_lost"}}
    with pytest.raises(openai.BadRequestError, match="get_lost") as caught:
        sim_client.chat.completions.create(**BODY, tool_choice=choice)
    assert caught.value.param == "tool_choice"
