"""Token ids to text, one at a time, with characters that span tokens kept back until they are whole."""

from __future__ import annotations

import codecs

from tandem.models.text import TextModel

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer.

    All text put together equals `TextModel.decode` of all tokens. (One difference is deliberate: where a SentencePiece
    vocabulary's byte tokens are no valid UTF-8, U+FFFD stands for the invalid bytes only, not for their neighbours.)

    Args:
        text_model: whose tokens.
        continues: the answer goes on with the prompt's own text, so a SentencePiece vocabulary's space at its very
            beginning is real and stays.
    """

    __slots__ = ("_at_beginning", "_data", "_decoder", "_texts", "pending")

    def __init__(self, text_model: TextModel, continues: bool = False) -> None:
        table = text_model.table
        self._texts = table.texts
        self._data = table.data
        self._decoder = _DECODER("replace")
        self._at_beginning = table.strips_first_space and not continues
        #: Bytes of an unfinished character are kept back.
        self.pending = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often empty in the middle of a character."""
        text = self._texts[token_id] if 0 <= token_id < len(self._texts) else ""
        if text is None or self.pending:
            text = self._decoder.decode(self._data[token_id] if 0 <= token_id < len(self._data) else b"")
            self.pending = bool(self._decoder.getstate()[0])
        if self._at_beginning and text:
            self._at_beginning = False
            return text[1:] if text[0] == " " else text
        return text

    def finish(self) -> str:
        """U+FFFD for an unfinished character at the end, if there is one."""
        text = self._decoder.decode(b"", final=True)
        self.pending = False
        return text


class WholeDetokenizer:
    """The same for the rare tokenizers whose decoder looks at neighbouring tokens: decodes line by line anew."""

    __slots__ = ("_ids", "_shown", "_text_model", "pending")

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        self._ids: list[int] = []
        self._shown = ""
        self.pending = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""
        self._ids.append(token_id)
        text = self._text_model.decode(self._ids)
        self.pending = text.endswith("\ufffd")
        certain = text.rstrip("\ufffd")
        if not certain.startswith(self._shown) or len(certain) <= len(self._shown):
            return ""
        new = certain[len(self._shown) :]
        self._shown = certain
        return new

    def finish(self) -> str:
        """What is left."""
        self.pending = False
        return self._text_model.decode(self._ids)[len(self._shown) :]


def detokenizer_for(text_model: TextModel, continues: bool = False) -> Detokenizer | WholeDetokenizer:
    """The fast one wherever the vocabulary allows it."""
    if text_model.table.composable:
        return Detokenizer(text_model, continues)
    return WholeDetokenizer(text_model)
