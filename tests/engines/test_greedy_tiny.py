"""Greedy answers of tiny models equal mlx-lm's, whatever the length, the company, and the prefix cache's help."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from . import tiny
from .drive import Answered, Reference, assert_same, collect, drain, greedy, run, submit

BLOCK = 64
STEP = 256
TIES_ALLOWED = 2
"""Of all the comparisons of one test; every tie is proven from mlx-lm's own log-probabilities."""


def words(seed: int, length: int) -> list[int]:
    """A random prompt."""
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


def around(*points: int) -> list[int]:
    """Each boundary and its neighbours, as numbers of tokens in the cache before the last one is fed."""
    return sorted({point + offset + 1 for point in points for offset in (-1, 0, 1)})


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_every_boundary(kind: str, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]) -> None:
    lengths = [1, 2, 3, *around(tiny.WINDOW, BLOCK, 2 * BLOCK, STEP)]
    prompts = [words(length, length) for length in lengths]
    expected = [tiny_reference(kind).generate(prompt, 4) for prompt in prompts]
    ties = 0
    for chunk, longest in ((0, STEP + 2), (BLOCK, STEP + 2), (17, BLOCK + 2)):
        engine = tiny_engine(kind, prefill_chunk=chunk, prefix_cache_bytes=0)
        for prompt, wanted in zip(prompts, expected, strict=True):
            if len(prompt) > longest:
                continue
            (answer,) = run(engine, greedy(prompt, 4))
            ties += assert_same(answer.tokens, wanted, (kind, chunk, len(prompt)))
            assert answer.accepted.prompt_tokens == len(prompt)
            assert answer.finished.usage.completion_tokens == 4
    assert ties <= TIES_ALLOWED


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_an_answer_across_boundaries(
    kind: str, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]
) -> None:
    """The cache wraps around its window, and grows by a step, while the answer is written."""
    engine = tiny_engine(kind)
    requests = [(words(1, 3), 60), (words(2, 20), 30), (words(3, STEP - 6), 12)]
    ties = 0
    for prompt, count in requests:
        (answer,) = run(engine, greedy(prompt, count))
        ties += assert_same(answer.tokens, tiny_reference(kind).generate(prompt, count), (kind, len(prompt)))
    assert ties <= TIES_ALLOWED


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_batch_that_joins_and_leaves(
    kind: str, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]
) -> None:
    engine = tiny_engine(kind, prefill_chunk=BLOCK, max_batch=8)
    generator = random.Random(kind)
    waiting = []
    for index in range(16):
        length = generator.choice([1, 2, 3, 5, 9, 23, 24, 25, 40, 63, 64, 65, 66, 90, 130])
        waiting.append((words(100 + index, length), generator.randrange(1, 30)))
    cancelled = set(generator.sample(range(16), 4))
    answers: dict[str, Answered] = {}
    running: dict[str, int] = {}
    peak = 0
    submitted = 0
    while submitted < len(waiting) or engine.has_work:
        if submitted < len(waiting) and (generator.random() < 0.4 or not engine.has_work):
            request_id = submit(engine, greedy(*waiting[submitted]))
            running[request_id] = submitted
            submitted += 1
        collect(engine.step(), answers)
        peak = max(peak, engine.load_now().decoding)
        for request_id, index in running.items():
            if index in cancelled and request_id in answers and len(answers[request_id].tokens) == 1:
                engine.cancel(request_id)
    assert peak >= 5
    ties = 0
    for request_id, index in running.items():
        prompt, count = waiting[index]
        expected = tiny_reference(kind).generate(prompt, count, prefill_step_size=BLOCK)
        tokens = answers[request_id].tokens
        if index in cancelled:
            expected.tokens[len(tokens) :] = []
        else:
            assert answers[request_id].finished.reason == "length"
        ties += assert_same(tokens, expected, (kind, index, len(prompt)))
    assert ties <= TIES_ALLOWED


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_prefix_hits(kind: str, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]) -> None:
    """Second turns, branches, repeats: the answers are mlx-lm's for the whole prompt."""
    engine = tiny_engine(kind)
    reference = tiny_reference(kind)
    ties = 0

    def ask(prompt: list[int], count: int = 12, *, cached: int | None = None) -> list[int]:
        nonlocal ties
        (answer,) = run(engine, greedy(prompt, count))
        ties += assert_same(answer.tokens, reference.generate(prompt, count), (kind, len(prompt), cached))
        if cached is not None:
            assert answer.accepted.cached_tokens == cached
            assert answer.finished.usage.cached_tokens == cached
        return answer.tokens

    stateful = kind in tiny.STATEFUL
    first = words(7, 150)
    answer = ask(first, cached=0)
    # An exact repeat, and the turn after the answer.
    ask(first, cached=149)
    second = first + answer + words(8, 31)
    answer = ask(second, cached=162)
    third = second + answer + words(9, 100)
    ask(third, cached=len(second) + 12)
    # A branch in the middle of a block, then both branches again.
    branch = first[:100] + words(10, 40)
    ask(branch, cached=0 if stateful else 100)
    ask(branch, cached=139)
    ask(third)
    ask(first + answer)
    # Nothing but a shared beginning; nothing at all.
    ask(first[:64] + words(11, 5))
    ask(first[:5] + words(12, 90))
    ask(words(13, 70), cached=0)
    assert ties <= TIES_ALLOWED


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_prefix_hits_beside_running_answers(
    kind: str, tiny_engine: Callable[..., Any], tiny_reference: Callable[[str], Reference]
) -> None:
    """What is restored joins a batch of others, and what leaves a batch is kept for the next turn."""
    engine = tiny_engine(kind)
    generator = random.Random(3)
    system = words(20, 80)
    conversations = [system + words(30 + index, generator.randrange(3, 60)) for index in range(4)]
    ties = 0
    hits = 0
    for turn in range(3):
        counts = [generator.randrange(4, 20) for _ in conversations]
        requests = [greedy(prompt, count) for prompt, count in zip(conversations, counts, strict=True)]
        for index, answer in enumerate(run(engine, *requests)):
            expected = tiny_reference(kind).generate(conversations[index], counts[index])
            ties += assert_same(answer.tokens, expected, (kind, turn, index))
            if turn:
                hits += answer.accepted.cached_tokens >= len(system)
            conversations[index] = [*conversations[index], *expected.tokens, *words(50 + index, 9)]
    assert hits >= 7
    assert ties <= TIES_ALLOWED


def test_no_prefix_cache_when_told_so(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine("llama")
    prompt = words(1, 100)
    run(engine, greedy(prompt))
    (answer,) = run(engine, greedy(prompt, use_prefix_cache=False))
    assert answer.accepted.cached_tokens == 0
    assert answer.finished.statistics.prefix_cache_hit == "none"
    other = words(2, 100)
    run(engine, greedy(other, use_prefix_cache=False))
    (answer,) = run(engine, greedy(other))
    assert answer.accepted.cached_tokens == 0


def test_drained_engine_is_idle(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine("llama")
    submit(engine, greedy(words(1, 100)))
    drain(engine)
    engine.check_idle()
