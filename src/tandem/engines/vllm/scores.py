"""vLLM's log-probabilities as ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.models.output.scores import TokenScore


def score(token: int, entries: Mapping[int, Any], top: int) -> TokenScore:
    """One token's score.

    Args:
        entries: vLLM's `Logprob`s by token: the token's own and the likeliest.
        top: how many alternatives, likeliest first; those that a constraint rules out are left out.
    """
    ranked = sorted(
        ((entry.rank, other, entry.logprob) for other, entry in entries.items() if entry.rank and entry.rank <= top)
    )
    best = [(other, float(logprob)) for _, other, logprob in ranked if math.isfinite(logprob)]
    return TokenScore(float(entries[token].logprob), best[:top])


def prompt_scores(tokens: list[int], entries: Iterable[Mapping[int, Any] | None] | None, top: int) -> list[TokenScore]:
    """The prompt's scores: one for each token; none if `entries` is None."""
    if entries is None:
        return []
    return [
        TokenScore(None) if one is None else score(token, one, top) for token, one in zip(tokens, entries, strict=True)
    ]
