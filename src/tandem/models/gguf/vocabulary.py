"""The tokenizer that a GGUF file describes, as plain data.

Keys and defaults: the GGUF specification (`tokenizer.ggml.*`) and llama.cpp's vocabulary loader.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import CorruptModelError, UnsupportedModelError
from tandem.models.gguf.reader import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types, from the specification."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer even where the file names another one as its end of sequence."""

BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Byte-level pre-tokenizers whose models expect a BOS unless the file says otherwise."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and how to use them.

    Attributes:
        model: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
        pre: name of the pre-tokenizer, byte-level only.
        tokens, types: by id.
        scores: by id; SentencePiece only, else empty.
        merges: pairs in order of rank; byte-level only, else empty.
        end_ids: tokens that end an answer; the file's own end of sequence comes first.
        space_prefix: SentencePiece puts a space before the text.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    pad_id: int | None
    end_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    space_prefix: bool

    def token(self, token_id: int | None) -> str | None:
        """The token's text, None for None."""
        return None if token_id is None else self.tokens[token_id]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The tokenizer's data.

    Raises:
        UnsupportedModelError: a kind of tokenizer that we do not build.
        CorruptModelError: lists of different lengths, ids out of range.
    """
    model = file.metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{file.path.name} has a {model!r} tokenizer; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are read."
        )
    byte_level = model == "gpt2"
    pre = file.metadata.text("tokenizer.ggml.pre", "") if byte_level else ""
    tokens = file.metadata.texts("tokenizer.ggml.tokens")
    types: list[int] = file.metadata.numbers("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    scores: list[float] = [] if byte_level else file.metadata.numbers("tokenizer.ggml.scores")
    if len(types) != len(tokens) or (not byte_level and len(scores) != len(tokens)):
        raise CorruptModelError(f"{file.path}: tokens, token types and scores differ in number.")
    merges = [_pair(file, merge) for merge in file.metadata.texts("tokenizer.ggml.merges")] if byte_level else []

    def named(key: str) -> int | None:
        return file.metadata.token(f"tokenizer.ggml.{key}_token_id", len(tokens))

    known = set(tokens)
    for left, right in merges:
        if not known.issuperset((left, right, left + right)):
            raise CorruptModelError(f"{file.path}: {left!r} and {right!r} merge to something that is not a token.")
    eos = named("eos")
    ends = [token_id for token_id in (eos, named("eot"), named("eom")) if token_id is not None]
    ends += [token_id for token_id, text in enumerate(tokens) if types[token_id] == CONTROL and text in END_OF_TURN]
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        bos_id=named("bos"),
        eos_id=eos,
        unknown_id=named("unknown"),
        pad_id=named("padding"),
        end_ids=tuple(dict.fromkeys(ends)),
        add_bos=file.metadata.flag("tokenizer.ggml.add_bos_token", not byte_level or pre in BOS_BY_DEFAULT),
        add_eos=file.metadata.flag("tokenizer.ggml.add_eos_token", False),
        space_prefix=not byte_level and file.metadata.flag("tokenizer.ggml.add_space_prefix", True),
    )


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    # A space never occurs inside a byte-level token, but the left half may be the escaped space itself.
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise CorruptModelError(f"{file.path}: {merge!r} is not a merge of two tokens.")
    return left, right
