"""Prefilling for other nodes: the engine's side of a hand-off that it serves.

Entries leave after every chunk, while the next one is computed. The prefix cache helps and is helped, and never changes
what is returned: entries that it supplies are sent like computed ones.
"""

from __future__ import annotations

import logging
import time

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.mlx.exchange import emit
from tandem.engines.mlx.load import LoadedModel
from tandem.engines.mlx.pace import Pace
from tandem.engines.mlx.prefill import Prefill
from tandem.engines.mlx.prefix_cache import PrefixCache
from tandem.errors import CancelledError, EngineError, TandemError
from tandem.kv.job import PrefillJob

logger = logging.getLogger("tandem.mlx")

CONGESTION_PAUSE = 0.002


class PeerWork:
    """One job at a time, a chunk a step."""

    def __init__(self, loaded: LoadedModel, prefix: PrefixCache, desk: PrefillDesk, pace: Pace) -> None:
        self._loaded = loaded
        self._prefix = prefix
        self._desk = desk
        self._pace = pace
        self._job: PrefillJob | None = None
        self._prefill: Prefill | None = None
        self._cached = 0

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return self._job is not None or len(self._desk) > 0

    def step(self, limit: int) -> None:
        """Compute the next chunk of at most `limit` tokens for whoever's turn it is."""
        if self._job is None:
            self._job = self._desk.take()
        job = self._job
        if job is None:
            return
        try:
            self._advance(job, limit)
        except CancelledError:
            self._forget()
        except TandemError as error:
            job.fail(error)
            self._forget()
        except Exception as error:
            logger.exception("a peer's prefill failed")
            job.fail(EngineError(f"The prompt could not be processed: {error}"))
            self._forget()

    def _advance(self, job: PrefillJob, limit: int) -> None:
        if job.cancelled:
            raise CancelledError("Nobody waits for this prefill any more.")
        if job.congested:
            # The client takes entries more slowly than they are computed. Others' work comes first.
            time.sleep(CONGESTION_PAUSE)
            return
        prefill = self._prefill or self._begin(job)
        before = prefill.position
        if not prefill.done:
            due = next(point for point in job.plan.checkpoints if point > before)
            begun = time.monotonic()
            count = prefill.step(min(limit, due - before))
            self._pace.prefilled(count, time.monotonic() - begun)
            tokens = prefill.tokens[: prefill.position]
            self._prefix.store(tokens, prefill.cache, tail=prefill.done)
            emit(job, prefill.cache, before, prefill.position)
            job.progress(prefill.position, cached=self._cached)
        if prefill.done:
            job.finish()
            self._forget()

    def _begin(self, job: PrefillJob) -> Prefill:
        job.progress(0)
        tokens: list[int] = job.tokens.tolist()
        hit = self._prefix.find(tokens)
        self._cached = hit.length if hit else 0
        cache = hit.cache if hit else self._loaded.make_cache()
        # All of the context belongs into the cache; `Prefill` leaves its last token out, so it gets one more.
        self._prefill = prefill = Prefill(self._loaded.model, [*tokens, 0], cache, self._cached)
        if self._cached:
            emit(job, cache, 0, self._cached)
            job.progress(self._cached, cached=self._cached)
        return prefill

    def _forget(self) -> None:
        self._job = self._prefill = None
        self._desk.ended()
