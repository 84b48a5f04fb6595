"""One model on its way to this machine's disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.errors import TandemError
from tandem.models.store import LocalModel
from tandem.types.facts import DownloadFact, DownloadState

SPEED_SECONDS = 0.5
"""Shortest time that a speed is taken over."""
SMOOTHING = 0.4


@dataclass(slots=True, eq=False)
class DownloadJob:
    """How far it is, and who waits for it.

    Attributes:
        reference: what it was asked for as.
        model_id: what it is called here.
        names: everything that it may be called, in any case.
        asked: a person asked for it; otherwise it ends with the last of its `waiters`.
        begun: set when its size is known, or it has ended.
        done, total: bytes.
        speed: bytes per second.
        work: a thread that fetches it from the hub; it may outlast the task.
        watchers: told of the bytes that are here, and all.
    """

    reference: str
    model_id: str
    names: frozenset[str]
    asked: bool = False
    waiters: int = 0
    state: DownloadState = "pending"
    done: int = 0
    total: int = 0
    speed: float = 0.0
    error: TandemError | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    work: asyncio.Future[LocalModel] | None = None
    watchers: list[Callable[[int, int], None]] = field(default_factory=list)
    _since: tuple[float, int] | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("pending", "ongoing")

    def progressed(self, done: int, total: int) -> None:
        """So many bytes are here."""
        now = time.monotonic()
        self.done, self.total = done, total
        self.begun.set()
        for watcher in self.watchers:
            watcher(done, total)
        if self._since is None:
            self._since = now, done
        elif now - self._since[0] >= SPEED_SECONDS:
            speed = max(0.0, (done - self._since[1]) / (now - self._since[0]))
            self.speed = speed if not self.speed else self.speed + SMOOTHING * (speed - self.speed)
            self._since = now, done

    def ended(self, state: DownloadState, error: TandemError | None = None) -> None:
        """It is over."""
        self.state, self.error, self.speed = state, error, 0.0
        self.begun.set()

    def stopped(self) -> None:
        """Its task is over; one that was cancelled before its first step never ran, and could not say so."""
        if self.running:
            self.ended("cancelled")

    def fact(self) -> DownloadFact:
        """What the cluster is told of it."""
        message = self.error.message if self.error is not None else None
        return DownloadFact(self.model_id, self.state, self.done, self.total, self.speed, message)
