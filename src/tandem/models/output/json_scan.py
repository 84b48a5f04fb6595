"""Reading one JSON value from text that arrives in pieces, handing its text on as it comes."""

from __future__ import annotations

import json
import re
from enum import IntEnum

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_WORD_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSER = {"{": "}", "[": "]"}


class _Mode(IntEnum):
    VALUE = 0
    FIRST_ITEM = 1
    FIRST_KEY = 2
    NEXT_KEY = 3
    COLON = 4
    AFTER = 5
    STRING = 6
    ESCAPE = 7
    UNICODE = 8
    WORD = 9


class ValueScanner:
    """Checks one JSON value character by character.

    Two slips that models make are put right on the way: control characters inside strings are escaped, and so is a
    backslash before a character that needs none.

    Attributes:
        complete: the value has ended.
        broken: the next character cannot follow; `feed` stopped before it.
    """

    __slots__ = ("_hex_left", "_is_key", "_mode", "_stack", "_word", "broken", "complete")

    def __init__(self) -> None:
        self._mode = _Mode.VALUE
        self._stack: list[str] = []
        self._is_key = False
        self._hex_left = 0
        self._word = ""
        self.complete = False
        self.broken = False

    def feed(self, data: str, at: int, out: list[str]) -> int:
        """Read from `data[at:]` and append the value's text to `out`; returns where reading stopped."""
        start = at
        size = len(data)
        while at < size and not self.complete and not self.broken:
            mode = self._mode
            if mode is _Mode.STRING:
                if run := _STRING_RUN.match(data, at):
                    at = run.end()
                    continue
                character = data[at]
                if character == '"':
                    self._end_string()
                elif character == "\\":
                    self._mode = _Mode.ESCAPE
                else:
                    out.append(data[start:at])
                    out.append(json.dumps(character)[1:-1])
                    start = at + 1
                at += 1
            elif mode is _Mode.ESCAPE:
                if data[at] in _ESCAPES:
                    self._mode = _Mode.STRING
                    at += 1
                elif data[at] == "u":
                    self._mode, self._hex_left = _Mode.UNICODE, 4
                    at += 1
                else:
                    # The backslash was meant literally.
                    out.append(data[start:at])
                    out.append("\\")
                    start = at
                    self._mode = _Mode.STRING
            elif mode is _Mode.UNICODE:
                if data[at] not in _HEX:
                    self.broken = True
                    break
                self._hex_left -= 1
                if not self._hex_left:
                    self._mode = _Mode.STRING
                at += 1
            elif mode is _Mode.WORD:
                if run := _WORD_RUN.match(data, at):
                    self._word += run.group()
                    at = run.end()
                elif self._word_is_valid():
                    self._end_value()
                else:
                    self.broken = True
            elif space := _SPACE.match(data, at):
                at = space.end()
            elif self._punctuation(data[at]):
                at += 1
            else:
                self.broken = True
        out.append(data[start:at])
        return at

    def closing(self) -> str | None:
        """What is missing at the end of a value that was left off between two of its parts, or None inside one."""
        if self._mode in (_Mode.AFTER, _Mode.FIRST_ITEM, _Mode.FIRST_KEY) or (
            self._mode is _Mode.WORD and self._word_is_valid()
        ):
            return "".join(_CLOSER[opened] for opened in reversed(self._stack))
        return None

    def _punctuation(self, character: str) -> bool:
        """One character between strings, numbers and literals; False if it cannot stand here."""
        mode = self._mode
        if mode is _Mode.AFTER:
            if character == ",":
                self._mode = _Mode.NEXT_KEY if self._stack[-1] == "{" else _Mode.VALUE
                return True
            return self._close(character)
        if mode is _Mode.COLON:
            self._mode = _Mode.VALUE
            return character == ":"
        if mode in (_Mode.FIRST_KEY, _Mode.NEXT_KEY):
            if character == '"':
                self._mode, self._is_key = _Mode.STRING, True
                return True
            return mode is _Mode.FIRST_KEY and self._close(character)
        if character == '"':
            self._mode, self._is_key = _Mode.STRING, False
        elif character == "{":
            self._stack.append("{")
            self._mode = _Mode.FIRST_KEY
        elif character == "[":
            self._stack.append("[")
            self._mode = _Mode.FIRST_ITEM
        elif character in "-0123456789tfn":
            self._mode, self._word = _Mode.WORD, character
        else:
            return mode is _Mode.FIRST_ITEM and self._close(character)
        return True

    def _close(self, character: str) -> bool:
        if character != _CLOSER[self._stack[-1]]:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_string(self) -> None:
        if self._is_key:
            self._mode = _Mode.COLON
            self._is_key = False
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._mode = _Mode.AFTER
        self.complete = not self._stack

    def _word_is_valid(self) -> bool:
        return self._word in _LITERALS or _NUMBER.fullmatch(self._word) is not None
