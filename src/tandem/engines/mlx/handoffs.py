"""Both sides of the engine's hand-offs: what is MLX's own about them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from tandem.engines.base import EngineOptions, KvPlane
from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.handoffs import CHECKPOINT_TOKENS, Handoffs
from tandem.engines.handoff.identity import fingerprint_of
from tandem.engines.handoff.remote import RemotePrefill
from tandem.engines.mlx.exchange import commit
from tandem.engines.mlx.landing import CacheLanding, land
from tandem.engines.mlx.layout import layout_of
from tandem.engines.mlx.load import LoadedModel
from tandem.engines.mlx.peer_work import MlxPeerWork
from tandem.engines.mlx.prefill import Prefill
from tandem.engines.mlx.prefix_cache import PrefixCache
from tandem.engines.mlx.request import Sequence
from tandem.engines.pace import Pace
from tandem.errors import HandoffError
from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layout
from tandem.placement.handoff import Here

logger = logging.getLogger("tandem.mlx")


class MlxHandoffs(Handoffs[Sequence]):
    """Layout and fingerprint are made when somebody needs them: the fingerprint reads the model's files.

    Args:
        seen: a cache of the model that has seen tokens.
        pace: the engine's measured speeds.
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
        desk = PrefillDesk(wake, pace.seconds)
        work = MlxPeerWork(loaded, prefix, desk, pace)
        super().__init__(options, desk, work, chunk=pace.chunk, checkpoint=CHECKPOINT_TOKENS, wake=wake)
        self._loaded = loaded
        self._seen = seen
        self._prefix = prefix
        self.name_peers(options.prefill_peers)

    @cached_property
    def layout(self) -> Layout:
        """What the model's cache looks like."""
        return layout_of(self._seen)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a peer's model has to agree with."""
        return fingerprint_of(self.layout, self._options.folder)

    @property
    def plane(self) -> KvPlane:
        """For the KV port."""
        return KvPlane(self.layout, self.fingerprint, self.desk)

    def consider(self, sequence: Sequence, held: list[Any], start: int, here: Here) -> bool:
        """Begin a remote prefill if that is predicted to be sooner.

        Returns:
            Whether `sequence` waits for entries now.
        """
        if sequence.scored or not sequence.may_hand_off:
            return False
        return self._ask(sequence, held, start, here)

    def _land(self, start: int, end: int) -> CacheLanding | None:
        return land(self.layout, self._loaded.make_cache, start, end)

    def collect(self, here: Here) -> list[Sequence]:
        """Sequences whose hand-off ended, each with a `prefill` that has committed what arrived."""
        ended: list[Sequence] = []
        for sequence, remote, outcome in self._ended(here):
            cache, position = self._commit(remote, outcome.complete)
            sequence.answer.received(remote.outcomes, position - remote.start)
            sequence.mixed = remote.mixed and position > remote.start
            sequence.prefill = Prefill(self._loaded.model, sequence.tokens, cache, position)
            if sequence.keeps_prefix and position > remote.start:
                sequence.unstored = self._prefix.can_wait
                if not sequence.unstored:
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

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return super().has_work or self.has_news
