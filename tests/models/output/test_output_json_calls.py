from __future__ import annotations

import json
import re
from typing import Any

import pytest
from answers import Channels, every_cut
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.call_formats import HERMES, LLAMA
from tandem.models.output.channels import TagChannels
from tandem.models.output.json_scan import ValueScanner
from tandem.models.output.pieces import Piece

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", 'q"', "{", "</tool_call>", ""]), JSON, max_size=3)

WELL_FORMED = [
    ('{"name": "f", "arguments": {"a": {"b": [1, "}"]}}}', '{"a": {"b": [1, "}"]}}'),
    ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
    ('{"name": "f", "parameters": {"a": "\\"}"}}', '{"a": "\\"}"}'),
    ('{"name":"f","arguments":{}}', "{}"),
    ('{"name":"f","arguments":{"a":"\\ud800"}}', '{"a":"\\ud800"}'),
    ('{"name":"f","arguments":"{\\"a\\":\\"\\\\ud800\\"}"}', '{"a": "\\ud800"}'),
    ('{"name": "f"}', "{}"),
    ('{"name": "f", "arguments": null}', "{}"),
    ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ('{"id": 7, "type": "function", "name": "f", "arguments": {"a": 1e-3}}', '{"a": 1e-3}'),
    ('[{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
    ('{"function": "f", "arguments": {"t": "</tool_call>"}}', '{"t": "</tool_call>"}'),
    # Slips that leave no doubt about what is meant.
    ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": [1', '{"a": [1\n]}'),
    ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": "x\ny\t\\d"}}', '{"a": "x\\ny\\t\\\\d"}'),
]


@pytest.mark.parametrize(("body", "arguments"), WELL_FORMED)
def test_one_call_however_it_is_cut(body: str, arguments: str) -> None:
    channels = Channels(HERMES, ["f"])
    for chunks in every_cut(f"<tool_call>\n{body}\n</tool_call>"):
        answer, complete = channels.read(chunks)
        assert answer.named == [("f", arguments)]
        assert answer.content == ""
        assert complete == 1
    json.loads(arguments)


@given(arguments=OBJECTS, other_order=st.booleans(), compact=st.booleans(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_arguments(arguments: dict[str, Any], other_order: bool, compact: bool, data: st.DataObject) -> None:
    call = {"name": "f", "arguments": arguments}
    if other_order:
        call = dict(reversed(call.items()))
    text = json.dumps(call, ensure_ascii=data.draw(st.booleans()), separators=(",", ":") if compact else None)
    text = f"<tool_call>{text}</tool_call>"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    chunks = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    answer, complete = Channels(HERMES, ["f"]).read(chunks)
    assert complete == 1
    assert answer.content == ""
    assert [(name, json.loads(text)) for name, text in answer.named] == [("f", arguments)]


def test_arguments_arrive_while_they_are_written() -> None:
    channels = TagChannels(call_format=HERMES, tools=[])
    seen = []
    for chunk in ['<tool_call>{"na', 'me": "f', '", "argum', 'ents": {"ci', 'ty": "Par', 'is"', "}}"]:
        pieces: list[Piece] = []
        channels.push(chunk, pieces)
        seen.append([(piece.call.name, piece.call.arguments) for piece in pieces if piece.call is not None])
    assert seen == [[], [], [("f", "")], [(None, '{"ci')], [(None, 'ty": "Par')], [(None, 'is"')], [(None, "}")]]


def test_ids_are_openais_and_different() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer, complete = Channels(HERMES, ["f"]).read([call * 3])
    ids = [call_id for call_id, _, _ in answer.calls]
    assert complete == len(set(ids)) == 3
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {"b": 2}}',
        '[{"name": "f", "arguments": {"a": 1}}, {"arguments": {"b": 2}, "name": "g"}]',
        '{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": 2}}',
        '{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g", "arguments": {"b": 2}}',
    ],
)
def test_several_calls(body: str) -> None:
    channels = Channels(HERMES, ["f", "g"])
    for chunks in every_cut(f"a <tool_call>{body}</tool_call> b", most=1):
        answer, complete = channels.read(chunks)
        assert answer.named == [("f", '{"a": 1}'), ("g", '{"b": 2}')]
        assert answer.content == "a b"
        assert complete == 2


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call> rest",
        "<tool_call></tool_call>",
        '<tool_call>{"nam": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>!',
        '<tool_call>{name: "f"}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": [1], "name": "f"}</tool_call>',
        '<tool_call>{"arguments": "not json", "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a" 1}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": tru}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": "\\u12x4"}, "name": "f"}</tool_call>',
        "a < b <tool_cal> <tool_call",
        '<tool_call>{"na',
    ],
)
def test_what_is_no_call_is_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    channels = Channels(HERMES, ["f"])
    for chunks in every_cut(text, most=1):
        answer, complete = channels.read(chunks)
        assert (answer.content, answer.calls, complete) == (text, [], 0)
    if "<tool_call>{" in text and "</tool_call>" in text:
        assert "malformed" in caplog.text


def test_a_call_after_what_is_none() -> None:
    channels = Channels(HERMES, ["f"])
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for chunks in every_cut(f"<tool_call>oops</tool_call>{good}", most=1):
        answer, complete = channels.read(chunks)
        assert answer.content == "<tool_call>oops</tool_call>"
        assert (answer.named, complete) == ([("f", "{}")], 1)


def test_a_call_that_breaks_after_it_was_reported() -> None:
    """Nothing can be taken back: the call stays incomplete, and what follows the break is text."""
    channels = Channels(HERMES, ["f"])
    for chunks in every_cut('<tool_call>{"name": "f", "arguments": {"a": ?}}</tool_call>end', most=1):
        answer, complete = channels.read(chunks)
        assert answer.named == [("f", '{"a": ')]
        assert answer.content == "?}}end"
        assert complete == 0


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "lo', '{"a": "lo', ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1', ""),
        ('<tool_call>{"name": "f", "argum', "", ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', '{"a": 1}', ""),
        ('<tool_call>{"name": "f', None, '<tool_call>{"name": "f'),
    ],
)
def test_cut_by_the_token_limit(text: str, arguments: str | None, content: str) -> None:
    channels = Channels(HERMES, ["f"])
    for chunks in every_cut(text, most=1):
        answer, complete = channels.read(chunks, cut=True)
        assert answer.named == ([] if arguments is None else [("f", arguments)])
        assert answer.content == content
        assert complete == (arguments == '{"a": 1}')


def test_a_model_that_forgets_the_end() -> None:
    answer, complete = Channels(HERMES, ["f"]).read(['<tool_call>{"name": "f", "arguments": {"a": {"b": [1'])
    assert (answer.named, complete) == ([("f", '{"a": {"b": [1]}}')], 1)


# -- the answer itself is the call


@pytest.mark.parametrize("before", ["", "\n", "<|python_tag|>"])
def test_bare_json(before: str) -> None:
    channels = Channels(LLAMA, ["f"])
    for chunks in every_cut(before + '{"name": "f", "parameters": {"a": "1"}}'):
        answer, complete = channels.read(chunks)
        assert (answer.named, answer.content, complete) == ([("f", '{"a": "1"}')], "", 1)


def test_bare_json_several() -> None:
    channels = Channels(LLAMA, ["f", "g"])
    text = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}'
    for chunks in every_cut(text, most=1):
        answer, complete = channels.read(chunks)
        assert (answer.named, answer.content, complete) == ([("f", "{}"), ("g", '{"x": 1}')], "", 2)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "parameters": {}}',
        '{"capital": "Paris"}',
        '{"name": "f", "parameters": {}'[:9],
        'Use {"name": "f", "parameters": {}} for that',
        "{x} is a set",
        " \n",
    ],
)
def test_json_that_is_no_call(text: str) -> None:
    channels = Channels(LLAMA, ["f"])
    for chunks in every_cut(text, most=1):
        answer, complete = channels.read(chunks)
        assert (answer.content, answer.calls, complete) == (text, [], 0)


# -- the scanner


@given(value=JSON, rest=st.sampled_from(["", "}", " ,", "x"]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_scanner_reads_exactly_one_value(value: Any, rest: str, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    # A number's end shows only in what follows.
    follows = rest or "}"
    if follows == "x" and isinstance(value, int | float | bool | None):
        follows = "}"
    whole = text + follows
    cut = data.draw(st.integers(0, len(whole)))
    scanner = ValueScanner()
    out: list[str] = []
    at = scanner.feed(whole[:cut], 0, out)
    if not scanner.complete:
        at = cut + scanner.feed(whole[cut:], 0, out)
    assert scanner.complete
    assert "".join(out) == text
    assert whole[at:].lstrip() == follows.lstrip()


@given(text=st.text('{}[]:,"\\ 1tn\n', max_size=14))
@settings(max_examples=500, deadline=None)
def test_scanner_accepts_what_json_accepts(text: str) -> None:
    scanner = ValueScanner()
    out: list[str] = []
    at = scanner.feed(text + " ", 0, out)
    accepted = scanner.complete and not text[at:].strip()
    try:
        value = json.loads(text)
    except ValueError:
        # What it lets through beyond JSON, it repairs.
        if accepted:
            json.loads("".join(out))
    else:
        assert accepted
        assert json.loads("".join(out)) == value


@given(value=JSON)
@settings(max_examples=300, deadline=None)
def test_closing_completes_the_value(value: Any) -> None:
    whole = json.dumps(value)
    for end in range(len(whole) + 1):
        scanner = ValueScanner()
        out: list[str] = []
        scanner.feed(whole[:end], 0, out)
        closing = scanner.closing()
        if closing is not None:
            json.loads("".join(out) + closing)
