"""Prompts to verify with: of exact lengths, varied, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

_PASSAGES = (
    "The lighthouse stood at the end of a narrow spit of land, and every evening its keeper climbed the stairs. ",
    "Water boils at 100 degrees at sea level, but on a mountain of 3,000 metres 90 degrees are enough. ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(min(left, right))\n",
    "Q: Which is heavier, a kilogram of feathers or a kilogram of lead?\nA: Neither; both are one kilogram.\n",
    "| name | age | city |\n|---|---|---|\n| Ada | 36 | London |\n| Grace | 85 | Arlington |\n",
    "Die Brücke über den Fluss wurde im Jahre 1877 gebaut und zweimal erneuert. ",
    "Il était une fois, dans un village près de la mer, une vieille horloge qui ne sonnait jamais. ",
    "東京は日本の首都です。春には桜が咲きます。",
    "SELECT name, count(*) FROM readings WHERE taken_at > '2024-01-01' GROUP BY name ORDER BY 2 DESC;\n",
    '{"id": 17, "tags": ["north", "east"], "position": {"x": 0.25, "y": -4.5}, "note": null}\n',
    "To whom it may concern: the parcel arrived on Tuesday, wet through, and without its lid. 🙂 ",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, ",
)


class PromptSource:
    """Draws token ids.

    No two prompts of a source begin with the same token while the vocabulary lasts, so that a prefix cache knows
    nothing of a prompt unless it is meant to. Prompts are texts and random ids in turns.

    Args:
        encode: text to token ids.
        ids: tokens that may be in a prompt.
    """

    def __init__(self, encode: Callable[[str], list[int]], ids: Collection[int], seed: int) -> None:
        self._chance = random.Random(seed)
        self._encode = encode
        self._allowed = frozenset(ids)
        self._ids = sorted(self._allowed)
        self._openings: list[int] = []
        self._drawn = 0

    def prompt(self, length: int) -> list[int]:
        """A prompt of exactly `length` tokens."""
        return [self._opening(), *self.words(length - 1)] if length else []

    def words(self, length: int) -> list[int]:
        """Exactly `length` tokens that continue some prompt."""
        self._drawn += 1
        return self._text(length) if self._drawn % 2 else self._chance.choices(self._ids, k=length)

    def _opening(self) -> int:
        if not self._openings:
            self._openings = self._chance.sample(self._ids, len(self._ids))
        return self._openings.pop()

    def _text(self, length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            passage = "".join(self._chance.sample(_PASSAGES, len(_PASSAGES)))
            tokens.extend(token for token in self._encode(passage) if token in self._allowed)
        return tokens[:length]
