from __future__ import annotations

import pytest
from answers import THINK, Channels, every_cut

from tandem.models.call_formats import HERMES
from tandem.models.output.channels import TagChannels
from tandem.models.output.pieces import Piece

REASONING_TEXTS = [
    # text, begins inside, reasoning, content
    ("<think>\nwhy\n</think>\n\nbecause", False, "why", "because"),
    ("why\n</think>\n\nbecause", True, "why", "because"),
    ("<think></think>x", False, "", "x"),
    ("<think>\n\n</think>\n\nx y", False, "", "x y"),
    ("a < b <thin> </think> b", False, "", "a < b <thin> </think> b"),
    ("pre <think>in</think> post", False, "in", "pre post"),
    ("<think>a\n b</thinker> c</think>d\n", False, "a\n b</thinker> c", "d\n"),
    ("<think>a</think>b<think>c</think>d", False, "ac", "bd"),
    ("\n<think>never closed ", False, "never closed ", ""),
    ("<think>cut in the tag</thi", False, "cut in the tag</thi", ""),
    ("only content<thi", False, "", "only content<thi"),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), REASONING_TEXTS)
def test_reasoning_however_the_text_is_cut(text: str, inside: bool, reasoning: str, content: str) -> None:
    channels = Channels(thinking=THINK, inside_thinking=inside)
    for chunks in every_cut(text):
        answer, _ = channels.read(chunks)
        assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, [])


def shown_after_each(text: str, **options: object) -> list[str]:
    channels = TagChannels(**options)  # type: ignore[arg-type]
    shown = []
    for character in text:
        pieces: list[Piece] = []
        channels.push(character, pieces)
        shown.append("".join(piece.text for piece in pieces))
    return shown


def test_only_what_may_become_markup_is_kept_back() -> None:
    assert shown_after_each("ab <t x", thinking=THINK) == ["a", "b", " ", "", "", "<t ", "x"]
    # White space before a call is markup, so with tools it waits, too.
    assert shown_after_each("ab <t x", thinking=THINK, call_format=HERMES) == ["a", "b", "", "", "", " <t", " x"]
    assert shown_after_each("a </th b", thinking=THINK, inside_thinking=True) == [
        "a",
        "",
        "",
        "",
        "",
        "",
        " </th",
        " b",
    ]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"<think>\nhm <tool_call> hm</think>\n{CALL}", "hm <tool_call> hm", "", 1),
        (f"Let me see.\n\n{CALL}\n", "", "Let me see.", 1),
        (f"a {CALL}\n{CALL} b\n", "", "a b", 2),
        (f"{CALL}<think>x</think>{CALL}y", "x", "y", 2),
        ("no call <tool_calls> at all  ", "", "no call <tool_calls> at all  ", 0),
    ],
)
def test_reasoning_content_and_calls(text: str, reasoning: str, content: str, calls: int) -> None:
    channels = Channels(HERMES, ["f"], thinking=THINK)
    for chunks in every_cut(text, most=1):
        answer, complete = channels.read(chunks)
        assert (answer.reasoning, answer.content) == (reasoning, content)
        assert answer.named == [("f", '{"a": 1}')] * calls
        assert complete == calls


def test_markup_means_nothing_without_tools() -> None:
    answer, _ = Channels(thinking=THINK).read([f"x {CALL}"])
    assert answer.content == f"x {CALL}"
    assert not answer.calls


def test_only_one_call_wanted() -> None:
    channels = Channels(HERMES, ["f"], parallel=False)
    for chunks in every_cut(f"first {CALL} then {CALL} end", most=1):
        answer, complete = channels.read(chunks)
        assert answer.named == [("f", '{"a": 1}')]
        assert answer.content == "first"
        assert complete == 1


def test_markers_around_the_content_are_left_out() -> None:
    channels = Channels(thinking=THINK, hidden=("<|open|>", "<|close|>"))
    for chunks in every_cut("<think>a</think>\n<|open|>b <|op<|close|>\n"):
        answer, _ = channels.read(chunks)
        assert (answer.reasoning, answer.content) == ("a", "b <|op\n")
