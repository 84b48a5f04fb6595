"""Log-probabilities as engines report them, turned into what clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.models.text import TextModel
from tandem.types import TokenLogprob, TopLogprob


class TokenScore(NamedTuple):
    """What an engine says of one token.

    Attributes:
        logprob: natural logarithm of its probability; None for a prompt's first token.
        top: the likeliest tokens with theirs, likeliest first.
    """

    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


def describe_score(text_model: TextModel, token_id: int, score: TokenScore) -> TokenLogprob:
    """The token with its text, exact bytes and alternatives."""
    data = text_model.token_bytes(token_id)
    top = []
    for other, logprob in score.top:
        other_data = text_model.token_bytes(other)
        top.append(TopLogprob(other_data.decode("utf-8", "replace"), other, logprob, list(other_data)))
    return TokenLogprob(data.decode("utf-8", "replace"), token_id, score.logprob, list(data), top)
