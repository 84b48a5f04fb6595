"""Both sides of the engine's hand-offs: prefills asked of others, and prefills that others ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from tandem.engines.base import EngineOptions, KvPlane, Output
from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.remote import RemotePrefill, RemotePrefills
from tandem.engines.mlx.exchange import commit
from tandem.engines.mlx.identity import fingerprint_of
from tandem.engines.mlx.layout import layout_of
from tandem.engines.mlx.load import LoadedModel
from tandem.engines.mlx.pace import Pace
from tandem.engines.mlx.peer_work import PeerWork
from tandem.engines.mlx.prefill import Prefill
from tandem.engines.mlx.prefix_cache import PrefixCache
from tandem.engines.mlx.request import Sequence
from tandem.errors import HandoffError
from tandem.kv.codec import RAW
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layout
from tandem.placement.handoff import NO_PEER, Decision, Here
from tandem.types import PrefillProgress

logger = logging.getLogger("tandem.mlx")

CHECKPOINT_TOKENS = 1024


class Handoffs:
    """Owned and called by the engine thread, but for the desk and `wake`.

    Layout and fingerprint are made when somebody needs them: the fingerprint reads the model's files.

    Args:
        seen: a cache of the model that has seen tokens.
        pace: the engine's measured speeds.
        wake: tells the engine thread, from any other, that there is something to do.
    """

    def __init__(
        self,
        options: EngineOptions,
        loaded: LoadedModel,
        seen: list[Any],
        prefix: PrefixCache,
        pace: Pace,
        wake: Callable[[], None],
    ) -> None:
        self._options = options
        self._loaded = loaded
        self._seen = seen
        self._prefix = prefix
        self._pace = pace
        rates = pace.rates
        self.desk = PrefillDesk(wake, lambda tokens: rates.seconds(tokens) if rates.known else 0.0)
        self._peer_work = PeerWork(loaded, prefix, self.desk, pace)
        self._remotes: RemotePrefills | None = None
        self._wake = wake
        if options.prefill_peers:
            self.name_peers(options.prefill_peers)
        self.receiving: list[Sequence] = []

    @cached_property
    def layout(self) -> Layout:
        """What the model's cache looks like."""
        return layout_of(self._seen)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a peer's model has to agree with."""
        return fingerprint_of(self._loaded, self.layout, self._options.folder)

    @property
    def plane(self) -> KvPlane:
        """For the KV port."""
        return KvPlane(self.layout, self.fingerprint, self.desk)

    # ---------------------------------------------------------------------------------------------- asked of others

    @property
    def elsewhere(self) -> int:
        """Sequences that wait for another node, and for nothing here. From any thread."""
        return sum(one.remote is not None and not one.remote.ended for one in self.receiving.copy())

    @property
    def has_peers(self) -> bool:
        """Whether any node was named that may prefill for this one."""
        return self._remotes is not None and self._remotes.any

    def name_peers(self, addresses: tuple[str, ...]) -> None:
        """Replace the nodes that may prefill for this one."""
        if self._remotes is not None:
            self._remotes.name_peers(addresses)
        elif addresses:
            options = msgspec.structs.replace(self._options, prefill_peers=addresses)
            self._remotes = RemotePrefills(
                options, self.layout, self.fingerprint, self._wake, checkpoint=CHECKPOINT_TOKENS
            )

    def consider(self, sequence: Sequence, held: list[Any], start: int, here: Here) -> bool:
        """Begin a remote prefill if that is predicted to be sooner.

        Returns:
            Whether `sequence` waits for entries now.
        """
        if sequence.scored or not sequence.may_hand_off:
            return False
        if self._remotes is None:
            sequence.answer.decided(Decision("local", None, RAW, None, None, NO_PEER))
            return False
        remote, decision = self._remotes.consider(sequence.tokens, held, start, here, chunk=self._pace.chunk)
        sequence.answer.decided(decision)
        if remote is None:
            return False
        sequence.remote = remote
        self.receiving.append(sequence)
        return True

    def news(self) -> list[Output]:
        """What peers have computed of prompts since the last call."""
        return [
            Output(one.request_id, [PrefillProgress(one.remote.news(), len(one.tokens))])
            for one in self.receiving
            if one.remote is not None and one.remote.progressed
        ]

    def collect(self, here: Here) -> list[Sequence]:
        """Sequences whose hand-off ended, each with a `prefill` that has committed what arrived."""
        ended: list[Sequence] = []
        for sequence in [one for one in self.receiving if one.remote is not None and one.remote.ended]:
            remote = sequence.remote
            assert remote is not None
            outcome = remote.collect()
            if outcome.error is not None:
                logger.warning(
                    "hand-off of request %s from %s broke off with %d of %d tokens complete: %s",
                    sequence.request_id,
                    outcome.peer,
                    outcome.complete,
                    remote.end,
                    outcome.error,
                )
                if self._remotes is not None and self._remotes.go_on(remote, here, chunk=self._pace.chunk):
                    continue
            self.receiving.remove(sequence)
            sequence.remote = None
            cache, position = self._commit(remote, outcome.complete)
            sequence.answer.received(remote.outcomes, position - remote.start)
            # What is missing still is computed at home.
            sequence.may_hand_off = False
            sequence.prefill = Prefill(self._loaded.model, sequence.tokens, cache, position)
            if sequence.keeps_prefix and position > remote.start:
                self._prefix.store(sequence.tokens[:position], cache, tail=sequence.prefill.done)
            ended.append(sequence)
        return ended

    def _commit(self, remote: RemotePrefill, complete: int) -> tuple[list[Any], int]:
        if complete <= remote.start:
            return remote.held, remote.start
        try:
            cache = commit(
                self._loaded.make_cache,
                self.layout,
                remote.held,
                remote.start,
                remote.staging,
                complete,
                self._seen,
            )
        except HandoffError as error:
            logger.warning("received entries are not used: %s", error.message)
            return remote.held, remote.start
        except Exception:  # of one prompt; the others must not suffer, and this one can be read here
            logger.exception("received entries are not used")
            return remote.held, remote.start
        return cache, complete

    def cancel(self, request_id: str) -> bool:
        """Stop waiting for a request's entries."""
        for sequence in self.receiving:
            if sequence.request_id == request_id:
                assert sequence.remote is not None
                sequence.remote.cancel()
                self.receiving.remove(sequence)
                return True
        return False

    # --------------------------------------------------------------------------------------------- asked for by others

    @property
    def serving(self) -> bool:
        """Whether a peer waits for work."""
        return self._peer_work.pending

    def serve(self, limit: int, *, idle: bool) -> None:
        """Compute a chunk for a peer."""
        self._peer_work.step(limit, idle=idle)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.serving or any(
            one.remote is not None and (one.remote.ended or one.remote.progressed) for one in self.receiving
        )

    def close(self) -> None:
        """Close connections to peers."""
        for sequence in self.receiving:
            if sequence.remote is not None:
                sequence.remote.cancel()
        self.receiving.clear()
        if self._remotes is not None:
            self._remotes.close()
