"""Tool calls in formats that are read once they are complete, with mlx-lm's parsers."""

from __future__ import annotations

import logging
from typing import Any

from tandem.models.call_formats import CallFormat
from tandem.models.output.calls import CallLog, arguments_text, call_piece, new_call_id
from tandem.models.output.matching import partial_suffix
from tandem.models.output.pieces import Kind, Piece

logger = logging.getLogger(__name__)


class WholeCallReader:
    """One section, kept until its closing marker; a format without one is read at the end of the answer.

    Args:
        call_format: markers and parser.
        log: the answer's calls.
        opening: the opening marker and the white space before it, given back as plain text if there is no call.
        tools: the offered tools in OpenAI's form; parsers convert arguments by their schemas.
    """

    def __init__(self, call_format: CallFormat, log: CallLog, opening: str, tools: list[dict[str, Any]]) -> None:
        self._format = call_format
        self._log = log
        self._opening = opening
        self._tools = tools
        self._text = ""

    def push(self, text: str, out: list[Piece]) -> str | None:
        end = self._format.end
        if not end:
            self._text += text
            return None
        # A marker that began in earlier text ends in this one.
        searched = max(0, len(self._text) - len(end) + 1)
        self._text += text
        at = self._text.find(end, searched)
        if at < 0:
            return None
        body, rest = self._text[:at], self._text[at + len(end) :]
        self._text = ""
        self._read(body, end, out)
        return rest

    def finish(self, cut: bool, out: list[Piece]) -> None:
        end = self._format.end
        body, self._text = self._text, ""
        missing = partial_suffix(body, (end,)) if end else 0
        self._read(body[: len(body) - missing], body[len(body) - missing :], out, complete=not cut)

    def _read(self, body: str, closing: str, out: list[Piece], complete: bool = True) -> None:
        raw = self._opening + body + closing
        length = len(raw)
        calls = self._parse(body)
        if not calls:
            logger.warning("malformed %s tool call is passed on as text: %.200r", self._format.name, raw)
            out.append(Piece(Kind.CONTENT, length, raw))
            return
        for call_id, name, arguments in calls:
            if self._log.is_full:
                break
            out.append(call_piece(length, self._log.begin(), arguments, name, call_id or new_call_id()))
            length = 0
            if complete:
                self._log.completed += 1
        if length:
            out.append(Piece(Kind.MARKUP, length))

    def _parse(self, body: str) -> list[tuple[str | None, str, str]]:
        """Id (where the model gives one), name and arguments of each call; nothing if this is no call."""
        if self._format.parse is None:
            return []
        try:
            parsed = self._format.parse(body, self._tools)
        except Exception as error:  # noqa: BLE001 - the parsers raise whatever malformed text makes them trip over
            logger.warning("%s tool call cannot be parsed: %s: %s", self._format.name, type(error).__name__, error)
            return []
        calls: list[tuple[str | None, str, str]] = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            name = call.get("name") if isinstance(call, dict) else None
            arguments = arguments_text(call.get("arguments")) if isinstance(call, dict) else None
            # Several parsers find a "call" in any text, so only an offered tool's name is one.
            if not isinstance(name, str) or name not in self._log.known or arguments is None:
                return []
            call_id = call.get("id")
            calls.append((call_id if isinstance(call_id, str) and call_id else None, name, arguments))
        return calls
