"""How tokens are chosen, against plain numpy; and that a seed means the same whatever else runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tandem.engines.mlx.sampling import Sampler, make_processors
from tandem.engines.sampling import FALLBACK, GREEDY, ResolvedSampling, resolve
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest, Sampling, TokenPrompt

from . import tiny
from .drive import Answered, Reference, collect, drain, greedy, run, step_until, submit

VOCABULARY = 40
DRAWS = 20000
Row = np.ndarray[Any, np.dtype[np.float64]]


def logits_row() -> Row:
    return np.random.default_rng(5).normal(0, 2, VOCABULARY)


def settings(**changes: Any) -> ResolvedSampling:
    return GREEDY._replace(temperature=1.0, repetition_context_size=20)._replace(**changes)


def probabilities(logits: Row, sampling: ResolvedSampling) -> Row:
    """Temperature, then top-k, top-p and min-p, each on what the one before it left."""

    def softmax(row: Row) -> Row:
        weights = np.exp(row - row.max())
        return weights / weights.sum()

    chances = softmax(logits / sampling.temperature)
    order = np.argsort(-chances)
    keep = np.ones(len(chances), bool)
    if sampling.top_k > 0:
        keep[order[sampling.top_k :]] = False
    chances = chances * keep / (chances * keep).sum()
    if sampling.top_p < 1:
        before = np.cumsum(chances[order]) - chances[order]
        keep[order[(before >= sampling.top_p) & (np.arange(len(order)) > 0)]] = False
    keep &= chances >= sampling.min_p * chances.max()
    return chances * keep / (chances * keep).sum()


def fixed_row(count: int = 1) -> mx.array:
    return mx.repeat(mx.array(logits_row().astype(np.float32))[None], count, axis=0)


def draw(sampling: ResolvedSampling, count: int = DRAWS, calls: int = 1) -> list[int]:
    """`count` tokens in each of `calls`: rows of one call are drawn independently."""
    sampler = Sampler(sampling, VOCABULARY)
    row = fixed_row(count)
    return [int(token) for token in np.array(mx.concatenate([sampler(row) for _ in range(calls)]))]


def assert_distributed(drawn: Sequence[int], expected: Row) -> None:
    """Pearson's chi-square, with rare tokens taken together; and nothing that has no chance is ever drawn."""
    counts = np.bincount(drawn, minlength=len(expected)).astype(float)
    assert not counts[expected == 0].any()
    order = np.argsort(-expected)
    bins: list[list[float]] = [[0.0, 0.0]]
    for token in order:
        if expected[token] == 0:
            break
        if bins[-1][1] >= 8:
            bins.append([0.0, 0.0])
        bins[-1][0] += counts[token]
        bins[-1][1] += expected[token] * len(drawn)
    if len(bins) > 1 and bins[-1][1] < 8:
        rest = bins.pop()
        bins[-1] = [bins[-1][0] + rest[0], bins[-1][1] + rest[1]]
    freedom = len(bins) - 1
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins)
    # Four standard deviations above the mean of the distribution.
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": VOCABULARY},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 1.7},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_are_distributed_as_they_should(changes: dict[str, Any]) -> None:
    sampling = settings(seed=11, **changes)
    expected = probabilities(logits_row(), sampling)
    drawn = draw(sampling)
    assert_distributed(drawn, expected)
    likely = set(np.flatnonzero(expected * DRAWS > 30).tolist())
    assert likely <= set(drawn)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-30])
def test_no_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(settings(temperature=temperature), 20)) == {int(logits_row().argmax())}


def test_one_call_after_another_draws_anew() -> None:
    """The engine draws one token a call, each with a key of its own."""
    sampling = settings(seed=2, top_k=8)
    assert_distributed(draw(sampling, count=1, calls=600), probabilities(logits_row(), sampling))


def test_seeds() -> None:
    one, same, other = (draw(settings(seed=seed), count=1, calls=60) for seed in (3, 3, 4))
    assert one == same
    assert one != other
    assert draw(settings(seed=2**64 - 1), 5)
    # The stream is the request's own: a neighbour's draws in between change nothing.
    first, second = Sampler(settings(seed=3), VOCABULARY), Sampler(settings(seed=9), VOCABULARY)
    mixed = []
    for _ in range(60):
        mixed.append(int(first(fixed_row()).item()))
        second(fixed_row())
    assert mixed == one


def test_half_precision_is_sampled_in_full() -> None:
    """Random numbers in bfloat16 would be so coarse that likely tokens come up too rarely."""
    sampler = Sampler(settings(seed=1), VOCABULARY)
    drawn = np.array(sampler(mx.zeros((DRAWS, VOCABULARY), mx.bfloat16)))
    assert_distributed(drawn.tolist(), np.full(VOCABULARY, 1 / VOCABULARY))


# ----------------------------------------------------------------------------------------------------------- processors


def processed(sampling: ResolvedSampling, tokens: list[int], prompt_length: int) -> Row:
    logits = mx.array(logits_row().astype(np.float32))[None]
    for processor in make_processors(sampling, prompt_length, VOCABULARY, None):
        logits = processor(mx.array(tokens), logits)
    return np.array(logits[0], np.float64)


def expected_logits(sampling: ResolvedSampling, tokens: list[int], prompt_length: int, logits: Row) -> Row:
    logits = logits.copy()
    for token in set(tokens[-sampling.repetition_context_size :]):
        factor = sampling.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    for token, count in Counter(tokens[prompt_length:]).items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "repetition_context_size": 3},
        {"presence_penalty": 0.8},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {3: 5.0, 39: -100.0, 0: 1.0}},
        {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {1: -2.0, 7: 3.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("generated", [0, 1, 12])
def test_penalties_and_biases(changes: dict[str, Any], generated: int) -> None:
    sampling = settings(**changes)
    generator = random.Random(generated)
    tokens = [generator.randrange(10) for _ in range(15 + generated)]
    found = processed(sampling, tokens, 15)
    np.testing.assert_allclose(found, expected_logits(sampling, tokens, 15, logits_row()), atol=1e-5)


def test_nothing_to_change_means_no_processor() -> None:
    assert make_processors(settings(), 5, VOCABULARY, None) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_context_size", 0),
        ("presence_penalty", 11.0),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_values_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        resolve(Sampling(**{field: value}), {}, VOCABULARY)
    assert raised.value.param == field


def test_gaps_are_filled_from_the_model_then_from_ours() -> None:
    found = resolve(Sampling(top_k=7), {"top_k": 3, "top_p": 0.5, "min_p": None}, VOCABULARY)
    assert (found.top_k, found.top_p, found.min_p) == (7, 0.5, FALLBACK["min_p"])
    assert found.temperature == FALLBACK["temperature"]
    assert resolve(Sampling(seed=-1), {}, VOCABULARY).seed == 2**64 - 1
    assert resolve(Sampling(), {}, VOCABULARY).seed != resolve(Sampling(), {}, VOCABULARY).seed


# --------------------------------------------------------------------------------------------------- through the engine


def words(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


def sampled(seed: int | None, count: int = 24, **changes: Any) -> GenerationRequest:
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": seed} | changes
    return GenerationRequest(
        TokenPrompt(tuple(words(1, 20))), max_tokens=count, logprobs=0, ignore_eos=True, sampling=Sampling(**values)
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba2"])
def test_a_seed_means_the_same_in_any_company(kind: str, tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(kind, prefill_chunk=64)
    (alone,) = run(engine, sampled(42))
    (again,) = run(engine, sampled(42))
    assert again.tokens == alone.tokens
    crowd = [greedy(words(2, 70), 9), sampled(7), sampled(42), sampled(42, temperature=0.5), sampled(None)]
    answers = run(engine, *crowd)
    assert answers[2].tokens == alone.tokens
    assert answers[1].tokens != alone.tokens
    # Joining others that run already, and being left by them.
    joined: dict[str, Answered] = {}
    other = submit(engine, greedy(words(3, 40), 12))
    step_until(engine, lambda seen: bool(seen.get(other) and seen[other].tokens), joined)
    one = submit(engine, sampled(42))
    collect(engine.step(), joined)
    submit(engine, sampled(8))
    drain(engine, joined)
    assert joined[one].tokens == alone.tokens


def test_without_a_seed_answers_differ(tiny_engine: Callable[..., Any]) -> None:
    answers = run(tiny_engine(), *(sampled(None) for _ in range(4)))
    assert len({tuple(answer.tokens) for answer in answers}) == 4


def test_penalised_answers(tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]) -> None:
    """Greedy answers under penalties, several with different ones at once, against a loop in numpy."""
    engine = tiny_engine()
    prompt = words(4, 25)
    variants = [
        Sampling(temperature=0.0, repetition_penalty=1.5, repetition_context_size=8),
        Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.7),
        Sampling(temperature=0.0, logit_bias=dict.fromkeys(range(0, tiny.VOCABULARY, 2), -5.0)),
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.2, logit_bias={17: 4.0}),
    ]
    answers = run(engine, *(greedy(prompt, 14, sampling=sampling) for sampling in variants))
    model = tiny_reference("llama").model
    for sampling, answer in zip(variants, answers, strict=True):
        resolved = resolve(sampling, {}, tiny.VOCABULARY)
        tokens = list(prompt)
        for token in answer.tokens:
            raw = np.array(model(mx.array(tokens)[None])[0, -1], np.float64)
            scores = expected_logits(resolved, tokens, len(prompt), raw)
            assert scores.max() - scores[token] <= 1e-3, sampling
            tokens.append(token)
    assert len({tuple(answer.tokens) for answer in answers}) >= 3
