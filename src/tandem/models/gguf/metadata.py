"""A GGUF file's key/value pairs, taken out with the type they should have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tandem.errors import CorruptModelError


class Metadata(dict[str, Any]):
    """Values by key. Every getter takes a default for a missing key; without one, the key must be there.

    Raises (every getter):
        CorruptModelError: the key is missing, or its value is of another type or out of range.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._take(key, default)
        if isinstance(value, str):
            return value
        raise self._refusal(key, value, "a string")

    def size(self, key: str, default: int | None = None) -> int:
        """An integer above 0."""
        value = self._take(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self._refusal(key, value, "an integer above 0")

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._take(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self._refusal(key, value, "a finite number")

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._take(key, default)
        if isinstance(value, bool):
            return value
        raise self._refusal(key, value, "true or false")

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of strings."""
        value = self._take(key, default)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise self._refusal(key, value, "a list of strings")

    def numbers(self, key: str, default: list[int] | None = None) -> list[Any]:
        """A list of numbers."""
        value = self._take(key, default)
        if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
            return value
        raise self._refusal(key, value, "a list of numbers")

    def token(self, key: str, vocabulary_size: int) -> int | None:
        """A token id, None where the key is missing."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and 0 <= value < vocabulary_size):
            return value
        raise self._refusal(key, value, "the id of a token")

    def _take(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CorruptModelError(f"{self.path} lacks the metadata key {key!r}.")
        return value

    def _refusal(self, key: str, value: Any, wanted: str) -> CorruptModelError:
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]
        return CorruptModelError(f"{self.path}: {key} should be {wanted} and is {shown}.")
