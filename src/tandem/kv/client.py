"""Remote prefill by one peer: the decode side's entry to the KV plane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tandem.kv.codec import RAW
from tandem.kv.control import Progress
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.peer import ClientOptions, Peer
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.kv.tls import Identity
from tandem.kv.transfer import Transfer


class Handoff:
    """Remote prefill by one peer. Thread-safe: each transfer under way has a connection of its own.

    Args:
        address: (host, port) of the peer's KV port.
        fingerprint: of the model that the entries are for.
        identity: certificate of this node; with one, only peers of the same authority are talked to.
        allow_quantisation: the peer may have the same model's weights in another quantisation.

    Raises:
        ConfigError: the address is not loopback while there is no secret.
    """

    def __init__(
        self,
        address: tuple[str, int],
        fingerprint: Fingerprint,
        *,
        identity: Identity | None = None,
        allow_quantisation: bool = False,
        options: ClientOptions | None = None,
    ) -> None:
        self.peer = Peer(
            address, fingerprint, identity=identity, allow_quantisation=allow_quantisation, options=options
        )

    def transfer(
        self,
        tokens: Sequence[int],
        staging: Staging,
        *,
        wanted: Wanted | None = None,
        codecs: Sequence[str] = (RAW,),
        priority: int = 0,
        most_queue: float = math.inf,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Transfer:
        """Prepare a transfer; its `run` does it, its `cancel` stops it.

        Args:
            tokens: the prompt, at least up to `wanted.end`.
            wanted: what to ask this peer for; None for everything that the staging lacks.
            codecs: those that are welcome, the preferred one first.
            most_queue: seconds; if the server's queue takes longer, by its own estimate, the transfer ends at once as
                if the queue were full.
            on_progress: called in the running thread with what the server tells.

        Raises:
            InvalidRequestError: fewer tokens than `wanted.end`, an unknown codec.
            HandoffError: the staging lacks nothing.
        """
        return Transfer(self.peer, tokens, staging, wanted, tuple(codecs), priority, most_queue, on_progress)

    def connect(self) -> str:
        """Shake hands now rather than at the first transfer, and keep the connection. Returns the peer's name.

        Raises:
            HandoffError: the peer cannot be reached, does not answer, or has another secret or model.
        """
        link = self.peer.take()
        self.peer.give_back(link)
        return link.name

    def close(self) -> None:
        """Close idle connections. Transfers under way go on."""
        self.peer.close()
