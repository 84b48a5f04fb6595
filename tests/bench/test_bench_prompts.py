"""Prompts of a set length that share no beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tandem.bench.prompts import PromptMaker, story
from tandem.errors import UnsupportedError


@pytest.fixture
def maker(tmp_path: Path) -> PromptMaker:
    """Counts bytes: a byte-level tokenizer without merges."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return PromptMaker(tmp_path)


@pytest.mark.parametrize("tokens", [40, 200, 1000])
def test_length(maker: PromptMaker, tokens: int) -> None:
    for label in ("0 1 0", "1 8 7"):
        text = maker.make(label, tokens)
        assert tokens - len(" and") < maker.count(text) <= tokens


def test_the_same_label_makes_the_same_prompt_and_others_differ_at_once(maker: PromptMaker) -> None:
    assert maker.make("1 1 0", 100) == maker.make("1 1 0", 100)
    # A prefix cache works in blocks of tokens; no two prompts may share one.
    beginnings = {maker.make(f"{number} 8 {stream}", 100)[:12] for number in range(5) for stream in range(8)}
    assert len(beginnings) == 40


def test_stories_are_long_enough() -> None:
    assert len(story("x", 500).split(" ")) >= 500


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        PromptMaker(tmp_path)
