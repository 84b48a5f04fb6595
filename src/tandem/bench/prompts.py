"""Prompts that no server has seen before, of a set number of tokens.

Each begins with words of its own, so that no prefix cache helps; all have the same length, so that a server which pads
its prompts to one length loses nothing by it.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from tandem.errors import UnsupportedError

_NAMES = ("Anna", "Peter", "Maria", "John", "Clara", "Thomas", "Helen", "David", "Laura", "Martin", "Alice", "George")
_PLACES = ("garden", "station", "market", "forest", "harbor", "library", "village", "river", "castle", "kitchen")
_THINGS = ("letter", "map", "lamp", "book", "key", "coat", "clock", "basket", "photograph", "coin", "mirror", "bell")
_VERBS = ("found", "carried", "described", "painted", "lost", "bought", "repaired", "remembered", "hid", "sold")
_TIMES = ("morning", "evening", "summer", "winter", "night", "year", "week", "spring", "afternoon")


class PromptMaker:
    """Makes prompts for one model.

    Args:
        folder: the model's folder; its `tokenizer.json` counts.

    Raises:
        UnsupportedError: the folder has no `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedError(f"{folder} has no tokenizer.json, which the bench counts tokens with.")
        self._tokenizer = Tokenizer.from_file(str(path))

    def count(self, text: str) -> int:
        """Tokens of `text`, special ones that the tokenizer adds included."""
        return len(self._tokenizer.encode(text).ids)

    def make(self, label: str, tokens: int) -> str:
        """A story's beginning of `tokens` tokens; the same label makes the same text.

        Cut words may leave it a token short with some tokenizers; the servers' own counts are what is reported.
        """
        words = story(label, tokens).split(" ")
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(" ".join(words[:middle])) <= tokens:
                low = middle
            else:
                high = middle - 1
        text = " ".join(words[:low])
        while self.count(text + " and") <= tokens:
            text += " and"
        return text

    def token_ids(self, label: str, tokens: int) -> list[int]:
        """Exactly `tokens` token ids of a story's beginning; the same label makes the same ids."""
        words = tokens
        while len(ids := self._tokenizer.encode(story(label, words)).ids) < tokens:
            words *= 2
        found: list[int] = ids[:tokens]
        return found


def story(label: str, words: int) -> str:
    """At least `words` words of prose, drawn from `label`."""
    draw = random.Random(label)
    sentences: list[str] = []
    length = 0
    while length < words:
        sentence = (
            f"{draw.choice(_NAMES)} {draw.choice(_VERBS)} the {draw.choice(_THINGS)} of {draw.choice(_NAMES)} "
            f"in the {draw.choice(_PLACES)} that {draw.choice(_TIMES)}, and {draw.choice(_NAMES)} "
            f"{draw.choice(_VERBS)} a {draw.choice(_THINGS)} near the {draw.choice(_PLACES)}."
        )
        sentences.append(sentence)
        length += sentence.count(" ") + 1
    number = draw.randrange(100, 1000)
    return f"{number} {label}: " + " ".join(sentences)
