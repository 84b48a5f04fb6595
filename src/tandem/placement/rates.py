"""How fast something has been, learnt from what it did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SMOOTHING = 0.3
"""Weight of the newest observation: a machine's speed drifts with heat and company, single runs are noisy."""


@dataclass(slots=True)
class RateTable:
    """Seconds that a prompt of n tokens takes, from observed pairs.

    Attention makes long prompts slower per token than short ones, so observations are kept by length, one bucket for
    each power of two; between buckets the rate is interpolated over the logarithm of the length, outside of them the
    nearest one counts.
    """

    _rates: dict[int, float] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return bool(self._rates)

    def observe(self, tokens: int, seconds: float) -> None:
        """`tokens` took `seconds`. Empty and immeasurably short work teaches nothing."""
        if tokens <= 0 or seconds <= 0:
            return
        bucket = tokens.bit_length()
        rate = tokens / seconds
        known = self._rates.get(bucket)
        self._rates[bucket] = rate if known is None else known + SMOOTHING * (rate - known)

    def rate(self, tokens: int) -> float:
        """Tokens per second for a prompt of that length.

        Raises:
            ValueError: nothing was observed yet.
        """
        rates = self._rates.copy()  # another thread may be observing
        if not rates:
            raise ValueError("no rate was observed yet")
        place = math.log2(max(1, tokens)) + 0.5
        below = max((bucket for bucket in rates if bucket <= place), default=None)
        above = min((bucket for bucket in rates if bucket > place), default=None)
        if below is None or above is None:
            nearest = below if below is not None else above
            assert nearest is not None
            return rates[nearest]
        share = (place - below) / (above - below)
        return rates[below] * (1 - share) + rates[above] * share

    def seconds(self, tokens: int) -> float:
        """Seconds for that many tokens; 0 for none.

        Raises:
            ValueError: nothing was observed yet.
        """
        return tokens / self.rate(tokens) if tokens > 0 else 0.0
