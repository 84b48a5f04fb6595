"""What a runner may rely on, whichever engine it has: the same tests for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.engines.base import EngineOptions, LoadProgress
from tandem.engines.registry import build_engine
from tandem.errors import ContextTooLongError, InvalidRequestError
from tandem.types import (
    Accepted,
    ChatPrompt,
    EngineLoad,
    Finished,
    GenerationRequest,
    Message,
    PrefillProgress,
    PromptScored,
    Sampling,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)

from .conftest import VLLM
from .drive import Answered, collect, drain, run, step_until, submit

CONTEXT = 1500


@pytest.fixture(params=["mlx", "sim", pytest.param("vllm", marks=VLLM)])
def options(
    request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path], vllm_folder: Callable[[str], Path]
) -> EngineOptions:
    folders = {"mlx": tiny_folder, "vllm": vllm_folder}
    path = str(folders[request.param]("llama")) if request.param in folders else ""
    return EngineOptions(engine=request.param, model_id="contract", path=path, context_length=CONTEXT, max_batch=4)


@pytest.fixture
def engine(options: EngineOptions) -> Any:
    made = build_engine(options)
    made.load(lambda progress: None)
    made.warm_up()
    yield made
    made.close()


def ask(length: int = 20, max_tokens: int | None = 8, **fields: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"ignore_eos": True, "logprobs": 0, "sampling": Sampling(temperature=0.0)} | fields
    return GenerationRequest(
        TokenPrompt(tuple(40 + index % 80 for index in range(length))), max_tokens=max_tokens, **settings
    )


def test_loading_reports_every_layer(options: EngineOptions) -> None:
    made = build_engine(options)
    assert made.load_now() == EngineLoad() or options.engine == "sim"
    seen: list[LoadProgress] = []
    info = made.load(seen.append)
    assert [progress.done for progress in seen] == [*range(1, seen[-1].total + 1)]
    assert info.engine == options.engine
    assert info.model_id == "contract"
    assert info.context_length == CONTEXT
    assert info.vocabulary_size > 256
    assert "text" in info.capabilities
    assert info.kv_bytes_per_token > 0
    made.warm_up()
    assert not made.has_work
    made.close()


def test_the_order_of_events(engine: Any) -> None:
    requests = [
        ask(),
        ask(1200),
        ask(30, echo=True, prompt_logprobs=1),
        ask(1),
        GenerationRequest(TextPrompt("Hello there"), max_tokens=5, echo=True),
        GenerationRequest(ChatPrompt((Message("user", "Hello"),)), max_tokens=5),
    ]
    for request, answer in zip(requests, run(engine, *requests), strict=True):
        kinds = [type(event) for event in answer.events]
        assert kinds[0] is Accepted
        assert kinds.count(Accepted) == 1
        assert kinds[-1] is Finished
        assert kinds.count(Finished) == 1
        first_text = kinds.index(TextDelta) if TextDelta in kinds else len(kinds)
        for early in (PrefillProgress, PromptScored):
            assert all(index < first_text for index, kind in enumerate(kinds) if kind is early)
        assert kinds.count(PromptScored) == int(request.echo or request.prompt_logprobs is not None)


def test_progress_grows_to_the_whole_prompt(engine: Any) -> None:
    (answer,) = run(engine, ask(1200))
    done = [event.processed_tokens for event in answer.progress]
    assert len(done) >= 2
    assert done == sorted(set(done))
    assert done[-1] == 1200
    assert {event.total_tokens for event in answer.progress} == {1200}


def test_usage_is_consistent(engine: Any) -> None:
    for count in (1, 8):
        (answer,) = run(engine, ask(20, count))
        usage, statistics = answer.finished.usage, answer.finished.statistics
        assert answer.accepted.prompt_tokens == usage.prompt_tokens == statistics.prompt_tokens == 20
        assert answer.accepted.cached_tokens == usage.cached_tokens == statistics.cached_tokens
        assert usage.completion_tokens == statistics.generation_tokens == count
        assert len(answer.scores) == count
        assert usage.reasoning_tokens == 0
        assert 0 <= statistics.queue_seconds <= statistics.ttft_seconds
        assert statistics.decode_seconds >= 0
        assert (statistics.generation_tps > 0) == (count > 1)
        assert answer.finished.reason == "length"


def test_answers_do_not_depend_on_company(engine: Any) -> None:
    alone = [run(engine, ask(length, 12))[0].text for length in (5, 20, 300)]
    together = [answer.text for answer in run(engine, *(ask(length, 12) for length in (5, 20, 300)))]
    assert together == alone
    assert len(set(alone)) == 3


def test_seeds(engine: Any) -> None:
    def sampled(seed: int) -> GenerationRequest:
        return ask(20, 12, sampling=Sampling(temperature=1.0, seed=seed))

    one, same, other = run(engine, sampled(1), sampled(1), sampled(2))
    assert one.text == same.text != other.text


def test_stop_strings(engine: Any) -> None:
    (whole,) = run(engine, ask(20, 40))
    stop = whole.text[10:14]
    (answer,) = run(engine, ask(20, 40, stop=(stop,)))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finished.reason == "stop"
    assert answer.finished.stop_sequence == stop
    assert answer.finished.usage.completion_tokens < 40


def test_scoring_without_an_answer(engine: Any) -> None:
    (answer,) = run(engine, ask(30, 0, prompt_logprobs=2))
    assert answer.finished.usage.completion_tokens == 0
    assert len(answer.prompt_scores) == 30
    assert answer.prompt_scores[0].logprob is None
    assert [score.token_id for score in answer.prompt_scores] == [*range(40, 70)]
    assert all(score.logprob is not None and len(score.top) == 2 for score in answer.prompt_scores[1:])
    assert answer.text == ""


def test_scoring_a_prompt_that_fills_the_context(engine: Any) -> None:
    (answer,) = run(engine, GenerationRequest(TokenPrompt((50,) * CONTEXT), max_tokens=0, prompt_logprobs=0))
    assert len(answer.prompt_scores) == CONTEXT


def test_an_answer_ends_where_the_context_does(engine: Any) -> None:
    (answer,) = run(engine, GenerationRequest(TokenPrompt((50,) * (CONTEXT - 3)), max_tokens=None, ignore_eos=True))
    assert answer.finished.usage.completion_tokens == 3
    assert answer.finished.reason == "length"
    with pytest.raises(ContextTooLongError, match=str(CONTEXT)):
        engine.prepare("x", GenerationRequest(TokenPrompt((50,) * CONTEXT), max_tokens=1))


def test_bad_requests_are_refused_before_they_are_queued(engine: Any) -> None:
    unknown = engine.prepare, GenerationRequest(TokenPrompt((1 << 30,)), max_tokens=1)
    no_messages = engine.prepare, GenerationRequest(ChatPrompt(()), max_tokens=1)
    for prepare, request in (unknown, no_messages):
        with pytest.raises(InvalidRequestError):
            prepare("x", request)
    assert not engine.has_work


def test_cancelling(engine: Any) -> None:
    answers: dict[str, Answered] = {}
    ids = [submit(engine, ask(20 + index, 500)) for index in range(6)]
    step_until(engine, lambda seen: len(seen.get(ids[0], Answered()).scores) > 0, answers)
    events = {one: len(answers[one].events) if one in answers else 0 for one in ids}
    for one in ids:
        assert engine.cancel(one)
        assert not engine.cancel(one)
    assert not engine.has_work
    load = engine.load_now()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    drain(engine, answers)
    assert {one: len(answers[one].events) if one in answers else 0 for one in ids} == events
    assert not engine.cancel("unknown")


def test_cancelling_one_leaves_the_others(engine: Any) -> None:
    (expected,) = run(engine, ask(33, 30))
    answers: dict[str, Answered] = {}
    goes, stays = submit(engine, ask(20, 30)), submit(engine, ask(33, 30))
    step_until(engine, lambda seen: len(seen.get(stays, Answered()).scores) > 2, answers)
    assert engine.cancel(goes)
    drain(engine, answers)
    assert answers[stays].text == expected.text
    assert not isinstance(answers[goes].events[-1], Finished)


def test_no_more_than_the_batch_at_a_time(engine: Any) -> None:
    ids = [submit(engine, ask(20 + index, 6)) for index in range(9)]
    assert engine.load_now().waiting == 9
    answers: dict[str, Answered] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        load = engine.load_now()
        assert load.prefilling + load.decoding <= 4
    assert all(len(answers[one].scores) == 6 for one in ids)


def test_steps_are_counted(engine: Any) -> None:
    before = engine.load_now().steps
    run(engine, ask())
    assert engine.load_now().steps > before


def test_preparing_on_another_thread_while_it_works(engine: Any) -> None:
    (expected,) = run(engine, ask(33, 10))
    prepared: list[Any] = []

    def prepare() -> None:
        prepared.extend(engine.prepare(f"t{number}", ask(33, 10)) for number in range(20))

    submit(engine, ask(20, 200))
    thread = threading.Thread(target=prepare)
    thread.start()
    while thread.is_alive():
        engine.step()
    thread.join()
    assert len(prepared) == 20
    for one in prepared:
        engine.submit(one)
    answers = drain(engine)
    assert {answers[f"t{number}"].text for number in range(20)} == {expected.text}
