"""Tool calls written as JSON objects, reported while they are being written.

`{"name": "f", "arguments": {...}}` in either order of the keys, with `parameters` for `arguments`, arguments as an
object or as JSON text in a string, one object or several, in an array or not. The name is reported as soon as it is
known, then the arguments' own text piece by piece; what was left off at the end is repaired where that is certain.
"""

from __future__ import annotations

import json
import logging
from enum import IntEnum

from tandem.models.call_formats import CallFormat
from tandem.models.output.calls import CallLog, arguments_text, call_piece, new_call_id
from tandem.models.output.json_scan import ValueScanner
from tandem.models.output.matching import partial_suffix
from tandem.models.output.pieces import Kind, Piece

logger = logging.getLogger(__name__)

_SPACE = " \t\n\r"
_NAME_KEYS = frozenset({"name", "function"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CALL_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"id", "type"}


class _State(IntEnum):
    OUTSIDE = 0
    KEY = 1
    KEY_TEXT = 2
    COLON = 3
    VALUE = 4
    NAME = 5
    ARGUMENTS = 6
    ARGUMENTS_TEXT = 7
    OTHER = 8
    COMMA = 9
    LOOSE = 10


_SCANNING = frozenset({_State.KEY_TEXT, _State.NAME, _State.ARGUMENTS, _State.ARGUMENTS_TEXT, _State.OTHER})


class JsonCallReader:
    """One section of JSON calls.

    Args:
        call_format: whose markers; `bare` sections are a single object, and only a known tool's name makes it a call.
        log: the answer's calls.
        opening: the opening marker and the white space before it, given back as text if this turns out to be no call.
    """

    def __init__(self, call_format: CallFormat, log: CallLog, opening: str) -> None:
        self._end = call_format.end
        self._bare = call_format.style == "bare"
        self._log = log
        self._state = _State.OUTSIDE
        self._kept = ""  # the beginning of an end marker, perhaps
        self._raw = opening  # read but not reported
        self._reported = False  # something of this section was reported as a call
        self._scanner = ValueScanner()
        self._begin_object()

    def _begin_object(self) -> None:
        self._key = ""
        self._captured: list[str] = []
        self._name: str | None = None
        self._index: int | None = None
        self._arguments: list[str] = []  # not reported
        self._has_arguments = False
        self._arguments_whole = False

    def push(self, text: str, out: list[Piece]) -> str | None:
        data = self._kept + text
        self._kept = ""
        at, size = 0, len(data)
        while at < size:
            if self._state in _SCANNING:
                stopped = self._scan(data, at, out)
            elif self._state is _State.LOOSE:
                return self._loose(data[at:], out)
            else:
                stopped = self._structure(data, at, out)
            if self._log.is_full:
                self._markup(out)
                return ""
            if stopped < 0:  # not JSON here
                at = -stopped - 1
                marker = self._marker_at(data, at) if at < size else False
                if marker is None:
                    self._kept = data[at:]
                    break
                if marker and self._end_section(out):
                    out.append(Piece(Kind.MARKUP, len(self._end)))
                    return data[at + len(self._end) :]
                rest = self._give_up(data[at:], out)
                if rest is not None:
                    return rest
                at = size
            elif stopped == at and self._state is _State.OUTSIDE and self._bare and self._reported:
                self._markup(out)
                return data[at:]
            else:
                at = stopped
        self._report(out)
        return None

    def finish(self, cut: bool, out: list[Piece]) -> None:
        self._raw += self._kept
        self._kept = ""
        if self._end_section(out, cut):
            return
        if self._index is not None and self._state is not _State.LOOSE:
            logger.warning("tool call %s is incomplete at the end of the answer", self._name)
            self._markup(out)
        else:
            self._release(out)

    # -- reading

    def _scan(self, data: str, at: int, out: list[Piece]) -> int:
        """Read on inside a key or a value."""
        is_arguments = self._state is _State.ARGUMENTS
        stopped = self._scanner.feed(data, at, self._arguments if is_arguments else self._captured)
        self._raw += data[at:stopped]
        if self._scanner.broken:
            return -stopped - 1
        if self._scanner.complete and not self._end_value(out):
            return -stopped - 1
        return stopped

    def _end_value(self, out: list[Piece]) -> bool:
        """A key or a value is complete; False if it makes no sense where it stands."""
        state, text = self._state, "".join(self._captured)
        self._captured.clear()
        self._state = _State.COMMA
        if state is _State.KEY_TEXT:
            self._key = json.loads(text)
            self._state = _State.COLON
            return not self._bare or self._key in _CALL_KEYS
        if state is _State.NAME:
            name = json.loads(text)
            if not name.isprintable() or (self._bare and name not in self._log.known):
                return False
            self._name = name
            self._report(out)
        elif state is _State.ARGUMENTS:
            self._arguments_whole = True
        elif state is _State.ARGUMENTS_TEXT:
            arguments = arguments_text(json.loads(text))
            if arguments is None:
                return False
            self._arguments.append(arguments)
            self._arguments_whole = True
        return True

    def _structure(self, data: str, at: int, out: list[Piece]) -> int:
        """Read one character between keys and values."""
        character = data[at]
        state = self._state
        if character in _SPACE:
            pass
        elif state is _State.OUTSIDE:
            # After a call, separators do no harm, and neither do stray closing brackets before the marker.
            if character == "{":
                self._state = _State.KEY
            elif self._bare and self._reported and character not in ",;":
                return at
            elif not ((character == "[" and not self._bare) or (self._reported and character in ",;]}")):
                return -at - 1
        elif state is _State.KEY:
            if character == '"':
                self._start_scan(_State.KEY_TEXT)
                return at
            if character != "}" or not self._end_object(out):
                return -at - 1
        elif state is _State.COLON:
            if character != ":":
                return -at - 1
            self._state = _State.VALUE
        elif state is _State.VALUE:
            scan = self._value_state(character)
            if scan is None:
                return -at - 1
            self._start_scan(scan)
            return at
        elif character == ",":
            self._state = _State.KEY
        elif character != "}" or not self._end_object(out):
            return -at - 1
        self._raw += character
        if self._state is _State.OUTSIDE and self._reported:
            self._markup(out)
        return at + 1

    def _start_scan(self, state: _State) -> None:
        self._state = state
        self._scanner = ValueScanner()

    def _value_state(self, character: str) -> _State | None:
        if self._key in _NAME_KEYS and self._name is None and character == '"':
            return _State.NAME
        if self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if character == "{":
                return _State.ARGUMENTS
            return _State.ARGUMENTS_TEXT if character in '"n' else None
        return _State.OTHER

    # -- reporting

    def _report(self, out: list[Piece]) -> None:
        """Report what is known and new."""
        if self._name is None:
            return
        arguments = "".join(self._arguments)
        self._arguments.clear()
        if self._index is None:
            self._index = self._log.begin()
            self._reported = True
            out.append(call_piece(len(self._raw), self._index, arguments, self._name, new_call_id()))
        elif arguments:
            out.append(call_piece(len(self._raw), self._index, arguments))
        else:
            return
        self._raw = ""

    def _end_object(self, out: list[Piece]) -> bool:
        """The call is complete; False if it is none."""
        if self._name is None or (self._has_arguments and not self._arguments_whole):
            return False
        if not self._has_arguments:
            self._arguments.append("{}")
        self._report(out)
        self._log.completed += 1
        self._begin_object()
        self._state = _State.OUTSIDE
        return True

    def _end_section(self, out: list[Piece], cut: bool = False) -> bool:
        """The closing marker was read, or the answer is over: complete what can be completed. False if nothing can."""
        if self._state is _State.ARGUMENTS and not cut and self._name is not None:
            closing = self._scanner.closing()
            if closing is not None:
                logger.warning("tool call %s: closing brackets were missing and have been added", self._name)
                self._arguments.append(closing)
                self._arguments_whole = True
        if self._arguments_whole or (self._state is _State.COMMA and not self._has_arguments and not cut):
            self._end_object(out)
        if self._state is not _State.OUTSIDE or not self._reported:
            return False
        self._markup(out)
        return True

    def _marker_at(self, data: str, at: int) -> bool | None:
        """Whether the closing marker stands here; None if that cannot be said yet."""
        if not self._end:
            return False
        if data.startswith(self._end, at):
            return True
        return None if self._end.startswith(data[at:]) else False

    def _give_up(self, rest: str, out: list[Piece]) -> str | None:
        """This is no call, or no longer one. The text goes on as plain text."""
        self._report(out)
        logger.warning("malformed tool call is passed on as text: %.200r", self._raw + rest)
        shown_before = self._reported or self._index is not None
        self._release(out)
        if not shown_before:
            return rest
        # The opening marker is gone already, so the closing one has to go, too.
        self._state = _State.LOOSE
        return self._loose(rest, out) if self._end else rest

    def _loose(self, text: str, out: list[Piece]) -> str | None:
        at = text.find(self._end)
        if at >= 0:
            self._raw += text[:at]
            self._release(out)
            out.append(Piece(Kind.MARKUP, len(self._end)))
            return text[at + len(self._end) :]
        keep = partial_suffix(text, (self._end,))
        self._raw += text[: len(text) - keep]
        self._kept = text[len(text) - keep :]
        self._release(out)
        return None

    def _release(self, out: list[Piece]) -> None:
        if self._raw:
            out.append(Piece(Kind.CONTENT, len(self._raw), self._raw))
            self._raw = ""

    def _markup(self, out: list[Piece]) -> None:
        if self._raw:
            out.append(Piece(Kind.MARKUP, len(self._raw)))
            self._raw = ""
