"""One prompt on its way into a cache, a chunk at a time."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tandem.engines.mlx.cache_kinds import kind_of, leaves, straighten
from tandem.engines.mlx.logprobs import score
from tandem.engines.mlx.prefix_cache import BLOCK_TOKENS
from tandem.models.output.scores import TokenScore

SCORED_CHUNK = 128
"""Prompt tokens per step when every position's logits are wanted: each takes a vocabulary's worth of memory."""


def chunk_end(position: int, total: int, limit: int) -> int:
    """Where the next chunk ends: at most `limit` tokens on, on a block boundary where one is in reach.

    Block boundaries depend on the position in the prompt alone. So the same prompt is cut in the same places whether
    its beginning came from the prefix cache or not.
    """
    end = min(total, position + limit)
    if end < total:
        aligned = end - end % BLOCK_TOKENS
        if aligned > position:
            end = aligned
    return end


class Prefill:
    """Feeds `tokens[:-1]` to a model; the last token is left for the first decode step.

    Args:
        cache: holds the first `position` tokens already.
        alternatives: how many to report for each prompt token; None scores nothing.

    Attributes:
        scores: one for each prompt token, if they are wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: list[int],
        cache: list[Any],
        position: int,
        *,
        alternatives: int | None = None,
    ) -> None:
        self.tokens = tokens
        self.cache = cache
        self.position = position
        self.scores: list[TokenScore] = [TokenScore(None)] if alternatives is not None else []
        self._model = model
        self._alternatives = alternatives

    @property
    def total(self) -> int:
        """Tokens to have in the cache."""
        return len(self.tokens) - 1

    @property
    def done(self) -> bool:
        """Whether they are all there."""
        return self.position >= self.total

    def step(self, limit: int) -> int:
        """Process the next chunk of at most `limit` tokens.

        Returns:
            How many tokens it had.
        """
        if self._alternatives is not None:
            limit = min(limit, SCORED_CHUNK)
        end = chunk_end(self.position, self.total, limit)
        chunk = mx.array(self.tokens[self.position : end], mx.uint32)[None]
        logits = self._model(chunk, cache=self.cache)
        if self._alternatives is not None:
            self._keep_scores(logits[0], end, self._alternatives)
        processed = end - self.position
        if processed == 1:
            # So that a cache looks the same whether it was computed here, handed over, or kept for a while.
            for leaf in leaves(self.cache):
                if kind_of(leaf) == "window":
                    straighten(leaf)
        mx.eval([leaf.state for leaf in leaves(self.cache)])
        self.position = end
        return processed

    def _keep_scores(self, logits: mx.array, end: int, top: int) -> None:
        logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.float32)
        rows = np.array(logprobs)
        for row, token in zip(rows, self.tokens[self.position + 1 : end + 1], strict=True):
            self.scores.append(score(token, row, top))
