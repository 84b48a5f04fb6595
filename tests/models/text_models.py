"""Small tokenizers for tests, read from disk as any model's is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tandem.models.text import TextModel
from tandem.models.token_table import BYTE_OF_CHARACTER

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_model(
    folder: Path,
    *,
    tokens: Sequence[str] = (),
    special: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    vocabulary_size: int | None = None,
    **config: Any,
) -> TextModel:
    """All 256 bytes as tokens, and what else is asked for: `tokens` as added tokens, `special` as control tokens."""
    vocabulary = {character: index for index, character in enumerate(BYTE_OF_CHARACTER)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return _load(folder, tokenizer, template, eos, vocabulary_size, config)


def sentencepiece_model(folder: Path, words: Sequence[str], *, strips: bool = True) -> TextModel:
    """Words with SentencePiece's space marker, and byte tokens for everything else (Llama 2's kind of vocabulary)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *words]
    # BPE reaches a word through its beginnings, one character at a time.
    beginnings = {word[:end] for word in words for end in range(1, len(word))}
    characters = {character for word in words for character in word}
    vocabulary = {
        piece: index for index, piece in enumerate([*pieces, *sorted((beginnings | characters) - set(words))])
    }
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>")])
    return _load(folder, tokenizer, None, "</s>", None, {})


def _load(
    folder: Path,
    tokenizer: Tokenizer,
    template: str | None,
    eos: str,
    vocabulary_size: int | None,
    config: dict[str, Any],
) -> TextModel:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = {"model_type": "llama", "eos_token_id": tokenizer.token_to_id(eos)}
    if vocabulary_size is not None:
        model["vocab_size"] = vocabulary_size
    (folder / "config.json").write_text(json.dumps(model))
    return TextModel.load(folder)
