"""The simulated model's text side: bytes in, words out.

A token is one byte (ids 0 to 255), the end of an answer (256), or a word with a space before it (from 257). Prompts are
encoded as bytes, so that any text is a prompt of a predictable length; answers are words, so that they look like text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.models.text import TextModel
from tandem.models.token_table import TokenTable

EOS = 256
FIRST_WORD = 257
_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
_CODAS = ("", "n", "r", "s", "l", "m", "t", "x")
WORDS = tuple(" " + onset + vowel + coda for onset in _ONSETS for vowel in _VOWELS for coda in _CODAS)
VOCABULARY = FIRST_WORD + len(WORDS)


class SimText(TextModel):
    """A `TextModel` without a tokenizer behind it, and without the seconds that importing one takes."""

    def __init__(self) -> None:
        pieces = [bytes([value]) for value in range(256)] + [b""] + [word.encode() for word in WORDS]
        texts = [piece.decode() if value < 128 or value >= EOS else None for value, piece in enumerate(pieces)]
        self.tokenizer = None
        self.card = None
        self.vocabulary_size = VOCABULARY
        self.table = TokenTable(pieces, texts, strips_first_space=False, composable=True)
        self.eos_ids = frozenset({EOS})
        self.bos_id = None
        self.special_ids = self.eos_ids
        self.thinking = None
        self.has_chat_template = True
        self.renders_in_python = True
        self.template = None
        self.call_format = None
        self.accepts_system = True
        self.output_format = "tags"

    @property
    def token_count(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Iterable[int]) -> str:
        return b"".join(self.token_bytes(token) for token in token_ids).decode("utf-8", "replace")

    def apply_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        turns = [f"<{message['role']}>{message.get('content') or ''}</{message['role']}>\n" for message in messages]
        return "".join(turns) + ("<assistant>" if variables.get("add_generation_prompt") else "")
