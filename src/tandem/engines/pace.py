"""How fast this engine is right now, and how much of a prompt a step may therefore read."""

from __future__ import annotations

from tandem.placement.handoff import Here
from tandem.placement.rates import RateTable

SMALLEST_CHUNK = 64
"""Below this, reading the weights for each chunk costs more than the chunk: a CPU loses a third of its speed at 16."""
FIRST_GUESS_TPS = 100.0
MOST_PATIENCE = 4.0
"""A prefill step may be this many times the allowed stall long when so many more requests wait than run."""


class Pace:
    """Measured speeds.

    Args:
        chunk: prompt tokens per step while no answer runs.
        most_stall: seconds that a prefill step may delay running answers.

    Attributes:
        rates: prefill by length of the chunk, for decisions about hand-offs.
        prefill_tps, decode_tps: smoothed tokens per second, of one prompt and of all answers together.
        decode_seconds: smoothed, of a step.
    """

    def __init__(self, chunk: int, most_stall: float) -> None:
        self.chunk = chunk
        self.rates = RateTable()
        self.prefill_tps = FIRST_GUESS_TPS
        self.decode_tps = 0.0
        self._most_stall = most_stall
        self.decode_seconds = 0.0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A chunk was read."""
        if tokens >= SMALLEST_CHUNK:
            self.prefill_tps += 0.3 * (tokens / seconds - self.prefill_tps)
            self.rates.observe(tokens, seconds)

    def decoded(self, tokens: int, seconds: float) -> None:
        """A decode step brought so many tokens."""
        if seconds > 0:
            self.decode_tps += 0.1 * (tokens / seconds - self.decode_tps)
            self.decode_seconds += 0.1 * (seconds - self.decode_seconds)

    def stepped(self, read: int, answering: int, seconds: float) -> None:
        """A step read so many tokens of prompts and wrote one of each of `answering` answers, at the same time."""
        if read == 0:
            self.decoded(answering, seconds)
            return
        own = seconds - (self.decode_seconds if answering else 0.0)
        self.prefilled(read, max(own, seconds / 2))

    def chunk_limit(self, running: int, waiting: int) -> int:
        """Tokens that the next prefill step may read beside `running` answers, while `waiting` prompts wait."""
        if not running:
            return self.chunk
        # A pause delays those who run and serves those who wait; the more of these, the longer it may be.
        patience = min(MOST_PATIENCE, max(1.0, waiting / running))
        affordable = int(self._most_stall * patience * self.prefill_tps)
        power = 1 << max(0, affordable.bit_length() - 1)
        return min(self.chunk, max(SMALLEST_CHUNK, power))

    def seconds(self, tokens: int) -> float:
        """What reading so many tokens takes; 0 as long as nobody knows."""
        return self.rates.seconds(tokens) if self.rates.known else 0.0

    def here(self, before: list[int], running: int, waiting: int, *, shared: bool) -> Here:
        """This node as the decision about a hand-off sees it.

        Args:
            before: tokens that each prompt lacks that will be read first.
            shared: peers' prompts take every second step.
        """
        slowdown = 2.0 if shared else 1.0
        if running:
            # A decode step for each chunk.
            slowdown += self.decode_seconds * self.prefill_tps / self.chunk_limit(running, waiting)
        return Here(self.rates, sum(map(self.seconds, before)) * slowdown, slowdown)
