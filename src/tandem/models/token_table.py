"""What each token of a vocabulary stands for: its exact bytes, and its text where those bytes are whole characters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# The printable stand-ins that byte-level BPE vocabularies use for the 256 byte values: printable Latin-1 characters
# stand for themselves, the other bytes for the code points from 256 on, in order (GPT-2's published encoding).
_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])


def _byte_of_character() -> dict[str, int]:
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    table = {chr(256 + index): byte for index, byte in enumerate(others)}
    table.update({chr(byte): byte for byte in _PRINTABLE})
    return table


BYTE_OF_CHARACTER = _byte_of_character()


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The vocabulary as bytes and text, indexed by token id.

    Attributes:
        data: each token's bytes. Ids without a token (a padded vocabulary) have none.
        texts: each token's text, or None where its bytes are only part of a character.
        strips_first_space: decoding drops one space at the very beginning (SentencePiece's dummy prefix).
        composable: the text of a sequence is the text of its tokens' bytes put together. False for decoders that
            look at neighbouring tokens; then `data` and `texts` describe each token on its own.
    """

    data: list[bytes]
    texts: list[str | None]
    strips_first_space: bool
    composable: bool


def build_token_table(tokenizer: Any, size: int) -> TokenTable:
    """Read the table out of a Hugging Face tokenizer; `size` ids at least, so that padding ids are covered."""
    count = max(size, len(tokenizer))
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    rule = _decoding_rule(tokenizer)
    if rule is None:
        data = [tokenizer.decode([token_id]).encode() for token_id in range(len(tokenizer))]
    elif rule.byte_level:
        data = [_byte_level(token) for token in tokens]
    else:
        data = [_byte_fallback(token, rule.space) for token in tokens]
    data.extend([b""] * (count - len(data)))
    return TokenTable(
        data=data,
        texts=[_text(piece) for piece in data],
        strips_first_space=rule is not None and rule.strips_first_space,
        composable=rule is not None,
    )


@dataclass(frozen=True, slots=True)
class _DecodingRule:
    byte_level: bool
    space: str
    strips_first_space: bool


def _decoding_rule(tokenizer: Any) -> _DecodingRule | None:
    """How the tokenizer turns tokens into text (`decoder` in tokenizer.json), if one token at a time is enough."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    description = json.loads(decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    kinds = {step["type"] for step in steps}
    strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
    if kinds == {"ByteLevel"}:
        return _DecodingRule(byte_level=True, space="", strips_first_space=False)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "Replace" in kinds:
        replace = [step for step in steps if step["type"] == "Replace"]
        if len(replace) == 1 and replace[0]["content"] == " " and "String" in replace[0]["pattern"]:
            return _DecodingRule(byte_level=False, space=replace[0]["pattern"]["String"], strips_first_space=strips)
        return None
    if "Metaspace" in kinds and kinds <= {"Metaspace", "ByteFallback", "Fuse"}:
        step = next(step for step in steps if step["type"] == "Metaspace")
        strips = step.get("prepend_scheme", "always") != "never"
        return _DecodingRule(byte_level=False, space=step["replacement"], strips_first_space=strips)
    return None


def _byte_level(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # Added tokens are stored as they read.
        return token.encode()


def _byte_fallback(token: str | None, space: str) -> bytes:
    if token is None:
        return b""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(space, " ").encode()


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
