"""`langchain-openai`, unmodified: its chat and completion models at our address."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from .server import Server
from .test_openai_chat import ANSWER

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
"""What these packages warn of lies within them."""
real = pytest.mark.real_model

QUESTION = "What is the capital of France?"


def chat(server: Server, model: str = "demo", **options: Any) -> ChatOpenAI:
    defaults = {"max_tokens": 16, "temperature": 0, "timeout": 240, "max_retries": 0}
    return ChatOpenAI(model=model, base_url=server.v1, api_key="unused", **defaults | options)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


class Town(BaseModel):
    """A town."""

    country: Literal["France", "Italy"] = Field(description="Where it is.")
    is_capital: bool


@real
def test_invoke(real_server: Server) -> None:
    message = chat(real_server).invoke(QUESTION)
    assert message.content == ANSWER
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 8
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["model_name"] == "SmolLM2-135M-Instruct"


@real
def test_stream(real_server: Server) -> None:
    chunks = list(chat(real_server, stream_usage=True).stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == ANSWER
    whole: Any = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 8


@real
@pytest.mark.anyio
async def test_async(real_server: Server) -> None:
    model = chat(real_server)
    assert (await model.ainvoke(QUESTION)).content == ANSWER
    assert "".join([str(chunk.content) async for chunk in model.astream(QUESTION)]) == ANSWER
    assert [message.content for message in await model.abatch([QUESTION, QUESTION])] == [ANSWER, ANSWER]


@real
def test_a_forced_tool_and_its_result(real_server: Server) -> None:
    model = chat(real_server, max_tokens=64).bind_tools([get_weather], tool_choice="get_weather")
    question = HumanMessage("What is the weather in Paris?")
    message = model.invoke([question])
    assert isinstance(message, AIMessage)
    [call] = message.tool_calls
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat(real_server, max_tokens=8).invoke([question, message, result]).content


def test_a_tool_that_the_model_chose(sim_server: Server) -> None:
    model = chat(sim_server, "caller", max_tokens=200).bind_tools([get_weather])
    message = model.invoke([SystemMessage("You call tools."), HumanMessage("The weather?")])
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("get_weather", {"city": "Paris"})]
    whole: Any = None
    for chunk in model.stream("The weather?"):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]


@real
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(real_server: Server, method: Literal["json_schema", "function_calling"]) -> None:
    structured = chat(real_server, max_tokens=96).with_structured_output(Town, method=method)
    assert isinstance(structured.invoke("Describe Paris."), Town)


@real
def test_streamed_structured_output(real_server: Server) -> None:
    structured = chat(real_server, max_tokens=96).with_structured_output(Town)
    assert isinstance(list(structured.stream("Describe Paris."))[-1], Town)


@real
def test_logprobs(real_server: Server) -> None:
    message = chat(real_server, max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = message.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == message.content


@real
def test_the_completion_model(real_server: Server) -> None:
    model = OpenAI(
        model="demo", base_url=real_server.v1, api_key="unused", max_tokens=4, temperature=0, timeout=240, max_retries=0
    )
    text = model.invoke("The capital of France is")
    assert text
    assert "".join(model.stream("The capital of France is")) == text
    assert model.batch(["The capital of France is"] * 2) == [text, text]


def test_errors(sim_server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        chat(sim_server, "gpt-9").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(sim_server, "small").invoke("x" * 100)
