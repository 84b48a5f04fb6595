"""Prefilling for other nodes: the engine's side of a hand-off that it serves."""

from __future__ import annotations

import time

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.handoff.serving import PeerWork
from tandem.engines.mlx.exchange import Taken, hand_over, take
from tandem.engines.mlx.load import LoadedModel
from tandem.engines.mlx.prefill import Prefill
from tandem.engines.mlx.prefix_cache import PrefixCache
from tandem.engines.pace import Pace
from tandem.kv.job import PrefillJob


class MlxPeerWork(PeerWork[Taken]):
    """Computes what peers ask for with the model, and keeps it in the prefix cache."""

    def __init__(self, loaded: LoadedModel, prefix: PrefixCache, desk: PrefillDesk, pace: Pace) -> None:
        super().__init__(desk)
        self._loaded = loaded
        self._prefix = prefix
        self._pace = pace
        self._prefill: Prefill | None = None

    def begin(self, job: PrefillJob) -> int:
        tokens: list[int] = job.tokens.tolist()
        hit = self._prefix.find(tokens)
        cached = hit.length if hit else 0
        cache = hit.cache if hit else self._loaded.make_cache()
        # All of the context belongs into the cache; `Prefill` leaves its last token out, so it gets one more.
        self._prefill = Prefill(self._loaded.model, [*tokens, 0], cache, cached)
        return cached

    def compute(self, job: PrefillJob, position: int, limit: int) -> tuple[list[Taken], int]:
        prefill = self._prefill
        assert prefill is not None
        if position < prefill.position:
            # From the prefix cache.
            return take(job, prefill.cache, position, prefill.position), prefill.position
        due = next(point for point in job.plan.checkpoints if point > position)
        begun = time.monotonic()
        count = prefill.step(min(limit, due - position))
        self._pace.prefilled(count, time.monotonic() - begun)
        self._prefix.store(prefill.tokens[: prefill.position], prefill.cache, tail=prefill.done)
        return take(job, prefill.cache, position, prefill.position), prefill.position

    def hand_over(self, job: PrefillJob, one: Taken) -> None:
        hand_over(job, one)

    def _forget(self) -> None:
        super()._forget()
        self._prefill = None  # a cache may be large, and the next job far off
