"""The engine on a real model: its greedy answers are mlx-lm's, alone, in company, and after prefix hits."""

from __future__ import annotations

import json
import random
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
    Tool,
    ToolCallDelta,
    ToolChoice,
)

from .drive import Answered, Expected, Reference, assert_same, collect, greedy, make_engine, run, submit
from .prompts import PROMPTS

# A busy machine with two cores writes two tokens a second, an idle one ten.
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def engine(smollm2_folder: Path) -> Iterator[Any]:
    made = make_engine(smollm2_folder, prefix_cache_bytes=512 << 20)
    yield made
    made.check_idle()
    made.close()


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> Reference:
    return Reference(smollm2_folder, fast=True)


def length_of(index: int) -> int:
    """How many tokens to generate."""
    return (3, 4, 6, 8, 14)[index % 5]


@pytest.fixture(scope="module")
def tokenised(engine: Any) -> list[list[int]]:
    return [
        engine.prepare("probe", GenerationRequest(prompt, max_tokens=1)).answer.prompt.token_ids for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def expected(engine: Any, reference: Reference, tokenised: list[list[int]]) -> list[Expected]:
    """mlx-lm's answers to all prompts; they end at the token that ends a turn."""
    stop = engine._text.eos_ids
    return [reference.generate(tokens, length_of(index), stop) for index, tokens in enumerate(tokenised)]


def request_for(index: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(PROMPTS[index], max_tokens=length_of(index), logprobs=0, sampling=GREEDY, **fields)


def tokens_of(answer: Answered, expected: Expected) -> list[int]:
    """An answer's tokens, with the one that ended it."""
    ended = answer.finished.reason == "stop"
    return [*answer.tokens, *(expected.tokens[len(answer.tokens) :][:1] if ended else [])]


def test_prompts_are_varied(tokenised: list[list[int]], expected: list[Expected]) -> None:
    lengths = sorted(map(len, tokenised))
    assert lengths[0] == 1
    assert lengths[-1] > 160
    assert len({tuple(answer.tokens) for answer in expected}) >= 45


def test_alone(engine: Any, expected: list[Expected], tokenised: list[list[int]]) -> None:
    ties = 0
    for index, wanted in enumerate(expected):
        (answer,) = run(engine, request_for(index, use_prefix_cache=False))
        assert answer.accepted.prompt_tokens == len(tokenised[index])
        assert answer.finished.usage.completion_tokens == len(wanted.tokens), PROMPTS[index]
        ties += assert_same(tokens_of(answer, wanted), wanted, PROMPTS[index])
    assert ties == 0


def test_in_a_batch_that_joins_and_leaves(engine: Any, expected: list[Expected]) -> None:
    """Eight at a time in a random order; some are cancelled, and asked again later."""
    generator = random.Random(8)
    waiting = list(range(len(PROMPTS)))
    generator.shuffle(waiting)
    cancelled = set(generator.sample(waiting, 6))
    answers: dict[str, Answered] = {}
    asked: dict[str, int] = {}
    sizes: list[int] = []
    while waiting or engine.has_work:
        if waiting and (generator.random() < 0.6 or not engine.has_work):
            index = waiting.pop()
            asked[submit(engine, request_for(index))] = index
        collect(engine.step(), answers)
        sizes.append(engine.load_now().decoding)
        for request_id, index in list(asked.items()):
            if index in cancelled and request_id in answers and len(answers[request_id].tokens) >= 2:
                cancelled.remove(index)
                if engine.cancel(request_id):
                    waiting.append(index)
                    prefix = asked.pop(request_id)
                    assert_same(
                        answers[request_id].tokens,
                        Expected(expected[prefix].tokens[: len(answers[request_id].tokens)], expected[prefix].logprobs),
                    )
    assert max(sizes) == 8
    assert sorted(asked.values()) == list(range(len(PROMPTS)))
    ties = 0
    for request_id, index in asked.items():
        answer = answers[request_id]
        assert answer.finished.usage.completion_tokens == len(expected[index].tokens)
        ties += assert_same(tokens_of(answer, expected[index]), expected[index], PROMPTS[index])
    assert ties == 0


def test_after_prefix_hits(engine: Any, reference: Reference) -> None:
    """Second turns, a branch within a block, an exact repeat: several at once."""
    text = engine._text
    first = text.encode("The history of the lighthouse begins in Alexandria, where " * 7)
    ties = 0

    def ask(*prompts: list[int]) -> list[Answered]:
        nonlocal ties
        answers = run(engine, *(greedy(prompt, 6) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            ties += assert_same(answer.tokens, reference.generate(prompt, 6), len(prompt))
        return answers

    (opening,) = ask(first)
    second = [*first, *opening.tokens, *text.encode(" In the next century")]
    branch = [*first[:70], *text.encode(" But nobody knew")]
    answers = ask(first, second, branch, first[:65])
    assert [answer.accepted.cached_tokens for answer in answers] == [len(first) - 1, len(first) + 6, 70, 64]
    assert [answer.finished.statistics.prefix_cache_hit for answer in answers] == [
        "exact",
        "partial",
        "partial",
        "exact",
    ]
    assert ties == 0


def test_around_boundaries(engine: Any, reference: Reference) -> None:
    """Of a block, and of a chunk, which is also mlx-lm's allocation step."""
    text = engine._text.encode("A very long sentence about ships, sails and the wind that fills them, and so on. " * 30)
    prompts = [text[: around + offset] for around in (65, 257) for offset in (-1, 0, 1)]
    answers = run(engine, *(greedy(prompt, 2, use_prefix_cache=False) for prompt in prompts))
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ties += assert_same(answer.tokens, reference.generate(prompt, 2), len(prompt))
    assert ties == 0


def test_quantised_cache(smollm2_folder: Path, reference: Reference) -> None:
    """Greedy text under 8 bits is mlx-lm's with `kv_bits=8`, alone and several at once, cold and warm."""
    engine = make_engine(smollm2_folder, kv_bits=8, prefix_cache_bytes=64 << 20)
    texts = ("The three laws of motion are", "def fibonacci(n):\n", "Once upon a time there was a princess who")
    prompts = [engine._text.encode(text) for text in texts]
    options = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}
    expected = [reference.generate(prompt, 10, **options) for prompt in prompts]
    ties = 0
    for answers in (run(engine, *(greedy(prompt, 10) for prompt in prompts)), run(engine, greedy(prompts[0], 10))):
        for answer, wanted in zip(answers, expected, strict=False):
            ties += assert_same(answer.tokens, wanted)
    assert answers[0].accepted.cached_tokens == len(prompts[0]) - 1
    assert ties == 0
    engine.check_idle()


# ---------------------------------------------------------------------------------------------------------- constraints

WEATHER = Tool(
    "get_weather",
    "Current weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def chat(text: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt((Message("user", text),), **fields)


def test_json_schema(engine: Any) -> None:
    """Several constrained answers, sampled and greedy, beside a free one that is not touched."""
    prompt = chat("Describe a person as JSON.")
    free = GenerationRequest(chat("Hi"), max_tokens=8, logprobs=0, sampling=GREEDY)
    (alone,) = run(engine, free)
    constrained = [
        GenerationRequest(prompt, max_tokens=90, constraint=JsonConstraint(PERSON), sampling=sampling)
        for sampling in (GREEDY, Sampling(temperature=1.5, seed=1))
    ]
    first, second, beside = run(engine, *constrained, free)
    for answer in (first, second):
        assert answer.finished.reason == "stop"
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert beside.tokens == alone.tokens


def test_any_json_object(engine: Any) -> None:
    request = GenerationRequest(
        chat('Answer with {"ok": true} and nothing else.'), max_tokens=60, constraint=JsonConstraint(), sampling=GREEDY
    )
    (answer,) = run(engine, request)
    if answer.finished.reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert answer.text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "choice", [ToolChoice("required"), ToolChoice("named", "get_weather")], ids=["required", "named"]
)
def test_forced_tool_calls(choice: ToolChoice, engine: Any) -> None:
    prompt = chat("Tell me a joke.", tools=(WEATHER,), tool_choice=choice, parallel_tool_calls=False)
    (answer,) = run(engine, GenerationRequest(prompt, max_tokens=80, sampling=GREEDY))
    deltas = [event for event in answer.events if isinstance(event, ToolCallDelta)]
    assert deltas[0].name == "get_weather"
    assert deltas[0].id
    arguments = json.loads("".join(delta.arguments for delta in deltas))
    jsonschema.validate(arguments, WEATHER.parameters)
    assert answer.finished.reason == "tool_calls"
    assert answer.text.strip() == ""
