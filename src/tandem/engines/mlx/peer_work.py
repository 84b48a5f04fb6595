"""Prefilling for other nodes: the engine's side of a hand-off that it serves.

Entries leave after every chunk, while the next one is computed. The prefix cache helps and is helped, and never changes
what is returned: entries that it supplies are sent like computed ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from tandem.engines.handoff.desk import PrefillDesk
from tandem.engines.mlx.exchange import Taken, hand_over, take
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
        self._unsent: deque[Taken] = deque()

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return self._job is not None or len(self._desk) > 0

    def step(self, limit: int, *, idle: bool) -> None:
        """Compute the next chunk of at most `limit` tokens for whoever's turn it is.

        Args:
            idle: there is nothing else to do, so that a wait for a slow client costs nobody anything.
        """
        if self._job is None:
            self._job = self._desk.take()
        job = self._job
        if job is None:
            return
        try:
            self._advance(job, limit, idle=idle)
        except CancelledError:
            self._forget()
        except TandemError as error:
            job.fail(error)
            self._forget()
        except Exception as error:
            logger.exception("a peer's prefill failed")
            job.fail(EngineError(f"The prompt could not be processed: {error}"))
            self._forget()

    def _advance(self, job: PrefillJob, limit: int, *, idle: bool) -> None:
        if job.cancelled:
            raise CancelledError("Nobody waits for this prefill any more.")
        if job.congested:
            # The client takes entries more slowly than they are computed. Others' work comes first.
            if idle:
                time.sleep(CONGESTION_PAUSE)
            return
        if not self._unsent:
            self._compute(job, limit)
        # Handing over more than there is room for would block the engine thread.
        while self._unsent and not job.congested:
            hand_over(job, self._unsent.popleft())
        prefill = self._prefill
        if self._unsent or prefill is None:
            return
        job.progress(prefill.position, cached=self._cached)
        if prefill.done:
            job.finish()
            self._forget()

    def _compute(self, job: PrefillJob, limit: int) -> None:
        prefill = self._prefill
        if prefill is None:
            prefill = self._prefill = self._begin(job)
            if self._cached:
                # What the prefix cache has is sent like everything else.
                self._unsent.extend(take(job, prefill.cache, 0, self._cached))
                return
        if prefill.done:
            return
        before = prefill.position
        due = next(point for point in job.plan.checkpoints if point > before)
        begun = time.monotonic()
        count = prefill.step(min(limit, due - before))
        self._pace.prefilled(count, time.monotonic() - begun)
        self._prefix.store(prefill.tokens[: prefill.position], prefill.cache, tail=prefill.done)
        self._unsent.extend(take(job, prefill.cache, before, prefill.position))

    def _begin(self, job: PrefillJob) -> Prefill:
        job.progress(0)
        tokens: list[int] = job.tokens.tolist()
        hit = self._prefix.find(tokens)
        self._cached = hit.length if hit else 0
        cache = hit.cache if hit else self._loaded.make_cache()
        # All of the context belongs into the cache; `Prefill` leaves its last token out, so it gets one more.
        return Prefill(self._loaded.model, [*tokens, 0], cache, self._cached)

    def _forget(self) -> None:
        self._job = self._prefill = None
        self._unsent.clear()
        self._desk.ended()
