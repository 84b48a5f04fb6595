"""The official `openai` package: the older completions API."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tandem.config import Settings
from tandem.models.store import ModelStore

pytestmark = [pytest.mark.clients, pytest.mark.real_model, pytest.mark.timeout(900)]

PROMPT = "The capital of France is"
BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def text(client: openai.OpenAI) -> str:
    """How the model goes on."""
    completion = client.completions.create(**BODY)
    assert completion.object == "text_completion"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4
    return completion.choices[0].text


def test_a_stream(client: openai.OpenAI, text: str) -> None:
    chunks = list(client.completions.create(**BODY, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].usage is not None
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]


def test_several_prompts(client: openai.OpenAI, text: str) -> None:
    body = {**BODY, "prompt": ["One, two,", PROMPT]}
    completion = client.completions.create(**body)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[1].text == text
    assert completion.choices[0].text != text


def test_token_ids(client: openai.OpenAI, text: str, real_home: Any) -> None:
    from transformers import AutoTokenizer

    folder = ModelStore(Settings(home=real_home)).locate("demo").path
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPT, add_special_tokens=False).input_ids
    assert client.completions.create(**{**BODY, "prompt": tokens}).choices[0].text == text


def test_echo_with_logprobs(client: openai.OpenAI, text: str) -> None:
    [choice] = client.completions.create(**BODY, echo=True, logprobs=2).choices
    assert choice.text == PROMPT + text
    lists = choice.logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert "".join(lists.tokens) == choice.text
    assert lists.token_logprobs is not None
    assert lists.token_logprobs[0] is None
    assert all(value <= 0 for value in lists.token_logprobs[1:])
    assert lists.text_offset is not None
    assert all(map(choice.text.startswith, lists.tokens, lists.text_offset))
    assert lists.top_logprobs is not None
    for token, logprob, top in list(zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True))[1:]:
        assert top[token] == logprob
        assert len(top) in (2, 3)


def test_stop_and_n(client: openai.OpenAI, text: str) -> None:
    assert client.completions.create(**BODY, stop=text[-1]).choices[0].text == text[: text.index(text[-1])]
    several = client.completions.create(**{**BODY, "temperature": 1.5}, n=3, seed=1)
    assert len({choice.text for choice in several.choices}) == 3
