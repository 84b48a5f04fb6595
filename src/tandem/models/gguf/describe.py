"""Describe a GGUF file by a card, without converting it."""

from __future__ import annotations

from pathlib import Path

from tandem.models.cards import ModelCard
from tandem.models.folder import card_from_config
from tandem.models.gguf.architectures import plan_tensors, read_config
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.weights import check_readable


def gguf_card(model_id: str, path: Path) -> ModelCard:
    """A card whose storage size is that of the converted weights.

    Raises:
        UnsupportedModelError: the file is not one that can be converted.
        CorruptModelError: the file contradicts itself or is cut short.
    """
    with GgufFile(path) as file:
        config = read_config(file)
        check_readable(file)
        size = sum(target.stored_size for target in plan_tensors(file, config))
        return card_from_config(model_id, config, size, file.metadata.text("tokenizer.chat_template", ""))
