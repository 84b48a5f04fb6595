"""Prefilling for other nodes: what any engine needs for the hand-offs that it serves.

Entries leave after every chunk, while the next one is computed. A prefix cache may help, and never changes what is
returned: entries that it supplies are sent like computed ones.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from tandem.engines.handoff.desk import PrefillDesk
from tandem.errors import CancelledError, EngineError, TandemError
from tandem.kv.job import PrefillJob

logger = logging.getLogger("tandem.engine")

CONGESTION_PAUSE = 0.002

Ready = TypeVar("Ready")
"""Entries that were computed and are not handed over yet."""


class Serving(Protocol):
    """What an engine does about the prefills that others ask for. Used by the engine thread."""

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""

    def step(self, limit: int, *, idle: bool) -> None:
        """Do some of it.

        Args:
            limit: tokens to compute at most, where this computes any.
            idle: there is nothing else to do, so that a wait for a slow client costs nobody anything.
        """


class PeerWork(ABC, Generic[Ready]):
    """One job at a time, a chunk a step. Used by the engine thread.

    Args:
        desk: where jobs come from.
    """

    def __init__(self, desk: PrefillDesk) -> None:
        self._desk = desk
        self._job: PrefillJob | None = None
        self._begun = False
        self._position = 0
        self._cached = 0
        self._unsent: deque[Ready] = deque()

    @abstractmethod
    def begin(self, job: PrefillJob) -> int:
        """Prepare for a job; how many of its leading tokens the prefix cache has."""

    @abstractmethod
    def compute(self, job: PrefillJob, position: int, limit: int) -> tuple[Iterable[Ready], int]:
        """The entries of the next tokens from `position` on, at most `limit` of them unless the prefix cache has them,
        and the position after them."""

    @abstractmethod
    def hand_over(self, job: PrefillJob, one: Ready) -> None:
        """Queue entries for the client.

        Raises:
            CancelledError: nobody wants them any more.
        """

    @property
    def pending(self) -> bool:
        """Whether there is anything to do."""
        return self._job is not None or len(self._desk) > 0

    @property
    def left(self) -> int:
        """Tokens of the job under way that are still to be computed."""
        return self._job.plan.wanted.end - self._position if self._job is not None else 0

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
        if not self._begun:
            job.progress(0)
            self._cached = self.begin(job)
            self._begun = True
        if not self._unsent and self._position < job.plan.wanted.end:
            entries, self._position = self.compute(job, self._position, limit)
            self._unsent.extend(entries)
        # Handing over more than there is room for would block the engine thread.
        while self._unsent and not job.congested:
            self.hand_over(job, self._unsent.popleft())
        if self._unsent:
            return
        job.progress(self._position, cached=self._cached)
        if self._position == job.plan.wanted.end:
            job.finish()
            self._forget()

    def _forget(self) -> None:
        job, self._job = self._job, None
        self._begun = False
        self._position = self._cached = 0
        self._unsent.clear()
        if job is not None:
            self._desk.ended(job)
