"""Log-probabilities as OpenAI writes them, as JSON text: in chats one object a token, in completions four lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.types import Finished, PromptScored, TextDelta, TokenLogprob, TopLogprob

_IMPOSSIBLE = -9999.0
"""OpenAI's stand-in for a probability of zero: JSON has no infinity."""


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> bytes:
    """`tokens` as the members of `logprobs.content`, comma-separated, without brackets."""
    return msgspec.json.encode([_chat_token(token) for token in tokens])[1:-1]


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": _finite(token.logprob or 0.0),
        "bytes": token.bytes,
        "top_logprobs": [
            {"token": top.token, "logprob": _finite(top.logprob), "bytes": top.bytes} for top in token.top
        ],
    }


class CompletionLogprobs:
    """Turns tokens into the lists of a text completion, keeping count of the text's length.

    Tokens that are not UTF-8 by themselves are named `bytes:\\xe2\\x82`, as OpenAI does: otherwise several alternatives
    would share one name, and `top_logprobs`, an object, could hold only one of them.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._answered = 0
        self._echoes = False

    def event(self, event: PromptScored | TextDelta | Finished) -> dict[str, list[Any]] | None:
        """The lists' further members; None when `event` brings none.

        With an echoed prompt they have one member for every token that `usage` counts: scripts that score texts cut the
        answer off by that count. The token that ends an answer has no text; where the engine reports no score for it,
        its score is null.
        """
        if isinstance(event, Finished):
            unseen = event.usage.completion_tokens - self._answered
            if not self._echoes or event.reason != "stop" or event.stop_sequence is not None or unseen != 1:
                return None
            return {"tokens": [""], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [self._offset]}
        if isinstance(event, PromptScored):
            self._echoes = True
        else:
            self._answered += len(event.logprobs)
        return self._lists(event.logprobs) if event.logprobs else None

    def _lists(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            text = self._decoder.decode(bytes(token.bytes)) if token.bytes else token.token
            self._offset += len(text)
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: TokenLogprob) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        # The token itself is always among the alternatives (OpenAI documents up to logprobs + 1 of them).
        for alternative in (*token.top, TopLogprob(token.token, token.token_id, token.logprob, token.bytes)):
            name = _name(alternative)
            logprob = _finite(alternative.logprob)
            # Two ids may have one text: the likelier one stands, or a reader would take a wrong token for the best.
            found[name] = max(logprob, found.get(name, _IMPOSSIBLE))
        return found


def _name(token: TokenLogprob | TopLogprob) -> str:
    if not token.bytes:
        return token.token
    raw = bytes(token.bytes)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
