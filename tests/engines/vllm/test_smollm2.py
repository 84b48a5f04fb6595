"""vLLM on a real model: greedy answers are mlx-lm's; schemas and tools hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.types import (
    ChatPrompt,
    GenerationRequest,
    JsonConstraint,
    Message,
    Sampling,
    TokenPrompt,
    Tool,
    ToolCallDelta,
    ToolChoice,
)
from tests.engines.conftest import VLLM
from tests.engines.drive import Reference, assert_same, make_engine, run
from tests.engines.prompts import PROMPTS
from tests.engines.test_smollm2 import PERSON, WEATHER

pytestmark = [*VLLM, pytest.mark.long, pytest.mark.real_model, pytest.mark.timeout(1200)]

GREEDY = Sampling(temperature=0.0)
EVERY = 6
"""Every sixth of the varied prompts; mlx-lm takes its time for each."""


@pytest.fixture(scope="module")
def engine(smollm2_folder: Path) -> Iterator[Any]:
    made = make_engine(smollm2_folder, engine="vllm", context_length=2048)
    yield made
    made.check_idle()
    made.close()


def chat(text: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt((Message("user", text),), **fields)


def test_greedy_answers_are_mlx_lms(engine: Any, smollm2_folder: Path) -> None:
    reference = Reference(smollm2_folder, fast=True)
    prompts = [
        *(engine.prepare("probe", GenerationRequest(one)).answer.prompt.token_ids for one in PROMPTS[::EVERY]),
        engine._text.encode("A very long sentence about ships, sails and the wind that fills them, and so on. " * 36),
    ]
    assert len(prompts[-1]) > 650
    requests = [
        GenerationRequest(TokenPrompt(tuple(prompt)), max_tokens=16, logprobs=0, ignore_eos=True, sampling=GREEDY)
        for prompt in prompts
    ]
    together = run(engine, *requests)
    ties = 0
    for prompt, answer in zip(prompts, together, strict=True):
        ties += assert_same(answer.tokens, reference.generate(prompt, 16), len(prompt))
    assert ties == 0
    alone = [run(engine, request)[0].tokens for request in requests[-3:]]
    assert alone == [answer.tokens for answer in together[-3:]]


def test_json_schema(engine: Any) -> None:
    """Constrained answers, sampled and greedy, beside a free one that is not touched."""
    free = GenerationRequest(chat("Hi"), max_tokens=8, logprobs=0, sampling=GREEDY)
    (alone,) = run(engine, free)
    constrained = [
        GenerationRequest(
            chat("Describe a person as JSON."), max_tokens=90, constraint=JsonConstraint(PERSON), sampling=sampling
        )
        for sampling in (GREEDY, Sampling(temperature=1.5, seed=1))
    ]
    first, second, beside = run(engine, *constrained, free)
    for answer in (first, second):
        assert answer.finished.reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert beside.tokens == alone.tokens


def test_constrained_answers_are_those_of_mlx(engine: Any, smollm2_folder: Path) -> None:
    """The same grammar: greedy, token for token."""
    request = GenerationRequest(
        chat("Describe a person as JSON."),
        max_tokens=30,
        logprobs=0,
        constraint=JsonConstraint(PERSON),
        sampling=GREEDY,
    )
    other = make_engine(smollm2_folder)
    assert run(engine, request)[0].tokens == run(other, request)[0].tokens
    other.close()


@pytest.mark.parametrize(
    "choice", [ToolChoice("required"), ToolChoice("named", "get_weather")], ids=["required", "named"]
)
def test_forced_tool_calls(choice: ToolChoice, engine: Any) -> None:
    tools: tuple[Tool, ...] = (WEATHER,)
    prompt = chat("Tell me a joke.", tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (answer,) = run(engine, GenerationRequest(prompt, max_tokens=80, sampling=GREEDY))
    deltas = [event for event in answer.events if isinstance(event, ToolCallDelta)]
    assert deltas[0].name == "get_weather"
    jsonschema.validate(json.loads("".join(delta.arguments for delta in deltas)), WEATHER.parameters)
    assert answer.finished.reason == "tool_calls"
    assert answer.text.strip() == ""
