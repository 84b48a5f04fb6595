"""Prefills that other nodes ask for: the queue between the KV port's threads and the engine thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.kv.fair_queue import FairQueue
from tandem.kv.job import Admission, PrefillJob, Producer

QUEUE_LIMIT = 8


class PrefillDesk(Producer):
    """Takes jobs from connection threads; the engine thread takes them from here, as many at a time as it works on.

    Args:
        wake: tells the engine thread that there is something to do.
        seconds_for: predicts how long so many tokens take.
        limit: jobs that may wait.
    """

    def __init__(
        self, wake: Callable[[], None], seconds_for: Callable[[int], float], *, limit: int = QUEUE_LIMIT
    ) -> None:
        self._wake = wake
        self._seconds_for = seconds_for
        self._queue: FairQueue[PrefillJob] = FairQueue(limit)
        self._lock = threading.Lock()
        self._running: list[PrefillJob] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._queue)

    @property
    def waiting_seconds(self) -> float:
        """Predicted for all jobs that wait."""
        with self._lock:
            return sum(self._seconds_for(job.plan.wanted.end) for job in self._queue.in_order())

    def submit(self, job: PrefillJob) -> Admission:
        with self._lock:
            before = self._queue.in_order()
            lacking = [other.plan.wanted.end for other in before]
            lacking += [other.plan.wanted.end - other.latest_progress.processed for other in self._running]
            seconds = sum(self._seconds_for(tokens) for tokens in lacking)
            self._queue.put(job.client, job, priority=job.priority, wait=seconds)
        self._wake()
        return Admission(len(lacking), seconds)

    def cancel(self, job: PrefillJob) -> None:
        with self._lock:
            self._queue.remove(job)
        self._wake()

    def take(self) -> PrefillJob | None:
        """The next job whose turn it is, if one waits."""
        with self._lock:
            if not len(self._queue):
                return None
            job = self._queue.get()
            self._running.append(job)
            waiting = self._queue.in_order()
        for position, other in enumerate(waiting):
            other.queued(position + 1)
        return job

    def ended(self, job: PrefillJob) -> None:
        """A job that was taken needs no more work."""
        with self._lock:
            self._running.remove(job)
