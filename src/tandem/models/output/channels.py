"""Reasoning, content and tool calls told apart by the markers that models put around them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from tandem.models.call_formats import CallFormat
from tandem.models.output.calls import CallLog, CallReader
from tandem.models.output.json_calls import JsonCallReader
from tandem.models.output.matching import first_marker, partial_suffix
from tandem.models.output.pieces import Kind, Piece
from tandem.models.output.whole_calls import WholeCallReader
from tandem.models.text import ThinkingTags


class _State(IntEnum):
    CONTENT = 0
    REASONING = 1
    CALL = 2


class TagChannels:
    """Markers in the text: `<think>` and its like around reasoning, a call format's markers around tool calls.

    White space next to a marker belongs to the markup: right after an opening or closing reasoning marker, right
    before a closing one, and between content and a call. Markers inside a call's JSON are data.

    Args:
        thinking: the reasoning markers, or None.
        inside_thinking: the answer begins inside the reasoning.
        call_format: how calls are written, or None if no tools were offered.
        tools: the offered tools in OpenAI's form.
        parallel: more than one call is wanted.
        hidden: markers around the content that are left out.
    """

    def __init__(
        self,
        *,
        thinking: ThinkingTags | None = None,
        inside_thinking: bool = False,
        call_format: CallFormat | None = None,
        tools: list[dict[str, Any]] | None = None,
        parallel: bool = True,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self._thinking = thinking
        self._format = call_format
        self._tools = tools or []
        self._log = CallLog((tool["function"]["name"] for tool in self._tools), parallel)
        self._state = _State.REASONING if inside_thinking and thinking is not None else _State.CONTENT
        self._reader: CallReader | None = None
        markers = [thinking.start] if thinking is not None else []
        if call_format is not None and call_format.start:
            markers.append(call_format.start)
        self._content_markers = (*markers, *hidden)
        self._hidden = frozenset(hidden)
        self._bare = call_format is not None and call_format.style == "bare"
        self._kept = ""
        self._skips_space = self._state is _State.REASONING
        self._at_beginning = True
        self.ended = False

    @property
    def completed_calls(self) -> int:
        """Tool calls that are whole."""
        return self._log.completed

    def push(self, text: str, out: list[Piece]) -> None:
        rest: str | None = self._kept + text
        self._kept = ""
        while rest:
            if self.ended:
                return
            if self._state is _State.CONTENT:
                rest = self._content(rest, out)
            elif self._state is _State.REASONING:
                rest = self._reasoning(rest, out)
            else:
                rest = self._call(rest, out)

    def finish(self, cut: bool, out: list[Piece]) -> None:
        kept, self._kept = self._kept, ""
        if self.ended:
            return
        if self._reader is not None:
            self._reader.finish(cut, out)
        elif kept and self._state is _State.CONTENT and self._log.completed and kept.isspace():
            out.append(Piece(Kind.MARKUP, len(kept)))
        elif kept:
            out.append(Piece(Kind.REASONING if self._state is _State.REASONING else Kind.CONTENT, len(kept), kept))

    def _content(self, text: str, out: list[Piece]) -> str | None:
        if self._skips_space:
            text = self._skip_space(text, Kind.MARKUP, out)
            if not text:
                return None
        if self._bare and self._at_beginning:
            stripped = text.lstrip()
            if stripped.startswith("{"):
                self._open_call(text[: len(text) - len(stripped)])
                return stripped
        found = first_marker(text, self._content_markers) if self._content_markers else None
        if found is None:
            keep = self._keep_from(text)
            self._kept = text[keep:]
            self._show(Kind.CONTENT, text[:keep], out)
            return None
        at, marker = found
        before, rest = text[:at], text[at + len(marker) :]
        if self._thinking is not None and marker == self._thinking.start:
            if self._at_beginning and before.isspace():
                out.append(Piece(Kind.MARKUP, len(before)))
            else:
                self._show(Kind.CONTENT, before, out)
            out.append(Piece(Kind.THINKING_MARKUP, len(marker)))
            self._state, self._skips_space = _State.REASONING, True
            return rest
        if marker in self._hidden:
            self._show(Kind.CONTENT, before, out)
            out.append(Piece(Kind.MARKUP, len(marker)))
            return rest
        shown = before.rstrip()
        self._show(Kind.CONTENT, shown, out)
        self._open_call(before[len(shown) :] + marker)
        return rest

    def _keep_from(self, text: str) -> int:
        """Where the end of `text` begins that may turn out to belong to a marker."""
        end = len(text) - partial_suffix(text, self._content_markers)
        if self._format is not None or self._at_beginning:
            shown = len(text[:end].rstrip())
            if self._format is not None or not shown:
                end = shown
        return end

    def _reasoning(self, text: str, out: list[Piece]) -> str | None:
        assert self._thinking is not None
        if self._skips_space:
            text = self._skip_space(text, Kind.THINKING_MARKUP, out)
        marker = self._thinking.end
        at = text.find(marker)
        if at < 0:
            end = len(text[: len(text) - partial_suffix(text, (marker,))].rstrip())
            self._kept = text[end:]
            self._show(Kind.REASONING, text[:end], out)
            return None
        shown = text[:at].rstrip()
        self._show(Kind.REASONING, shown, out)
        out.append(Piece(Kind.THINKING_MARKUP, at - len(shown) + len(marker)))
        self._state, self._skips_space = _State.CONTENT, True
        return text[at + len(marker) :]

    def _open_call(self, opening: str) -> None:
        assert self._format is not None
        self._state = _State.CALL
        if self._format.style == "whole":
            self._reader = WholeCallReader(self._format, self._log, opening, self._tools)
        else:
            self._reader = JsonCallReader(self._format, self._log, opening)

    def _call(self, text: str, out: list[Piece]) -> str | None:
        assert self._reader is not None
        before = self._log.completed
        rest = self._reader.push(text, out)
        if self._log.is_full:
            self.ended = True
            return None
        if rest is None:
            return None
        self._reader = None
        self._state = _State.CONTENT
        # What was no call after all must not be read as one again.
        self._at_beginning = self._at_beginning and self._log.completed > before
        return rest

    def _skip_space(self, text: str, kind: Kind, out: list[Piece]) -> str:
        stripped = text.lstrip()
        if len(stripped) < len(text):
            out.append(Piece(kind, len(text) - len(stripped)))
        if stripped:
            self._skips_space = False
        return stripped

    def _show(self, kind: Kind, text: str, out: list[Piece]) -> None:
        if text:
            out.append(Piece(kind, len(text), text))
            if kind is Kind.CONTENT:
                self._at_beginning = False
