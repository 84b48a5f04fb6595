"""Log-probabilities of prompts and answers equal a plain forward pass's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tandem.types import GenerationRequest, PromptScored, Sampling, TextPrompt, TokenLogprob

from . import tiny
from .drive import Reference, greedy, run

CLOSE = 1e-4


def words(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


def check(scores: list[TokenLogprob], rows: np.ndarray[Any, Any], tokens: list[int], top: int) -> None:
    """`rows[i]` are the log-probabilities that `tokens[i]` was chosen from."""
    assert [score.token_id for score in scores] == tokens
    for score, row in zip(scores, rows, strict=True):
        assert score.logprob == pytest.approx(row[score.token_id], abs=CLOSE)
        assert len(score.top) == top
        best = np.sort(row)[::-1][:top]
        np.testing.assert_allclose([one.logprob for one in score.top], best, atol=CLOSE)
        for one in score.top:
            assert one.logprob == pytest.approx(row[one.token_id], abs=CLOSE)


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_prompts_and_answers(
    kind: str, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]
) -> None:
    engine = tiny_engine(kind)
    prompt = words(1, 200)
    lone, first, second = (
        *run(engine, greedy(prompt, 8, logprobs=4, prompt_logprobs=2)),
        *run(engine, greedy(prompt, 8, logprobs=4, prompt_logprobs=2), greedy(prompt[:90], 12, logprobs=0)),
    )
    for answer, length, top in ((lone, 200, 4), (first, 200, 4), (second, 90, 0)):
        tokens = [*prompt[:length], *answer.tokens]
        rows = np.array(tiny_reference(kind).logprobs(tokens))
        check(answer.scores, rows[length - 1 : -1], answer.tokens, top)
        if length == 200:
            assert answer.prompt_scores[0].logprob is None
            assert answer.prompt_scores[0].token_id == prompt[0]
            check(answer.prompt_scores[1:], rows[:199], prompt[1:], 2)
            # All of the prompt was computed, although its entries were kept.
            assert answer.accepted.cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 128, 129, 130, 257])
def test_scoring_alone(
    length: int, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]
) -> None:
    """`max_tokens=0`: the prompt's scores, and nothing generated."""
    prompt = words(2, length)
    (answer,) = run(tiny_engine(), greedy(prompt, 0, prompt_logprobs=1))
    assert [type(event).__name__ for event in answer.events if type(event).__name__ != "PrefillProgress"] == [
        "Accepted",
        "PromptScored",
        "Finished",
    ]
    assert answer.finished.usage.completion_tokens == 0
    assert answer.finished.reason == "length"
    rows = np.array(tiny_reference("llama").logprobs(prompt))
    check(answer.prompt_scores[1:], rows[:-1], prompt[1:], 1)


def test_scores_do_not_change_the_answer(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(prefill_chunk=128)
    prompt = words(3, 150)
    plain, scored = (run(engine, greedy(prompt, 12, **more))[0] for more in ({}, {"prompt_logprobs": 3, "logprobs": 5}))
    assert plain.tokens == scored.tokens
    # What scoring computed serves the next request.
    assert run(engine, greedy(prompt, 2))[0].accepted.cached_tokens == 149


def test_sampled_tokens_have_the_models_own_probabilities(
    tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]
) -> None:
    """Before temperature, and for several sequences with and without a reader at once."""
    engine = tiny_engine()
    prompt = words(4, 30)
    sampling = Sampling(temperature=1.4, seed=5, top_k=50)
    silent = greedy(prompt, 12, logprobs=None)
    scored, _, other = run(engine, greedy(prompt, 12, sampling=sampling, logprobs=3), silent, greedy(prompt, 9))
    for answer, top in ((scored, 3), (other, 0)):
        rows = np.array(tiny_reference("llama").logprobs([*prompt, *answer.tokens]))
        check(answer.scores, rows[29:-1], answer.tokens, top)


def test_bytes_of_tokens(tiny_engine: Callable[..., Any]) -> None:
    """The bytes of all tokens together are the answer's, also where a character spans several tokens."""
    engine = tiny_engine()
    bias = dict.fromkeys(engine._text.encode("🙂"), 60.0)
    (answer,) = run(engine, greedy(words(5, 9), 40, sampling=Sampling(temperature=1.0, seed=3, logit_bias=bias)))
    joined = b"".join(bytes(score.bytes) for score in answer.scores)
    assert len(joined) >= 40
    assert joined.decode("utf-8", "replace") == answer.text


def test_echo(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    text = "The quick brown fox 🙂"
    request = GenerationRequest(
        TextPrompt(text), max_tokens=3, echo=True, prompt_logprobs=0, logprobs=0, sampling=Sampling(temperature=0.0)
    )
    (answer,) = run(engine, request)
    (scored,) = (event for event in answer.events if isinstance(event, PromptScored))
    assert scored.text == text
    assert b"".join(bytes(score.bytes) for score in scored.logprobs).decode().endswith(text)
    kinds = [type(event).__name__ for event in answer.events]
    assert kinds.index("PromptScored") < kinds.index("TextDelta")


def test_minus_infinity_is_no_alternative(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    bias = {token: -float("inf") for token in range(5, tiny.VOCABULARY)}
    (answer,) = run(engine, greedy(words(6, 9), 3, sampling=Sampling(temperature=0.0, logit_bias=bias), logprobs=20))
    for score in answer.scores:
        assert len(score.top) == 5
        assert sum(np.exp(one.logprob) for one in score.top) == pytest.approx(1.0, abs=1e-4)
    assert mx.isfinite(mx.array([score.logprob for score in answer.scores])).all()
