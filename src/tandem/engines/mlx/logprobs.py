"""The chosen token's log-probability and the likeliest alternatives, out of a row of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.models.output.scores import TokenScore


def score(token: int, row: NDArray[np.float32], top: int) -> TokenScore:
    """One token's score.

    Args:
        row: log-probabilities of the whole vocabulary, `[vocabulary]`.
        top: how many alternatives, likeliest first; those that a constraint rules out (minus infinity) are left out.
    """
    best: list[tuple[int, float]] = []
    if top > 0:
        top = min(top, row.size)
        chosen = np.argpartition(row, -top)[-top:]
        chosen = chosen[np.argsort(-row[chosen], kind="stable")]
        best = [(other, float(row[other])) for other in chosen.tolist() if np.isfinite(row[other])]
    return TokenScore(float(row[token]), best)
