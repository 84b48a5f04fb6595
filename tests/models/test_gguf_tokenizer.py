"""Tokenizers built from GGUF vocabularies: every pre-tokenizer against llama.cpp, SentencePiece against itself."""

from __future__ import annotations

import dataclasses
import io
import json
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tiny_gguf as tiny
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import CorruptModelError, UnsupportedModelError
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.tokenizer import COMPOSED, GPT2_PATTERN, GPT2_SINGLE_DIGITS, PATTERNS, build_tokenizer
from tandem.models.gguf.vocabulary import Vocabulary, read_vocabulary

GOLDEN = Path(__file__).parent / "golden"
TEXTS: list[str] = json.loads((GOLDEN / "texts.json").read_text())
PRE_TOKENIZERS = json.loads((GOLDEN / "pre_tokenizers.json").read_text())
NAMES = sorted(set(PRE_TOKENIZERS) - {"reader"})
SAME_AS_ANOTHER = {"gpt2", "llama3", "llama-v3"}


def test_every_pre_tokenizer_has_golden_values() -> None:
    assert {*PATTERNS, *GPT2_PATTERN, *GPT2_SINGLE_DIGITS} - SAME_AS_ANOTHER == set(NAMES)


@pytest.mark.real_model
@pytest.mark.parametrize("pre", NAMES)
def test_pre_tokenizers_split_as_llama_cpp_does(smollm2_gguf: Path, pre: str) -> None:
    with GgufFile(smollm2_gguf) as file:
        vocabulary = read_vocabulary(file)
    tokenizer = build_tokenizer(dataclasses.replace(vocabulary, pre=pre))
    for text, expected in zip(TEXTS, PRE_TOKENIZERS[pre], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


def test_composing_models_compose() -> None:
    tokens, merges, types = tiny.byte_level_vocabulary()
    vocabulary = byte_level(tokens, merges, types)
    for pre in COMPOSED:
        tokenizer = build_tokenizer(dataclasses.replace(vocabulary, pre=pre))
        assert tokenizer.encode("e\u0301").ids == tokenizer.encode(unicodedata.normalize("NFC", "e\u0301")).ids
    assert len(build_tokenizer(vocabulary).encode("e\u0301").ids) == 3


def byte_level(tokens: list[str], merges: list[str], types: list[int]) -> Vocabulary:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    end = tokens.index("<|im_end|>")
    return Vocabulary(
        "gpt2", "gpt-2", tokens, types, [], pairs, 270, end, None, None, (end,), False, False, False
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ SentencePiece

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs",
    "Sphinx of black quartz, judge my vow! 12345 67890",
    "naïve café, 你好 世界, emoji 😀 and  double  spaces",
    "def f(x): return x + 1  # code\n\ttab",
] * 20


def train(**options: object) -> tuple[sentencepiece.SentencePieceProcessor, Vocabulary]:
    """A small SentencePiece model, and the vocabulary that a GGUF file of it would hold."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        user_defined_symbols=["<table>", "\n\n"],
        allow_whitespace_only_pieces=True,
        **options,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, types, scores = [], [], []
    for index in range(processor.get_piece_size()):
        tokens.append(processor.id_to_piece(index))
        scores.append(processor.get_score(index))
        if processor.is_unknown(index):
            kind = 2
        elif processor.is_control(index):
            kind = 3
        elif processor.is_byte(index):
            kind = 6
        else:
            kind = 4 if tokens[-1] in ("<table>", "\n\n") else 1
        types.append(kind)
    vocabulary = Vocabulary(
        "llama", "", tokens, types, scores, [], 1, 2, 0, None, (2,), True, False,
        bool(options.get("add_dummy_prefix", True)),
    )  # fmt: skip
    return processor, vocabulary


@pytest.fixture(scope="module", params=[True, False], ids=["space-prefix", "no-prefix"])
def trained(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, Vocabulary]:
    return train(add_dummy_prefix=request.param)


def comparable(text: str) -> bool:
    # SentencePiece takes NUL for an end, and its encode() recognises no control token in the text.
    return text != "" and "\0" not in text and "<s>" not in text


def test_sentencepiece_vocabularies_encode_as_sentencepiece_does(
    trained: tuple[sentencepiece.SentencePieceProcessor, Vocabulary],
) -> None:
    processor, vocabulary = trained
    tokenizer = build_tokenizer(vocabulary)
    compared = 0
    for text in [*TEXTS, *CORPUS[:5], "plain <table> text" if not vocabulary.space_prefix else "plain"]:
        if not comparable(text) or (vocabulary.space_prefix and "\n\n" in text):
            continue  # a tokenizer.json puts the prefix after every user-defined symbol as well
        assert tokenizer.encode(text).ids == [1, *processor.encode(text)], text
        compared += 1
    assert compared > 55


@given(text=st.text(alphabet=st.sampled_from("abcdefgh tox12 \t\né你😀"), min_size=1, max_size=40))
def test_sentencepiece_agrees_on_any_text(text: str) -> None:
    processor, vocabulary = PLAIN
    assert build_tokenizer_once(vocabulary).encode(text, add_special_tokens=False).ids == processor.encode(text)


def test_sentencepiece_text_comes_back(trained: tuple[sentencepiece.SentencePieceProcessor, Vocabulary]) -> None:
    _, vocabulary = trained
    tokenizer = build_tokenizer(vocabulary)
    for text in CORPUS[:5]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


PLAIN = train(add_dummy_prefix=False)
_BUILT = build_tokenizer(PLAIN[1])


def build_tokenizer_once(vocabulary: Vocabulary):  # type: ignore[no-untyped-def]
    assert vocabulary is PLAIN[1]
    return _BUILT


# ----------------------------------------------------------------------------------------------------------- refusals


def file_with(tmp_path: Path, **changes: object) -> GgufFile:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.weights("llama"))
    file = GgufFile(path)
    file.metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    return file


def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with (
        file_with(tmp_path, tokenizer__ggml__model="bert") as file,
        pytest.raises(UnsupportedModelError, match="'bert'"),
    ):
        read_vocabulary(file)


def test_lists_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with file_with(tmp_path, tokenizer__ggml__token_type=[1]) as file, pytest.raises(CorruptModelError, match="differ"):
        read_vocabulary(file)


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with (
        file_with(tmp_path, tokenizer__ggml__eos_token_id=10_000) as file,
        pytest.raises(CorruptModelError, match="10000"),
    ):
        read_vocabulary(file)


def test_a_broken_merge_is_refused(tmp_path: Path) -> None:
    with file_with(tmp_path, tokenizer__ggml__merges=["he"]) as file, pytest.raises(CorruptModelError, match="'he'"):
        read_vocabulary(file)


def test_bos_and_eos_are_put_around_the_text(tmp_path: Path) -> None:
    tokens, merges, types = tiny.byte_level_vocabulary()
    plain = byte_level(tokens, merges, types)
    hello = build_tokenizer(plain).encode("hello").ids
    for add_bos in (False, True):
        for add_eos in (False, True):
            tokenizer = build_tokenizer(dataclasses.replace(plain, add_bos=add_bos, add_eos=add_eos))
            expected = [plain.bos_id] * add_bos + hello + [plain.eos_id] * add_eos
            assert tokenizer.encode("hello").ids == expected
            assert tokenizer.encode("hello", add_special_tokens=False).ids == hello
