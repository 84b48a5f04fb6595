"""Finding markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def partial_suffix(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of `markers` begins, without being complete.

    So much of `text` must be kept back until more of it is known.
    """
    size = len(text)
    longest = 0
    for marker in markers:
        first = marker[0]
        # The earliest candidate is the longest one.
        at = text.find(first, max(0, size - len(marker) + 1))
        while at >= 0 and size - at > longest:
            if marker.startswith(text[at:]):
                longest = size - at
                break
            at = text.find(first, at + 1)
    return longest


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of `markers` begins in `text`, and which; of several at the same place the longest."""
    found: tuple[int, str] | None = None
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (found is None or at < found[0] or (at == found[0] and len(marker) > len(found[1]))):
            found = (at, marker)
    return found
