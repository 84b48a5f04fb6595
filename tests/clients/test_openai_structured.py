"""The official `openai` package: answers that keep to a schema, however weak the model is."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytestmark = [pytest.mark.clients, pytest.mark.real_model, pytest.mark.timeout(900)]


class Town(BaseModel):
    """Everything in it is short, as the model would like to go on for ever."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=8)]
    country: Literal["France", "Italy"]
    is_capital: bool
    rivers: Annotated[list[Literal["Seine", "Tiber"]], Field(min_length=1, max_length=2)]
    mayor: None


BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
    "temperature": 0,
    "max_completion_tokens": 96,
}


def test_parse_with_a_pydantic_model(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.parse(**BODY, response_format=Town).choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Town)
    assert Town.model_validate_json(choice.message.content or "") == choice.message.parsed


def test_a_stream_with_a_pydantic_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**BODY, response_format=Town) as stream:
        deltas = [event for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.parsed, Town)
    assert len(deltas) > 5
    assert any(isinstance(event.parsed, dict) and "name" in event.parsed for event in deltas[:-1]), "usable early"


def test_any_json_object(client: openai.OpenAI) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": 'Answer {"ok": true}.'}], "max_completion_tokens": 16}
    [choice] = client.chat.completions.create(**body, response_format={"type": "json_object"}).choices
    text = choice.message.content or ""
    assert text.lstrip().startswith("{")
    # A model of this size may not find the end; what it wrote is then the beginning of an object.
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_answer_cut_off_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**BODY, "max_completion_tokens": 4}, response_format=Town)


def test_a_schema_that_nothing_fits(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "broken", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**BODY, response_format=form)
    assert "nowhere" in caught.value.message
