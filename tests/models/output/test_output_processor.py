"""Tokens in, events out: stop strings, log-probabilities, counts and reasons together."""

from __future__ import annotations

import time
from typing import Any

import pytest
from answers import put_together
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.call_formats import HERMES
from tandem.models.output import OutputProcessor, TokenScore
from tandem.models.prompt import RenderedPrompt
from tandem.models.text import TextModel
from tandem.types import TextDelta, TokenLogprob

PLAIN = RenderedPrompt([])
CHAT = RenderedPrompt([], is_chat=True)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
WITH_TOOLS = RenderedPrompt([], is_chat=True, call_format=HERMES, tools=TOOLS)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
RELAXED = settings(max_examples=100, deadline=None)


def run(
    model: TextModel, prompt: RenderedPrompt, tokens: list[int], reason: str = "stop", **options: Any
) -> tuple[list[Any], OutputProcessor]:
    processor = OutputProcessor(model, prompt, **options)
    events: list[Any] = []
    for index, token in enumerate(tokens):
        if processor.stopped:
            break
        score = TokenScore(-float(index), [(token, -float(index)), (65, -9.0)]) if options.get("logprobs") else None
        events += processor.feed(token, score)
    events += processor.finish(reason)  # type: ignore[arg-type]
    return events, processor


def reported(events: list[Any], reasoning: bool | None = None) -> list[TokenLogprob]:
    return [
        logprob
        for event in events
        if isinstance(event, TextDelta) and reasoning in (None, event.reasoning)
        for logprob in event.logprobs
    ]


@given(
    pieces=st.lists(st.text("ab é😀", max_size=5), max_size=6),
    stop=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
)
@RELAXED
def test_text_and_its_log_probabilities_stay_together(
    smollm2_text: TextModel, pieces: list[str], stop: list[str]
) -> None:
    tokens = [token for piece in pieces for token in smollm2_text.encode(piece)]
    events, processor = run(smollm2_text, PLAIN, tokens, logprobs=True, stop=stop)
    shown = seen = ""
    data = b""
    for event in events:
        shown += event.text
        data += b"".join(bytes(logprob.bytes) for logprob in event.logprobs)
        seen = data.decode("utf-8", "ignore")
        # Never a token before its text, nor a token whose text is still kept back.
        assert shown.startswith(seen)
    full = "".join(pieces)
    if processor.stop_sequence is None:
        assert shown == full
        assert [logprob.token_id for logprob in reported(events)] == tokens
    else:
        at = full.index(processor.stop_sequence)
        assert shown == full[:at]
        assert processor.stop_sequence not in shown
        # Tokens that hold some of the stop string are left out, all before it are there.
        before = [logprob.token_id for logprob in reported(events)]
        assert before == tokens[: len(before)]
        assert shown.startswith(smollm2_text.decode(before))
        assert not shown.startswith(smollm2_text.decode(tokens[: len(before) + 1]))
        assert processor.settled_tokens == len(before)
    assert [logprob.logprob for logprob in reported(events)] == [-float(i) for i in range(len(reported(events)))]


def test_log_probabilities_have_text_bytes_and_alternatives(bytes_model: TextModel) -> None:
    tokens = bytes_model.encode("é")
    events, _ = run(bytes_model, PLAIN, tokens, logprobs=True)
    assert events[0].text == "é"
    first, second = events[0].logprobs
    assert (first.bytes, second.bytes) == ([0xC3], [0xA9])
    assert first.token == "\ufffd"
    assert [(top.token_id, top.logprob) for top in second.top] == [(tokens[1], -1.0), (65, -9.0)]
    assert second.top[1].bytes == list(bytes_model.token_bytes(65))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_unfinished_character_at_the_end(bytes_model: TextModel, reason: str) -> None:
    tokens = bytes_model.encode("a😀")[:3]
    events, processor = run(bytes_model, PLAIN, tokens, reason, logprobs=True, stop=["zz"])
    assert put_together(events).content == "a\ufffd"
    assert len(reported(events)) == 3
    assert processor.reason == reason


def test_stop_string_over_many_tokens(bytes_model: TextModel) -> None:
    for stop in ("STOP", "😀😀", "\n\n"):
        events, processor = run(bytes_model, PLAIN, bytes_model.encode(f"before {stop} after"), stop=["never", stop])
        assert put_together(events).content == "before "
        assert processor.stopped
        assert (processor.stop_sequence, processor.reason) == (stop, "stop")
        assert processor.settled_tokens == len("before ")
        assert processor.feed(65) == []


def test_stop_string_that_never_comes_is_released(bytes_model: TextModel) -> None:
    for reason in ("stop", "length"):
        events, processor = run(bytes_model, PLAIN, bytes_model.encode("a STO"), reason, stop=["STOP"], logprobs=True)
        assert put_together(events).content == "a STO"
        assert len(reported(events)) == 5
        assert (processor.stop_sequence, processor.reason) == (None, reason)


def test_stop_string_on_the_last_allowed_token(bytes_model: TextModel) -> None:
    events, processor = run(bytes_model, PLAIN, bytes_model.encode("a STOP"), "length", stop=["STOP"])
    assert put_together(events).content == "a "
    assert (processor.stop_sequence, processor.reason) == ("STOP", "stop")


def test_stop_string_inside_reasoning_and_calls(bytes_model: TextModel) -> None:
    events, _ = run(bytes_model, CHAT, bytes_model.encode("<think>one two three"), stop=["two"])
    assert put_together(events) == ("one ", "", [])
    text = '<tool_call>{"name": "f", "arguments": {"a": "two"}}'
    events, processor = run(bytes_model, WITH_TOOLS, bytes_model.encode(text), stop=["two"])
    assert put_together(events).named == [("f", '{"a": "')]
    assert processor.reason == "stop"


def test_reasoning_tokens(bytes_model: TextModel) -> None:
    tokens = bytes_model.encode("<think>\nwhy\n</think>\n\nso é")
    events, processor = run(bytes_model, CHAT, tokens, logprobs=True)
    assert put_together(events)[:2] == ("why", "so é")
    # The markers are one token each; the white space inside them is theirs.
    assert processor.reasoning_tokens == 1 + len("\nwhy\n") + 1
    assert processor.settled_tokens == len(tokens)
    assert "".join(logprob.token for logprob in reported(events, True)) == "why"
    assert bytes(b for logprob in reported(events, False) for b in logprob.bytes).decode() == "so é"


def test_begins_inside_reasoning(bytes_model: TextModel) -> None:
    prompt = RenderedPrompt([], is_chat=True, inside_thinking=True)
    events, processor = run(bytes_model, prompt, bytes_model.encode("\nwhy</think>so"))
    assert put_together(events)[:2] == ("why", "so")
    assert processor.reasoning_tokens == len("\nwhy") + 1
    events, processor = run(bytes_model, prompt, bytes_model.encode("why not"), "length")
    assert put_together(events)[:2] == ("why not", "")
    assert processor.reasoning_tokens == 7


def test_tags_fused_with_text_in_one_token(smollm2_text: TextModel) -> None:
    """SmolLM2 has no reasoning tokens: the tags are ordinary text, cut into tokens that hold more than the tag."""
    from tandem.models.output.channels import TagChannels
    from tandem.models.text import ThinkingTags

    processor = OutputProcessor(smollm2_text, CHAT, logprobs=True, stop=["~~~~"])
    processor._channels = TagChannels(thinking=ThinkingTags("<b", "/b>"))
    tokens = smollm2_text.encode("x <b>in</b> y")
    pieces = [smollm2_text.token_text(token) for token in tokens]
    assert any(
        piece not in ("<b", "/b>") and ("<b" in piece or "/b" in piece or piece.endswith("</")) for piece in pieces
    )
    events: list[Any] = []
    for token in tokens:
        events += processor.feed(token, TokenScore(-1.0))
    events += processor.finish("stop")
    assert put_together(events)[:2] == (">in<", "x y")
    # Every token that shows something is reported exactly once.
    ids = [logprob.token_id for logprob in reported(events)]
    assert len(ids) <= len(tokens)
    assert "x" in "".join(logprob.token for logprob in reported(events, False))
    assert "in" in "".join(logprob.token for logprob in reported(events, True))


def test_plain_prompts_get_plain_text(bytes_model: TextModel) -> None:
    text = f"<think>a</think>{CALL}"
    events, processor = run(bytes_model, PLAIN, bytes_model.encode(text))
    assert put_together(events) == ("", text, [])
    assert (processor.reasoning_tokens, processor.reason) == (0, "stop")


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (CALL, "stop", "tool_calls"),
        (f"{CALL} and text", "stop", "tool_calls"),
        (CALL, "length", "length"),
        ("no call", "stop", "stop"),
        ("<tool_call>broken</tool_call>", "stop", "stop"),
        ('<tool_call>{"name": "f", "arguments": {"a', "length", "length"),
        ('<tool_call>{"name": "f", "arguments": {"a', "stop", "stop"),
    ],
)
def test_reasons(bytes_model: TextModel, text: str, reason: str, expected: str) -> None:
    _, processor = run(bytes_model, WITH_TOOLS, bytes_model.encode(text), reason)
    assert processor.reason == expected


def test_one_call_wanted_stops_the_answer(bytes_model: TextModel) -> None:
    prompt = RenderedPrompt([], is_chat=True, call_format=HERMES, tools=TOOLS, parallel_tool_calls=False)
    tokens = bytes_model.encode(f"a {CALL}{CALL} more")
    processor = OutputProcessor(bytes_model, prompt)
    fed = 0
    events: list[Any] = []
    while not processor.stopped:
        events += processor.feed(tokens[fed])
        fed += 1
    events += processor.finish("stop")
    # The call is complete with its last bracket; its closing marker need not be waited for.
    assert fed <= len(f"a {CALL}")
    assert put_together(events).named == [("f", "{}")]
    assert processor.reason == "tool_calls"


def test_markup_tokens_are_not_reported(bytes_model: TextModel) -> None:
    events, _ = run(bytes_model, WITH_TOOLS, bytes_model.encode(f"a {CALL} b"), logprobs=True)
    assert put_together(events).content == "a b"
    assert "".join(logprob.token for logprob in reported(events)) == "a b"


@given(text=st.text("ab<é😀", max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10), data=st.data())
@RELAXED
def test_batches_say_the_same(bytes_model: TextModel, text: str, sizes: list[int], data: st.DataObject) -> None:
    options = data.draw(st.sampled_from([{}, {"stop": ["a<"]}, {"logprobs": True}]))
    tokens = [(token, TokenScore(-1.0)) for token in bytes_model.encode(text)]
    processor = OutputProcessor(bytes_model, CHAT, **options)
    events: list[Any] = []
    at = 0
    for size in sizes:
        batch = processor.feed_many(tokens[at : at + size])
        assert len(batch) <= 1
        events += batch
        at += size
    events += processor.feed_many(tokens[at:])
    events += processor.finish("stop")
    single, _ = run(bytes_model, CHAT, [token for token, _ in tokens], **options)
    assert put_together(events) == put_together(single)
    assert len(reported(events)) == len(reported(single))


def test_an_answer_ends_once(bytes_model: TextModel) -> None:
    _, processor = run(bytes_model, PLAIN, [])
    with pytest.raises(AssertionError):
        processor.finish("stop")


def test_plain_text_costs_microseconds(smollm2_text: TextModel) -> None:
    tokens = smollm2_text.encode("The quick brown fox jumps over the lazy dog. " * 50)
    best = float("inf")
    for _ in range(5):
        processor = OutputProcessor(smollm2_text, CHAT)
        begin = time.perf_counter()
        for token in tokens:
            processor.feed(token)
        best = min(best, (time.perf_counter() - begin) / len(tokens))
    assert best < 10e-6
