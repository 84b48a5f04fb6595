from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.output.detokenize import Detokenizer, WholeDetokenizer, detokenizer_for
from tandem.models.text import TextModel

TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé€😀 \n�")), max_size=12)
SAME_FIXTURES = settings(max_examples=150, deadline=None)


def text_of(detokenizer: Detokenizer | WholeDetokenizer, tokens: list[int]) -> str:
    return "".join([*(detokenizer.push(token) for token in tokens), detokenizer.finish()])


@given(text=TEXT)
@SAME_FIXTURES
def test_characters_that_span_tokens(bytes_model: TextModel, text: str) -> None:
    tokens = bytes_model.encode(text)
    detokenizer = Detokenizer(bytes_model)
    shown = ""
    for token in tokens:
        shown += detokenizer.push(token)
        # No character is shown before all of its bytes are there, and none stands in for it.
        assert text.startswith(shown)
    assert not detokenizer.pending
    assert shown + detokenizer.finish() == text == bytes_model.decode(tokens)


@given(pieces=st.lists(TEXT, max_size=5))
@SAME_FIXTURES
def test_real_vocabulary_cut_anywhere(smollm2_text: TextModel, pieces: list[str]) -> None:
    tokens = [token for piece in pieces for token in smollm2_text.encode(piece)]
    assert text_of(Detokenizer(smollm2_text), tokens) == smollm2_text.decode(tokens)


def test_real_vocabulary_gives_the_text_back(smollm2_text: TextModel) -> None:
    text = "naïve 東京 😀👍🏽 \t\n  x = {'a': 1}"
    tokens = [token for character in text for token in smollm2_text.encode(character)]
    assert text_of(Detokenizer(smollm2_text), tokens) == text


@given(tokens=st.lists(st.integers(0, 49151), max_size=12))
@SAME_FIXTURES
def test_any_tokens_give_the_tokenizers_own_text(smollm2_text: TextModel, tokens: list[int]) -> None:
    assert text_of(Detokenizer(smollm2_text), tokens) == smollm2_text.decode(tokens)


@given(tokens=st.lists(st.integers(0, 259), max_size=10))
@SAME_FIXTURES
def test_any_bytes_give_the_tokenizers_own_text(bytes_model: TextModel, tokens: list[int]) -> None:
    assert text_of(Detokenizer(bytes_model), tokens) == bytes_model.decode(tokens)


@given(tokens=st.lists(st.integers(0, 259), max_size=10))
@SAME_FIXTURES
def test_decoding_everything_anew_gives_the_same(bytes_model: TextModel, tokens: list[int]) -> None:
    assert text_of(WholeDetokenizer(bytes_model), tokens) == bytes_model.decode(tokens)


def test_unfinished_character_at_the_end_is_one_replacement(bytes_model: TextModel) -> None:
    tokens = bytes_model.encode("ab😀")[:-1]
    detokenizer = Detokenizer(bytes_model)
    assert [detokenizer.push(token) for token in tokens] == ["a", "b", "", "", ""]
    assert detokenizer.pending
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_padding_ids_are_nothing(bytes_model: TextModel) -> None:
    assert bytes_model.vocabulary_size == 300
    assert text_of(Detokenizer(bytes_model), [*bytes_model.encode("a"), 299, 5000, *bytes_model.encode("b")]) == "ab"
    assert bytes_model.token_bytes(299) == bytes_model.token_bytes(5000) == bytes_model.token_bytes(-1) == b""


@given(text=st.text("helowrd é😀 ", max_size=14))
@SAME_FIXTURES
def test_sentencepiece(words_model: TextModel, text: str) -> None:
    tokens = words_model.encode(text)
    assert text_of(detokenizer_for(words_model), tokens) == words_model.decode(tokens) == text


def test_sentencepiece_space_at_the_beginning(words_model: TextModel) -> None:
    tokens = words_model.encode("hello world")
    assert words_model.tokenizer.convert_ids_to_tokens(tokens) == ["▁hello", "▁world"]
    assert text_of(Detokenizer(words_model), tokens) == "hello world"
    # After a prompt that stops in the middle of a sentence, the space is the answer's own.
    assert text_of(Detokenizer(words_model, continues=True), tokens[1:]) == " world"


def test_sentencepiece_bytes(words_model: TextModel) -> None:
    tokens = words_model.tokenizer.convert_tokens_to_ids(["▁he", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "lo"])
    assert b"".join(words_model.token_bytes(token) for token in tokens) == " he😀lo".encode()
    assert text_of(Detokenizer(words_model), tokens) == words_model.decode(tokens) == "he😀lo"


def test_bytes_of_every_token(smollm2_text: TextModel) -> None:
    table = smollm2_text.table
    assert len(table.data) == len(table.texts) == smollm2_text.vocabulary_size == 49152
    for token in range(0, smollm2_text.token_count, 7):
        assert table.data[token].decode("utf-8", "replace") == smollm2_text.decode([token])
    assert smollm2_text.token_bytes(smollm2_text.encode("<|im_end|>")[0]) == b"<|im_end|>"
