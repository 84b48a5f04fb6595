"""Who gets the device next, and what is left of requests that end, fail or are cancelled."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tandem.engines.mlx import running as running_module
from tandem.engines.mlx.pace import CPU_PREFILL_CHUNK
from tandem.engines.mlx.prefill import Prefill
from tandem.errors import ContextTooLongError, EngineError, UnsupportedError
from tandem.types import (
    Finished,
    GenerationRequest,
    PrefillProgress,
    Sampling,
    TextPrompt,
    TokenPrompt,
)

from . import tiny
from .drive import Answered, Reference, assert_same, collect, drain, greedy, run, step_until, submit


def words(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


def has_tokens(request_id: str, count: int = 1) -> Callable[[dict[str, Answered]], bool]:
    return lambda answers: request_id in answers and len(answers[request_id].tokens) >= count


def generated_tokens(engine: Any) -> dict[str, int]:
    """By running request."""
    return {sequence.request_id: sequence.answer.generated for sequence in engine._running}


# ---------------------------------------------------------------------------------------------------------- fair shares


def test_answers_go_on_while_a_long_prompt_is_read(tiny_engine: Callable[..., Any]) -> None:
    """Between two chunks of the prompt, every running answer gets a token."""
    engine = tiny_engine(prefill_chunk=64)
    answers: dict[str, Answered] = {}
    running = [submit(engine, greedy(words(index, 5), 200)) for index in range(3)]
    step_until(engine, lambda seen: all(has_tokens(one)(seen) for one in running), answers)
    long = submit(engine, greedy(words(9, 900), 4))
    steps = 0
    read = 0
    generated = generated_tokens(engine)
    while not has_tokens(long)(answers):
        collect(engine.step(), answers)
        steps += 1
        now = generated_tokens(engine)
        assert {one: now[one] - generated[one] for one in running} == dict.fromkeys(running, 1)
        generated = now
        progress = answers[long].progress if long in answers else []
        if progress:
            # The last chunk's report counts the token that the first decode step will feed.
            assert progress[-1].processed_tokens - read <= 64 + 1
            read = progress[-1].processed_tokens
    assert steps >= 900 // 64
    assert [event.processed_tokens for event in answers[long].progress][-1] == 900
    drain(engine, answers)


def test_the_chunk_limit_holds_whoever_runs(tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    original = Prefill.step

    def counted(self: Prefill, limit: int) -> int:
        counts.append(original(self, limit))
        return counts[-1]

    monkeypatch.setattr(Prefill, "step", counted)
    engine = tiny_engine(prefill_chunk=17)
    counts.clear()
    answers: dict[str, Answered] = {}
    first = submit(engine, greedy(words(1, 100), 200))
    step_until(engine, has_tokens(first), answers)
    second = submit(engine, greedy(words(2, 100), 2))
    step_until(engine, has_tokens(second), answers)
    drain(engine, answers)
    assert max(counts) == 17
    assert sum(counts) == 2 * 99


def test_chunks_are_small_where_the_device_is_slow(tiny_engine: Callable[..., Any]) -> None:
    """A chunk takes no longer than `max_decode_stall` allows, but at least a block."""
    engine = tiny_engine(max_decode_stall=0.5)
    answers: dict[str, Answered] = {}
    submit(engine, greedy(words(1, 3), 100))
    assert engine._chunk_limit() == CPU_PREFILL_CHUNK
    step_until(engine, lambda seen: engine.load_now().decoding == 1, answers)
    for speed, expected in ((1.0, 64), (200.0, 64), (300.0, 128), (1000.0, 256), (1e6, 256)):
        engine._pace.prefill_tps = speed
        assert engine._chunk_limit() == expected
    drain(engine, answers)


def test_the_shortest_prompt_goes_first(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(prefill_chunk=64)
    answers: dict[str, Answered] = {}
    long = submit(engine, greedy(words(1, 900), 2))
    collect(engine.step(), answers)
    engine._pace.prefill_tps = 500.0
    short = submit(engine, greedy(words(2, 20), 2))
    order: list[str] = []
    while engine.has_work:
        outputs = engine.step()
        order += [output.request_id for output in outputs if isinstance(output.events[-1], Finished)]
        collect(outputs, answers)
    assert order == [short, long]


def test_nothing_starves(tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is read although shorter ones never stop coming: what it has waited counts for it."""
    engine = tiny_engine(prefill_chunk=64, max_batch=64)
    clock = itertools.count()
    now = 0.0

    def monotonic() -> float:
        return now + next(clock) * 1e-6

    monkeypatch.setattr("time.monotonic", monotonic)
    answers: dict[str, Answered] = {}
    long = submit(engine, greedy(words(1, 640), 1))
    for number in range(200):
        engine._pace.prefill_tps = 100.0
        submit(engine, greedy(words(number, 64), 1, use_prefix_cache=False))
        collect(engine.step(), answers)
        now += 0.64  # what a chunk takes at that speed
        if has_tokens(long)(answers):
            break
    # It needs 6.4 seconds of work, so whoever comes 6.4 seconds later has no precedence.
    assert number <= 45
    drain(engine, answers)


def test_the_batch_is_bounded(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(max_batch=3)
    ids = [submit(engine, greedy(words(index, 10), 5 + index)) for index in range(8)]
    answers: dict[str, Answered] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        load = engine.load_now()
        assert load.prefilling + load.decoding <= 3
    assert [len(answers[one].tokens) for one in ids] == [5 + index for index in range(8)]


# --------------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_cancelling_at_each_stage(kind: str, tiny_engine: Callable[..., Any], tiny_reference: Any) -> None:
    engine = tiny_engine(kind, max_batch=2, prefill_chunk=16)
    answers: dict[str, Answered] = {}
    stays = submit(engine, greedy(words(1, 40), 30))
    step_until(engine, has_tokens(stays), answers)
    decoding = submit(engine, greedy(words(2, 40), 300))
    step_until(engine, has_tokens(decoding, 3), answers)
    assert engine.load_now().decoding == 2
    assert engine.cancel(decoding)
    assert engine.load_now().decoding == 1
    prefilling = submit(engine, greedy(words(3, 200), 30))
    step_until(engine, lambda seen: bool(seen.get(prefilling) and seen[prefilling].progress), answers)
    waiting = submit(engine, greedy(words(4, 10), 30))
    collect(engine.step(), answers)
    assert (engine.load_now().prefilling, engine.load_now().waiting) == (1, 1)
    seen = {one: len(answers[one].events) for one in (decoding, prefilling)}
    assert engine.cancel(waiting)
    assert engine.cancel(prefilling)
    assert (engine.load_now().prefilling, engine.load_now().waiting) == (0, 0)
    drain(engine, answers)
    # No event after the cancellation, and the neighbour did not notice.
    assert {one: len(answers[one].events) for one in seen} == seen
    assert waiting not in answers
    assert_same(answers[stays].tokens, tiny_reference(kind).generate(words(1, 40), 30))
    for one in (stays, decoding, prefilling, waiting, "never heard of"):
        assert not engine.cancel(one)
    engine.check_idle()
    assert engine.load_now().cache_bytes == 0


def test_cancelling_the_last_one_frees_its_memory(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    answers: dict[str, Answered] = {}
    one = submit(engine, greedy(words(1, 40), 300))
    step_until(engine, has_tokens(one), answers)
    assert engine.load_now().cache_bytes > 0
    assert engine.cancel(one)
    engine.check_idle()
    assert engine.load_now().cache_bytes == 0


def test_a_thousand_cancelled_requests_leave_nothing(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(prefix_cache_bytes=0, prefill_chunk=64, max_batch=8)
    generator = random.Random(0)
    threads = threading.active_count()

    def cancel_many(count: int) -> None:
        alive: list[str] = []
        for number in range(count):
            alive.append(submit(engine, greedy(words(number % 7, generator.choice([1, 3, 30, 90])), 500)))
            for _ in range(generator.randrange(2)):
                engine.step()
            if len(alive) > 4:
                assert engine.cancel(alive.pop(generator.randrange(len(alive))))
        for one in alive:
            assert engine.cancel(one)
        engine.check_idle()
        gc.collect()
        mx.clear_cache()

    cancel_many(50)
    before = mx.get_active_memory()
    cancel_many(1000)
    assert mx.get_active_memory() <= before
    assert threading.active_count() == threads
    assert engine.load_now().cache_bytes == 0
    (answer,) = run(engine, greedy(words(1, 30), 5))
    assert len(answer.tokens) == 5


# ---------------------------------------------------------------------------------------------------------------- ends


def test_max_tokens_and_the_context(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(context_length=50)
    short, long, unbounded = run(engine, greedy(words(1, 10), 1), greedy(words(1, 10), 500), greedy(words(1, 10), None))
    assert [len(one.tokens) for one in (short, long, unbounded)] == [1, 40, 40]
    assert {one.finished.reason for one in (short, long, unbounded)} == {"length"}
    assert run(engine, greedy(words(1, 49), 9))[0].finished.usage.completion_tokens == 1
    with pytest.raises(ContextTooLongError, match="50 tokens"):
        engine.prepare("x", greedy(words(1, 50), 1))
    # A prompt that is only scored needs no room for an answer.
    (scored,) = run(engine, greedy(words(1, 50), 0, prompt_logprobs=0))
    assert len(scored.prompt_scores) == 50
    with pytest.raises(ContextTooLongError):
        engine.prepare("x", greedy(words(1, 51), 0))


def test_an_empty_prompt_begins_a_text(tiny_engine: Callable[..., Any]) -> None:
    empty, begun = run(tiny_engine(), greedy([], 9), greedy([tiny.BOS], 9))
    assert empty.tokens == begun.tokens
    assert empty.accepted.prompt_tokens == 1


def test_the_end_token(tiny_engine: Callable[..., Any]) -> None:
    """Forced by a bias in the middle of an answer; `ignore_eos` goes on."""
    engine = tiny_engine()
    sampling = Sampling(temperature=0.0, logit_bias={tiny.EOS: 1000.0})
    ended, ignored = run(
        engine,
        greedy(words(1, 10), 8, sampling=sampling, ignore_eos=False),
        greedy(words(1, 10), 8, sampling=sampling),
    )
    assert ended.tokens == []
    assert ended.finished.reason == "stop"
    assert ended.finished.stop_sequence is None
    assert ended.finished.usage.completion_tokens == 1
    assert ignored.tokens == [tiny.EOS] * 8
    assert ignored.finished.reason == "length"


def test_a_stop_string_ends_the_answer_at_once(tiny_engine: Callable[..., Any]) -> None:
    """The sequence leaves the batch in the step that completes the stop string, and no part of it is shown."""
    engine = tiny_engine()
    prompt = words(5, 12)
    (whole,) = run(engine, greedy(prompt, 60))
    stop = whole.text[14:19]
    assert stop not in whole.text[:14]
    answers: dict[str, Answered] = {}
    other = submit(engine, greedy(words(6, 12), 60))
    one = submit(engine, greedy(prompt, 60, stop=(stop, "never written")))
    while True:
        outputs = engine.step()
        collect(outputs, answers)
        if one in answers and isinstance(answers[one].events[-1], Finished):
            break
        assert engine.load_now().decoding <= 2
    assert engine.load_now().decoding == 1
    assert len(engine._running._decoder) == 1
    assert answers[one].text == whole.text[: whole.text.index(stop)]
    assert answers[one].finished.reason == "stop"
    assert answers[one].finished.stop_sequence == stop
    assert answers[one].finished.usage.completion_tokens < 60
    drain(engine, answers)
    assert len(answers[other].tokens) == 60


def test_exactly_one_end(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    for answer in run(engine, *(greedy(words(index, 10 + index), index) for index in range(6))):
        assert sum(isinstance(event, Finished) for event in answer.events) == 1
        assert isinstance(answer.events[-1], Finished)


# ------------------------------------------------------------------------------------------------------------ failures


class _Failing:
    """A logits processor that fails after so many tokens."""

    def __init__(self, after: int, error: Exception) -> None:
        self.after = after
        self.error = error

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.after -= 1
        if self.after < 0:
            raise self.error
        return logits


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("out of order"), EngineError.code, "out of order"),
        (UnsupportedError("too complicated"), UnsupportedError.code, "too complicated"),
    ],
)
def test_a_failing_processor_fails_its_request_only(
    after: int,
    error: Exception,
    code: str,
    message: str,
    tiny_engine: Callable[..., Any],
    tiny_reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine()
    prompt = words(3, 20)
    expected = tiny_reference("llama").generate(prompt, 12)

    def processors(sampling: Any, prompt_length: int, vocabulary_size: int, constraint: Any) -> list[Any]:
        return [_Failing(after, error)] if prompt_length == 21 else []

    monkeypatch.setattr(running_module, "make_processors", processors)
    first, broken, last = run(engine, greedy(prompt, 12), greedy([*prompt, 5], 12), greedy(prompt[:19], 12))
    assert_same(first.tokens, expected)
    assert len(last.tokens) == 12
    assert broken.failure.code == code
    assert message in broken.failure.message
    # The tokens that were chosen before the failure did reach their reader.
    assert len(broken.tokens) == after
    assert_same(broken.tokens, tiny_reference("llama").generate([*prompt, 5], after))
    engine.check_idle()


def test_a_processor_that_fails_beyond_the_answer_does_no_harm(
    tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step is computed ahead; what goes wrong there is nobody's token."""
    engine = tiny_engine()
    monkeypatch.setattr(running_module, "make_processors", lambda *_: [_Failing(6, RuntimeError("too far"))])
    (answer,) = run(engine, greedy(words(1, 10), 6))
    assert answer.finished.reason == "length"
    assert len(answer.tokens) == 6


@pytest.mark.parametrize("at", [0, 2])
def test_a_failing_prefill_fails_its_request_only(
    at: int, tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(prefill_chunk=64)
    original = Prefill.step
    bad = words(3, 200)

    def failing(self: Prefill, limit: int) -> int:
        if self.tokens == bad and self.position >= at * 64:
            raise RuntimeError("no such shape")
        return original(self, limit)

    monkeypatch.setattr(Prefill, "step", failing)
    good, broken, other = run(engine, greedy(words(1, 100), 9), greedy(bad, 9), greedy(words(2, 100), 9))
    assert len(good.tokens) == len(other.tokens) == 9
    assert "no such shape" in broken.failure.message
    assert broken.failure.code == EngineError.code
    assert broken.accepted.prompt_tokens == 200
    engine.check_idle()


def test_an_answer_that_cannot_start_fails_its_request_only(
    tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    original = engine._running._decoder.add

    def failing(sequence: int, tokens: list[int], *rest: Any) -> None:
        if len(tokens) == 33:
            raise RuntimeError("no room")
        original(sequence, tokens, *rest)

    monkeypatch.setattr(engine._running._decoder, "add", failing)
    good, broken = run(engine, greedy(words(1, 30), 9), greedy(words(1, 33), 9))
    assert len(good.tokens) == 9
    assert "no room" in broken.failure.message
    engine.check_idle()


def test_an_unreadable_answer_fails_its_request_only(
    tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    good = submit(engine, greedy(words(1, 30), 9))
    prepared = engine.prepare("broken", greedy(words(2, 30), 9))
    monkeypatch.setattr(prepared.answer, "add", lambda *_: (_ for _ in ()).throw(RuntimeError("no such channel")))
    engine.submit(prepared)
    answers = drain(engine)
    assert len(answers[good].tokens) == 9
    assert "no such channel" in answers["broken"].failure.message
    engine.check_idle()


# -------------------------------------------------------------------------------------------------------------- memory


def test_requests_wait_for_memory(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    request = greedy(words(1, 100), 50)
    engine._memory.total = int(1.5 * engine.prepare("probe", request).reserved)
    ids = [submit(engine, request) for _ in range(3)]
    answers: dict[str, Answered] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        load = engine.load_now()
        assert load.prefilling + load.decoding <= 1
    assert all(len(answers[one].tokens) == 50 for one in ids)


def test_a_padded_batch_is_counted_in_full(tiny_engine: Callable[..., Any]) -> None:
    """Beside a long sequence a short one takes as much memory: mlx-lm pads."""
    engine = tiny_engine()
    long, short = greedy(words(1, 1000), 10), greedy(words(2, 10), 10)
    sizes = [engine.prepare("probe", request).reserved for request in (long, short)]
    engine._memory.total = sum(sizes) + sizes[1]
    submit(engine, long)
    submit(engine, short)
    engine.step()
    assert engine.load_now().waiting == 1
    drain(engine)


def test_what_is_kept_makes_room_first(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    run(engine, greedy(words(1, 600), 5))
    kept = engine.load_now().prefix_cache_bytes
    assert kept > 0
    request = greedy(words(2, 300), 5)
    needed = engine.prepare("probe", request).reserved
    engine._memory.total = needed + kept // 2
    one = submit(engine, request)
    answers: dict[str, Answered] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        # While it runs, neither what was kept nor what it adds itself takes the memory it needs.
        assert engine.load_now().prefix_cache_bytes <= kept // 2 or not engine.has_work
    assert len(answers[one].tokens) == 5
    # Afterwards there is room again.
    engine._memory.total = 1 << 30
    run(engine, greedy(words(3, 900), 5))
    assert engine.load_now().prefix_cache_bytes > kept


def test_an_impossible_request_is_refused(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    engine._memory.total = engine._memory.needed(200)
    engine.prepare("fits", greedy(words(1, 150), 50))
    with pytest.raises(ContextTooLongError, match="151 tokens needs") as raised:
        engine.prepare("does not", greedy(words(1, 151), 50))
    assert raised.value.status == 400


@pytest.mark.parametrize("kind", tiny.ALL_KINDS)
def test_sizes_are_what_caches_take(kind: str, tiny_engine: Callable[..., Any]) -> None:
    """What is reserved for a sequence is what its cache holds, give or take mlx-lm's steps of 256 tokens."""
    engine = tiny_engine(kind, prefix_cache_bytes=0)
    answers: dict[str, Answered] = {}
    submit(engine, greedy(words(1, 510), 20))
    step_until(engine, lambda seen: sum(generated_tokens(engine).values()) == 2, answers)
    held = engine.load_now().cache_bytes
    assert engine._memory.needed(500) <= held <= engine._memory.needed(768)
    drain(engine, answers)


def test_windows_and_states_do_not_grow(tiny_engine: Callable[..., Any]) -> None:
    windowed, recurrent = tiny_engine("gemma3")._memory, tiny_engine("mamba2")._memory
    per_token = 2 * 2 * 16 * 4  # keys and values, two heads of 16, float32
    assert windowed.needed(1000) == 2 * per_token * (1000 + tiny.WINDOW)
    assert windowed.sequence.bytes_per_token == 4 * per_token
    assert recurrent.needed(1) == recurrent.needed(1000) > 0
    assert recurrent.sequence.bytes_per_token == 0


# ---------------------------------------------------------------------------------------------------------- statistics


def test_statistics_add_up(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    run(engine, greedy(words(1, 128), 4))
    (cold, warm, partial) = (
        run(engine, greedy(prompt, 12))[0] for prompt in (words(2, 200), words(2, 200), [*words(2, 100), *words(3, 50)])
    )
    for answer, hit, cached in ((cold, "none", 0), (warm, "exact", 199), (partial, "partial", 100)):
        statistics, usage = answer.finished.statistics, answer.finished.usage
        assert answer.accepted.cached_tokens == usage.cached_tokens == statistics.cached_tokens == cached
        assert answer.accepted.prompt_tokens == usage.prompt_tokens == statistics.prompt_tokens
        assert usage.completion_tokens == statistics.generation_tokens == 12
        assert statistics.prefix_cache_hit == hit
        assert 0 <= statistics.queue_seconds <= statistics.ttft_seconds
        assert 0 <= statistics.prefill_seconds <= statistics.ttft_seconds
        assert statistics.generation_tps == pytest.approx(11 / statistics.decode_seconds)
        reading = statistics.ttft_seconds - statistics.queue_seconds
        assert statistics.prompt_tps == pytest.approx((usage.prompt_tokens - cached) / reading)
        assert statistics.peak_memory > 0


def test_progress_ends_at_the_whole_prompt(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(prefill_chunk=64)
    (answer,) = run(engine, greedy(words(1, 200), 2))
    assert answer.progress == [PrefillProgress(count, 200) for count in (64, 128, 192, 200)]
    (again,) = run(engine, greedy([*words(1, 100), *words(2, 100)], 2))
    assert again.accepted.cached_tokens == 100
    assert again.progress == [PrefillProgress(count, 200) for count in (128, 192, 200)]


def test_text_prompts(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine()
    text = "def step(self): 🙂"
    request = GenerationRequest(
        TextPrompt(text), max_tokens=4, logprobs=0, sampling=Sampling(temperature=0.0), echo=True
    )
    (answer,) = run(engine, request)
    tokens = engine._text.encode(text, add_special_tokens=True)
    assert answer.accepted.prompt_tokens == len(tokens)
    same = run(
        engine,
        GenerationRequest(TokenPrompt(tuple(tokens)), max_tokens=4, logprobs=0, sampling=Sampling(temperature=0.0)),
    )[0]
    assert same.tokens == answer.tokens
