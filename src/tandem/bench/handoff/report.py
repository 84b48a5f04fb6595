"""The hand-off bench's results as plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.bench.environment import Environment
from tandem.bench.handoff.plan import BOUNDS, HandoffPlan
from tandem.bench.plan import Bound
from tandem.bench.report import Series


class Throughput(msgspec.Struct, frozen=True):
    """Bytes per second over loopback into fresh memory, by plain socket in the same round.

    Attributes:
        payload_bytes: of each transfer.
        bytes_per_second: of `plane`, `socket` and `peer`, and of the first two over TLS 1.3 (`plane_tls`, ...).
    """

    payload_bytes: int
    socket_ratio: Series
    socket_ratio_tls: Series
    peer_protocol_ratio: Series
    bytes_per_second: dict[str, Series]


class LinkResult(msgspec.Struct, frozen=True):
    """Hand-offs over a link of one speed. Times in seconds.

    Attributes:
        relative: the transfer's seconds as a multiple of the prefill's, as planned; over a cable, as it was.
        link_bytes_per_second: the link's rate.
        ttft: of the hand-off.
        prefill: the peer's own computing time in that hand-off.
        transfer: payload bytes by the link's rate.
        ttft_over_bound: `ttft / max(prefill, transfer)`.
        exposed: of the transfer, what computing did not hide.
        overlap_efficiency: (serial - ttft) / (serial - bound), where serial is prefill + transfer. 1 is a perfect
            overlap, 0 is none.
        link_efficiency: transfer / ttft, which is the payload by what the link could have carried meanwhile.
    """

    relative: float
    link_bytes_per_second: Series
    ttft: Series
    prefill: Series
    transfer: Series
    ttft_over_bound: Series
    exposed: Series
    overlap_efficiency: Series
    link_efficiency: Series


class FirstToken(msgspec.Struct, frozen=True):
    """Time to the first token.

    Attributes:
        ttft_over_bound: over throttled links, where transfer and prefill take equally long; over a cable, of computed
            prompts.
        links: over a cable, first of computed prompts, then of replayed ones.
    """

    payload_bytes: int
    ttft_over_bound: Series
    links: list[LinkResult]


class TokenGaps(msgspec.Struct, frozen=True):
    """Seconds between tokens of running answers, while a prompt arrives and while none does.

    Attributes:
        itl_ratio: mean gap while receiving by mean gap otherwise, in the same round.
        p95_ratio: the same of the 95th percentiles.
        mean_joining: mean gap from then to the new answer's first token, which joins the batch.
        receiving_seconds: from the long prompt's request to the end of its commit.
        receiving_rate: payload bytes by those seconds.
    """

    payload_bytes: int
    itl_ratio: Series
    p95_ratio: Series
    mean_receiving: Series
    mean_joining: Series
    mean_otherwise: Series
    p95_receiving: Series
    p95_otherwise: Series
    longest_receiving: Series
    receiving_seconds: Series
    receiving_rate: Series


class PeakMemory(msgspec.Struct, frozen=True):
    """The decode process's resident memory during a hand-off, above what it was before, in bytes and by KV bytes.

    Attributes:
        peak_over_kv: until the cache is committed.
        first_token_over_kv: until the first token is decoded.
        allocator_cache_bytes: buffers that MLX keeps for reuse when the cache is committed. They are resident, so they
            are part of the peak.
        method: `VmHWM` of the kernel, or `sampled`.
    """

    kv_bytes: int
    peak_over_kv: Series
    first_token_over_kv: Series
    baseline_bytes: Series
    peak_bytes: Series
    allocator_cache_bytes: Series
    method: str


class HandoffReport(msgspec.Struct, frozen=True):
    """Everything one run found out."""

    plan: HandoffPlan
    environment: Environment
    throughput: Throughput | None = None
    ttft: FirstToken | None = None
    itl: TokenGaps | None = None
    memory: PeakMemory | None = None
    link: FirstToken | None = None

    @property
    def series(self) -> dict[str, Series]:
        """The headline figures by name."""
        found: dict[str, Series] = {}
        if self.throughput is not None:
            for name in ("socket_ratio", "socket_ratio_tls", "peer_protocol_ratio"):
                found[name] = getattr(self.throughput, name)
        if self.ttft is not None:
            found["ttft_over_bound"] = self.ttft.ttft_over_bound
        if self.itl is not None:
            found["itl_ratio"] = self.itl.itl_ratio
        if self.memory is not None:
            found["peak_over_kv"] = self.memory.peak_over_kv
        if self.link is not None:
            found["link_ttft_over_bound"] = self.link.ttft_over_bound
        return found

    @property
    def missed(self) -> dict[str, Bound]:
        """Bounds that a figure missed."""
        series = self.series
        return {
            name: bound for name, bound in BOUNDS.items() if name in series and not bound.met_by(series[name].median)
        }

    def to_json(self) -> dict[str, Any]:
        """One flat object: the headline figures first, then their bounds, then everything else."""
        figures = {name: values.median for name, values in self.series.items()}
        held = {name: msgspec.to_builtins(bound) for name, bound in BOUNDS.items() if name in figures}
        passed = {name: name not in self.missed for name in held}
        return {**figures, "bounds": held, "passed": passed, **msgspec.to_builtins(self)}
