from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tandem.models.output.matching import first_marker, partial_suffix
from tandem.models.output.stop import StopStrings

SMALL = st.text("ab<", max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first at which a stop string is complete; of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(chunks=st.lists(SMALL, max_size=8), stops=STOPS)
@example(chunks=["abc"], stops=["abcd", "bc"])
@example(chunks=["t4", " t125", " t186"], stops=["125 t186"])
def test_same_as_the_reference_however_the_text_is_cut(chunks: list[str], stops: list[str]) -> None:
    text = "".join(chunks)
    wanted, matched = reference(text, stops)
    stop = StopStrings(stops)
    shown = ""
    for chunk in chunks:
        shown += stop.push(chunk)
        # Nothing is ever shown that has to be taken back.
        assert wanted.startswith(shown)
    assert stop.matched == matched
    if matched is None:
        shown += stop.finish()
    assert shown == wanted
    if matched is not None:
        assert stop.push("more") == ""


@given(chunks=st.lists(SMALL, max_size=8), stops=STOPS)
def test_only_what_may_become_a_stop_string_is_kept_back(chunks: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    text = shown = ""
    for chunk in chunks:
        text += chunk
        shown += stop.push(chunk)
        if stop.matched is None:
            kept = text[len(shown) :]
            assert not kept or any(candidate.startswith(kept) for candidate in stops)


def test_no_stop_strings() -> None:
    stop = StopStrings(["", ""])
    assert stop.push("abc") == "abc"
    assert stop.finish() == ""


@given(text=SMALL, markers=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3))
def test_partial_suffix_is_the_longest(text: str, markers: list[str]) -> None:
    sizes = [
        size
        for marker in markers
        for size in range(1, len(marker))
        if size <= len(text) and marker.startswith(text[len(text) - size :])
    ]
    assert partial_suffix(text, markers) == max(sizes, default=0)


def test_first_marker_prefers_the_earliest_then_the_longest() -> None:
    assert first_marker("xx<tool_call>", ["<think>", "<tool"]) == (2, "<tool")
    assert first_marker("x<tools>", ["<tool", "<tools>"]) == (1, "<tools>")
    assert first_marker("nothing", ["<think>"]) is None
