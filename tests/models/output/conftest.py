"""Text models and answers for the tests of the output side."""

from __future__ import annotations

import pytest
from text_models import byte_level_model, sentencepiece_model

from tandem.models.store import LocalModel
from tandem.models.text import TextModel


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One token a byte, and reasoning markers."""
    return byte_level_model(tmp_path_factory.mktemp("bytes"), tokens=["<think>", "</think>"], vocabulary_size=300)


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """SentencePiece's kind of vocabulary, dropping the space at the beginning."""
    return sentencepiece_model(tmp_path_factory.mktemp("words"), ["▁", "▁he", "▁hello", "▁world", "lo"])


@pytest.fixture(scope="session")
def smollm2_text(smollm2: LocalModel) -> TextModel:
    """The packaged model's tokenizer."""
    return TextModel.load(smollm2.path, smollm2.card)
