"""Build a fast tokenizer from a GGUF vocabulary, and write it as a Hugging Face folder's tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.errors import UnsupportedModelError
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary

SPACE = "▁"

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "llama-v3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "deepseek-r1-qwen": QWEN2_PATTERN,
    "tekken": TEKKEN_PATTERN,
}
"""Pre-tokenizers that split by one pattern, by `tokenizer.ggml.pre`; the patterns are those models' own."""
GPT2_PATTERN = ("gpt-2", "gpt2")
GPT2_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Models whose text is brought to Unicode's composed form first."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Models that take a word which is a token as that token, whatever its merges would give."""


def write_tokenizer(file: GgufFile, folder: Path) -> Vocabulary:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat templates.

    Raises:
        UnsupportedModelError: a kind of tokenizer that we do not build.
        CorruptModelError: the vocabulary contradicts itself.
    """
    vocabulary = read_vocabulary(file)
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it stands; the named ones rebuild it in their own way.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "bos_token": vocabulary.token(vocabulary.bos_id),
        "eos_token": vocabulary.token(vocabulary.eos_id),
        "unk_token": vocabulary.token(vocabulary.unknown_id),
        "pad_token": vocabulary.token(vocabulary.pad_id),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.metadata.size(f"{file.architecture}.context_length"),
    }
    write_json(folder / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})
    template = file.metadata.text("tokenizer.chat_template", "")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name in file.metadata.texts("tokenizer.chat_templates", []):
        if name.isidentifier():
            extra = file.metadata.text(f"tokenizer.chat_template.{name}")
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(extra, encoding="utf-8")
    return vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, special tokens and BOS included."""
    tokenizer = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentencepiece(vocabulary)
    special, plain = [], []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    template = _template(vocabulary)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    pre = vocabulary.pre
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(vocabulary.tokens)},
            merges=vocabulary.merges,
            ignore_merges=pre in WHOLE_WORDS,
        )
    )
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in PATTERNS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in GPT2_PATTERN:
        tokenizer.pre_tokenizer = whole
    elif pre in GPT2_SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        known = ", ".join(sorted((*PATTERNS, *GPT2_PATTERN, *GPT2_SINGLE_DIGITS)))
        raise UnsupportedModelError(f"The file's pre-tokenizer {pre!r} is not known here; known ones: {known}.")
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(vocabulary.tokens)},
            merges=merges_from_scores(vocabulary),
            unk_token=vocabulary.token(vocabulary.unknown_id),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    escape = normalizers.Replace(" ", SPACE)
    unescape: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
        unescape.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = escape
    tokenizer.decoder = decoders.Sequence(unescape)
    return tokenizer


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Merges that choose as SentencePiece does: always the pair whose union has the highest score.

    Tokens that only stand for themselves (control, byte) are never the result of a merge.
    """
    known = {
        text: vocabulary.scores[token_id]
        for token_id, text in enumerate(vocabulary.tokens)
        if vocabulary.types[token_id] not in (CONTROL, UNKNOWN, 6)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for text, score in known.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in known and right in known:
                ranked.append((-score, -len(left), left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _template(vocabulary: Vocabulary) -> Any | None:
    bos = (vocabulary.token(vocabulary.bos_id), vocabulary.bos_id) if vocabulary.add_bos else (None, None)
    eos = (vocabulary.token(vocabulary.eos_id), vocabulary.eos_id) if vocabulary.add_eos else (None, None)
    used = [pair for pair in (bos, eos) if pair[0] is not None]
    if not used:
        return None
    before = f"{bos[0]} " if bos[0] is not None else ""
    after = f" {eos[0]}" if eos[0] is not None else ""
    second = f"{bos[0]}:1 $B:1" if bos[0] is not None else "$B:1"
    return processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} {second}" + (f" {eos[0]}:1" if eos[0] is not None else ""),
        special_tokens=list(dict.fromkeys(used)),
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
