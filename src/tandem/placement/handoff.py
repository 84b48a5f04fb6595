"""Whether a prompt should be prefilled elsewhere, and where: a comparison of predicted times to the first token.

Chunks leave while the next ones are computed, so compute and transfer are two stages of a pipeline. At constant rates
its length is that of the slower stage, plus what the faster one adds at the end where nothing follows, or at the
beginning where nothing has arrived:

    remote = queue + fixed + round trip + max(compute + transfer of the last chunk, compute of the first + transfer)
    local  = queue + n/R_local * slowdown by running answers

All rates are measured on real requests; `fixed` is what a hand-off cost beyond its compute and transfer, measured too,
and is what makes short prompts stay at home. Pure functions: no clock, no network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tandem.placement.rates import RateTable

Choice: TypeAlias = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec makes of a byte of cache.

    Attributes:
        ratio: bytes on the wire per byte of cache; 1 for raw.
        encode_rate, decode_rate: bytes of cache per second; infinite for raw.
    """

    name: str
    ratio: float = 1.0
    encode_rate: float = math.inf
    decode_rate: float = math.inf

    def seconds(self, size: float, bandwidth: float) -> float:
        """To encode, send and decode `size` bytes of cache over a link of `bandwidth` bytes per second."""
        return size * self.ratio / bandwidth + size / self.encode_rate + size / self.decode_rate


RAW = CodecCost("raw")
NO_PEER = "No prefill peer is linked."


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The work.

    Attributes:
        tokens: of the prompt that have to be in the cache.
        held: of these, how many leading ones this node's prefix cache has.
        bytes_per_token: of cache, uncompressed.
        constant_bytes: of windows and states, whatever the length.
        chunk: tokens that are computed, then sent together.
    """

    tokens: int
    held: int
    bytes_per_token: int
    constant_bytes: int = 0
    chunk: int = 512

    @property
    def missing(self) -> int:
        """Tokens that somebody has to prefill."""
        return max(0, self.tokens - self.held)


@dataclass(frozen=True, slots=True)
class Here:
    """This node.

    Attributes:
        rates: measured, of its prefill alone.
        queue: seconds until it could begin.
        slowdown: how many times longer a prefill takes because answers run beside it.
    """

    rates: RateTable
    queue: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that offers to prefill.

    Attributes:
        name: for the statistics.
        rates: its prefill rates.
        bandwidth: measured, bytes per second.
        round_trip: seconds.
        queue: seconds until it would begin.
        fixed: measured seconds that a hand-off costs beyond compute, transfer and round trip.
        held: leading tokens that its prefix cache is known to have.
        codecs: that may be used.
    """

    name: str
    rates: RateTable
    bandwidth: float
    round_trip: float = 0.0
    queue: float = 0.0
    fixed: float = 0.0
    held: int = 0
    codecs: tuple[CodecCost, ...] = (RAW,)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and from which predictions.

    Attributes:
        peer, codec: of a remote prefill.
        local_seconds: predicted time to first token without help; None if this node's speed is unknown.
        remote_seconds: of the best peer; None if there is none to compare.
        reason: one sentence for people.
    """

    choice: Choice
    peer: str | None
    codec: str
    local_seconds: float | None
    remote_seconds: float | None
    reason: str


def cheapest_codec(codecs: Sequence[CodecCost], size: float, bandwidth: float) -> CodecCost:
    """The one that moves `size` bytes of cache soonest: raw beats a codec unless the bytes that this saves would take
    longer on the link than encoding and decoding do."""
    return min(codecs, key=lambda codec: codec.seconds(size, bandwidth))


def local_seconds(size: PromptSize, here: Here) -> float:
    """Predicted time to first token when this node prefills.

    Raises:
        ValueError: its rates are unknown.
    """
    return here.queue + here.rates.seconds(size.missing) * here.slowdown


def remote_seconds(size: PromptSize, peer: Peer) -> tuple[float, CodecCost]:
    """Predicted time to first token when `peer` prefills, and the codec to use.

    Raises:
        ValueError: its rates are unknown.
    """
    moved = size.missing * size.bytes_per_token + size.constant_bytes
    codec = cheapest_codec(peer.codecs, moved, peer.bandwidth)
    compute = peer.rates.seconds(max(0, size.tokens - peer.held))
    transfer = codec.seconds(moved, peer.bandwidth)
    first = min(size.chunk, size.missing) / size.missing
    last = (size.missing % size.chunk or size.chunk) / size.missing if size.missing > size.chunk else 1.0
    pipelined = max(compute + transfer * last, compute * first + transfer)
    return peer.queue + peer.fixed + peer.round_trip + pipelined, codec


def decide(size: PromptSize, here: Here, peers: Sequence[Peer]) -> Decision:
    """Local or remote, whichever is predicted to bring the first token sooner.

    A node whose own speed is unknown prefills by itself, and so learns it. A peer whose speed is unknown is not asked.
    """
    if size.missing == 0:
        return Decision("local", None, "raw", 0.0, None, "Everything is in the prefix cache.")
    offers = [(*remote_seconds(size, peer), peer) for peer in peers if peer.rates.known and peer.bandwidth > 0]
    if not here.rates.known:
        return Decision("local", None, "raw", None, None, "This node's own speed is not measured yet.")
    local = local_seconds(size, here)
    if not offers:
        why = NO_PEER if not peers else "No peer's speed is measured yet."
        return Decision("local", None, "raw", local, None, why)
    remote, codec, peer = min(offers, key=lambda offer: offer[0])
    if remote < local:
        reason = f"{peer.name} is predicted to be ready in {remote:.3f} s, this node in {local:.3f} s."
        return Decision("remote", peer.name, codec.name, local, remote, reason)
    reason = f"This node is predicted to be ready in {local:.3f} s, {peer.name} in {remote:.3f} s."
    return Decision("local", None, "raw", local, remote, reason)
