"""vLLM behind the engine contract: its greedy answers are mlx-lm's, and nothing is left of a request that has ended."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tandem.errors import UnsupportedError
from tandem.types import GenerationRequest, JsonConstraint, Sampling, TextPrompt, TokenPrompt
from tests.engines import tiny
from tests.engines.conftest import VLLM
from tests.engines.drive import (
    Answered,
    Reference,
    assert_same,
    collect,
    drain,
    greedy,
    make_engine,
    run,
    step_until,
    submit,
)
from tests.engines.test_scores import check

pytestmark = [*VLLM, pytest.mark.timeout(900)]

CONTEXT = 2048
CHUNK = 160
BLOCK = 128
"""vLLM's own on a CPU."""


@pytest.fixture(scope="module")
def folder(vllm_folder: Callable[[str], Path]) -> Path:
    return vllm_folder("llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Any]:
    made = make_engine(folder, engine="vllm", context_length=CONTEXT, prefill_chunk=CHUNK, max_batch=4)
    yield made
    made.close()


@pytest.fixture
def engine(loaded: Any) -> Iterator[Any]:
    yield loaded
    loaded.check_idle()


def words(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK, 700])
def test_greedy_answers_are_mlx_lms(length: int, engine: Any, reference: Reference) -> None:
    prompt = words(length, length)
    for _ in ("cold", "warm"):
        (answer,) = run(engine, greedy(prompt, 12))
        assert_same(answer.tokens, reference.generate(prompt, 12), length)


def test_a_mixed_batch_is_each_alone(engine: Any) -> None:
    prompt = words(3, 60)
    requests = [
        greedy(words(1, 400), 10),
        greedy(prompt, 14, sampling=Sampling(temperature=1.0, seed=5, top_p=0.9)),
        greedy(prompt, 14, sampling=Sampling(temperature=0.8, seed=6, top_k=20, min_p=0.01)),
        greedy(prompt, 14, sampling=Sampling(temperature=0.0, repetition_penalty=1.5, repetition_context_size=8)),
        greedy(prompt, 14, sampling=Sampling(temperature=0.0, frequency_penalty=1.0), logprobs=3),
        greedy(words(2, 90), 6, prompt_logprobs=1),
        greedy(words(4, 200), 10, sampling=Sampling(temperature=0.0, logit_bias={17: 4.0})),
        GenerationRequest(TextPrompt("A"), max_tokens=30, logprobs=0, constraint=JsonConstraint({"type": "boolean"})),
    ]
    alone = [run(engine, request)[0].tokens for request in requests[:-1]]
    together = run(engine, *requests)
    assert [answer.tokens for answer in together[:-1]] == alone
    assert together[-1].text in ("true", "false")


def test_without_a_seed_answers_differ(engine: Any) -> None:
    request = greedy(words(9, 20), 20, sampling=Sampling(temperature=1.0))
    assert len({tuple(answer.tokens) for answer in run(engine, *[request] * 4)}) == 4


def test_penalties_and_biases_are_those_of_mlx(engine: Any, folder: Path) -> None:
    other = make_engine(folder)
    prompt = words(4, 25)
    variants = [
        Sampling(temperature=0.0, repetition_penalty=1.5, repetition_context_size=8),
        Sampling(temperature=0.0, repetition_penalty=0.7, repetition_context_size=100),
        Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.7),
        Sampling(temperature=0.0, logit_bias=dict.fromkeys(range(0, tiny.VOCABULARY, 2), -5.0)),
        Sampling(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.2, logit_bias={17: 4.0}),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=0.0),
    ]
    requests = [greedy(prompt, 14, sampling=sampling) for sampling in variants]
    answers = [answer.tokens for answer in run(engine, *requests)]
    assert answers == [answer.tokens for answer in run(other, *requests)]
    assert answers[-2] == answers[-1]
    assert len({tuple(tokens) for tokens in answers}) >= 5
    other.close()


def test_scores(engine: Any, reference: Reference) -> None:
    prompt = words(1, 200)
    lone, first, second = (
        *run(engine, greedy(prompt, 8, logprobs=4, prompt_logprobs=2)),
        *run(engine, greedy(prompt, 8, logprobs=4, prompt_logprobs=2), greedy(prompt[:90], 12, logprobs=0)),
    )
    for answer, length, top in ((lone, 200, 4), (first, 200, 4), (second, 90, 0)):
        rows = np.array(reference.logprobs([*prompt[:length], *answer.tokens]))
        check(answer.scores, rows[length - 1 : -1], answer.tokens, top)
        if length == 200:
            assert answer.prompt_scores[0].logprob is None
            check(answer.prompt_scores[1:], rows[:199], prompt[1:], 2)
            assert answer.accepted.cached_tokens == 0


def test_prefix_hits_are_reported(engine: Any, reference: Reference) -> None:
    prompt = words(20, 400)
    cold, warm = run(engine, greedy(prompt, 6))[0], run(engine, greedy(prompt, 6))[0]
    assert (cold.accepted.cached_tokens, cold.finished.statistics.prefix_cache_hit) == (0, "none")
    assert (warm.accepted.cached_tokens, warm.finished.statistics.prefix_cache_hit) == (3 * BLOCK, "partial")
    assert warm.finished.usage.cached_tokens == 3 * BLOCK
    assert engine.load_now().prefix_cache_bytes > 0
    second = [*prompt, *cold.tokens, *words(21, 30)]
    (answer,) = run(engine, greedy(second, 6))
    assert answer.accepted.cached_tokens == 3 * BLOCK
    assert_same(answer.tokens, reference.generate(second, 6))


def test_a_request_that_wants_no_prefix_cache(engine: Any) -> None:
    """It finds nothing, and leaves nothing to be found."""
    prompt = words(22, 300)
    run(engine, greedy(prompt, 2, use_prefix_cache=False))
    assert run(engine, greedy(prompt, 2, use_prefix_cache=False))[0].accepted.cached_tokens == 0
    assert run(engine, greedy(prompt, 2))[0].accepted.cached_tokens == 0
    assert run(engine, greedy(prompt, 2))[0].accepted.cached_tokens == 2 * BLOCK


def test_cancelling_at_each_stage(engine: Any, reference: Reference) -> None:
    stays = greedy(words(30, 50), 40)
    answers: dict[str, Answered] = {}
    staying = submit(engine, stays)
    step_until(engine, lambda seen: bool(seen.get(staying) and seen[staying].tokens), answers)
    decoding = submit(engine, greedy(words(31, 20), 40))
    step_until(engine, lambda seen: len(seen.get(decoding, Answered()).tokens) > 1, answers)
    reading = submit(engine, greedy(words(32, 1500), 4))
    step_until(engine, lambda seen: bool(seen.get(reading) and seen[reading].progress), answers)
    assert answers[reading].progress[-1].processed_tokens < 1500
    before = {one: len(answers[one].events) for one in (reading, decoding)}
    queued = [submit(engine, greedy(words(33, 20), 4)) for _ in range(3)]
    for one in (reading, decoding, *queued):
        assert engine.cancel(one)
        assert not engine.cancel(one)
    assert engine.load_now().decoding == 1
    drain(engine, answers)
    assert {one: len(answers[one].events) for one in before} == before
    assert not any(one in answers for one in queued)
    assert_same(answers[staying].tokens, reference.generate(words(30, 50), 40))
    load = engine.load_now()
    assert (load.waiting, load.prefilling, load.decoding, load.cache_bytes) == (0, 0, 0, 0)


def test_a_stop_string_ends_the_answer_at_once(engine: Any) -> None:
    prompt = words(40, 30)
    (whole,) = run(engine, greedy(prompt, 60))
    stop = whole.text[12:16]
    other, stopped = run(engine, greedy(words(41, 30), 60), greedy(prompt, 60, stop=(stop,)))
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finished.reason == "stop"
    assert stopped.finished.usage.completion_tokens < 60
    assert len(other.tokens) == 60


def test_the_end_token(engine: Any) -> None:
    sampling = Sampling(temperature=0.0, logit_bias={tiny.EOS: 100.0})
    ended, ignored = run(
        engine,
        greedy(words(50, 20), 9, sampling=sampling, ignore_eos=False),
        greedy(words(50, 20), 9, sampling=sampling),
    )
    assert (ended.finished.reason, ended.finished.usage.completion_tokens, ended.text) == ("stop", 1, "")
    assert (ignored.finished.reason, ignored.finished.usage.completion_tokens) == ("length", 9)


def test_constrained_answers(engine: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    requests = [
        GenerationRequest(TextPrompt("A person"), max_tokens=120, constraint=JsonConstraint(schema), sampling=sampling)
        for sampling in (
            Sampling(temperature=0.0),
            Sampling(temperature=1.3, seed=1),
            Sampling(temperature=1.0, seed=2),
        )
    ]
    for answer in run(engine, *requests):
        assert answer.finished.reason == "stop"
        jsonschema.validate(json.loads(answer.text), schema)


def test_a_broken_constraint_fails_its_request_only(engine: Any) -> None:
    prepared = engine.prepare(
        "broken", GenerationRequest(TextPrompt("A"), max_tokens=50, constraint=JsonConstraint({"type": "string"}))
    )

    def accept(token: int) -> None:
        raise UnsupportedError("No further.")

    prepared.constraint = _Refusing(prepared.constraint, accept)
    engine.submit(prepared)
    beside = submit(engine, greedy(words(61, 30), 20))
    answers = drain(engine)
    assert answers["broken"].failure.message == "No further."
    assert len(answers[beside].tokens) == 20


class _Refusing:
    """A constraint that takes no token."""

    def __init__(self, constraint: Any, accept: Callable[[int], None]) -> None:
        self.mask = constraint.mask
        self.is_finished = False
        self.accept = accept


def test_progress_and_statistics(engine: Any) -> None:
    prompt = words(70, 1000)
    (answer,) = run(engine, greedy(prompt, 5))
    done = [event.processed_tokens for event in answer.progress]
    assert done == sorted(set(done))
    assert done[-1] == 1000
    assert len(done) == -(-1000 // CHUNK)
    statistics = answer.finished.statistics
    assert 0 <= statistics.queue_seconds < statistics.ttft_seconds
    assert 0 < statistics.prefill_seconds <= statistics.ttft_seconds - statistics.queue_seconds
    assert statistics.prompt_tps > 0
    load = engine.load_now()
    assert load.prefill_tps > 0
    assert load.decode_tps > 0


def test_a_prompt_does_not_hold_up_answers(engine: Any) -> None:
    """Chunks get small where the device is slow."""
    engine._pace.prefill_tps, engine._pace._most_stall = 400.0, 0.25
    try:
        answers: dict[str, Answered] = {}
        first = submit(engine, greedy(words(80, 20), 200))
        step_until(engine, lambda seen: bool(seen.get(first) and seen[first].tokens), answers)
        long = submit(engine, greedy(words(81, 600), 2))
        collect(engine.step(), answers)
        assert answers[long].progress[0].processed_tokens == 64
        written = len(answers[first].tokens)
        collect(engine.step(), answers)
        assert len(answers[first].tokens) == written + 1
    finally:
        engine._pace._most_stall = 0.5
        for one in (first, long):
            engine.cancel(one)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("temperature", Sampling(temperature=2.5)),
        ("presence_penalty", Sampling(presence_penalty=3.0)),
        ("frequency_penalty", Sampling(frequency_penalty=-3.0)),
    ],
)
def test_what_vllm_cannot_do_is_refused(name: str, sampling: Sampling, engine: Any) -> None:
    with pytest.raises(UnsupportedError, match=name) as raised:
        engine.prepare("x", GenerationRequest(TokenPrompt((5,)), max_tokens=1, sampling=sampling))
    assert raised.value.param == name


def test_what_vllm_refuses_late_fails_alone(engine: Any) -> None:
    """A check of vLLM's own, behind ours."""
    prepared = engine.prepare("late", greedy(words(90, 10), 4))
    prepared.params.logit_bias = {1 << 20: 1.0}
    engine.submit(prepared)
    beside = submit(engine, greedy(words(91, 10), 4))
    answers = drain(engine)
    assert "vLLM refuses" in answers["late"].failure.message
    assert len(answers[beside].tokens) == 4
