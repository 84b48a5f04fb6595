"""The results as plain data, and the arithmetic from rounds to figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.bench.environment import Environment
from tandem.bench.plan import BOUNDS, Bound, Plan
from tandem.bench.rounds import Batch


class Series(msgspec.Struct, frozen=True):
    """One figure over the rounds: median, extremes, and the values in the order they were measured."""

    median: float
    low: float
    high: float
    rounds: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Series:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values), list(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Series:
    """Round by round, so that what slows the machine for a while slows both sides of a quotient."""
    return Series.of([upper / lower for upper, lower in zip(numerators, denominators, strict=True)])


class Side(msgspec.Struct, frozen=True):
    """One server's figures in a comparison.

    Attributes:
        tokens_per_second: of all answers together, reading the prompts included.
        decode_tokens_per_second: of one answer, from its first to its last text.
        ttft_ms: median over the answers of a round.
        cpu_ms_per_token: of the server and all of its processes.
    """

    tokens_per_second: Series
    decode_tokens_per_second: Series
    ttft_ms: Series
    cpu_ms_per_token: Series

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Side:
        """Summarise one batch a round."""
        return cls(
            Series.of([batch.tokens_per_second for batch in batches]),
            Series.of([batch.decode_tokens_per_second for batch in batches]),
            Series.of([batch.ttft * 1e3 for batch in batches]),
            Series.of([batch.cpu_ms_per_token for batch in batches]),
        )


class Comparison(msgspec.Struct, frozen=True):
    """Tandem beside mlx-lm with so many answers side by side. `ratio` is Tandem's throughput by mlx-lm's."""

    streams: int
    ratio: Series
    tandem: Side
    mlx_lm: Side

    @classmethod
    def of(cls, streams: int, tandem: Sequence[Batch], mlx_lm: Sequence[Batch]) -> Comparison:
        """Compare batch by batch: the n-th of either side ran one after the other."""
        ratio = ratios([batch.tokens_per_second for batch in tandem], [batch.tokens_per_second for batch in mlx_lm])
        return cls(streams, ratio, Side.of(tandem), Side.of(mlx_lm))


class Delay(msgspec.Struct, frozen=True):
    """Milliseconds to the first text on both sides, and Tandem's by mlx-lm's. `cached` are prompt tokens not read."""

    ratio: Series
    tandem_ms: Series
    mlx_lm_ms: Series
    tandem_cached: list[int]
    mlx_lm_cached: list[int]


class SimLoad(msgspec.Struct, frozen=True):
    """Many answers from the simulated engine. Milliseconds of CPU time a token, by process.

    Attributes:
        offered_tokens_per_second: what the simulated engine was told to generate.
        tokens_per_second: what arrived, start and end of the answers included.
        events_per_token: 1 when every token was an event of its own. Less means that the server fell behind and
            joined tokens, which makes each of them cheaper.
    """

    streams: int
    tokens: int
    offered_tokens_per_second: float
    tokens_per_second: Series
    events_per_token: Series
    server_cpu_ms_per_token: Series
    runner_cpu_ms_per_token: Series
    client_cpu_ms_per_token: Series


class Agreement(msgspec.Struct, frozen=True):
    """Whether both servers did the same work.

    Attributes:
        answers: pairs of answers to the same prompt.
        equal_texts: pairs with the same text to the last character, but for a leading space.
        short: answers of either side that ended before `tokens` tokens.
        cached_tokens: prompt tokens of unique prompts that some prefix cache served, on either side.
    """

    answers: int
    equal_texts: int
    short: int
    cached_tokens: int


class Report(msgspec.Struct, frozen=True):
    """Everything one run found out."""

    plan: Plan
    environment: Environment
    throughput: list[Comparison] = []
    ttft: Delay | None = None
    warm_turn: Delay | None = None
    agreement: Agreement | None = None
    sim: SimLoad | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The headline figures by name."""
        found = {f"throughput_ratio_{comparison.streams}": comparison.ratio.median for comparison in self.throughput}
        if self.ttft is not None:
            found["ttft_ratio"] = self.ttft.ratio.median
        if self.sim is not None:
            found["server_cpu_ms_per_token"] = self.sim.server_cpu_ms_per_token.median
        return found

    @property
    def missed(self) -> dict[str, Bound]:
        """Bounds that a figure missed."""
        figures = self.figures
        return {name: bound for name, bound in BOUNDS.items() if name in figures and not bound.met_by(figures[name])}

    def to_json(self) -> dict[str, Any]:
        """One flat object: the headline figures first, then their bounds, then everything else."""
        figures = self.figures
        held = {name: msgspec.to_builtins(bound) for name, bound in BOUNDS.items() if name in figures}
        passed = {name: name not in self.missed for name in held}
        return {**figures, "bounds": held, "passed": passed, **msgspec.to_builtins(self)}
