"""A prefill request as its producer sees it: what is wanted, and where the entries go as they are computed."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.errors import CancelledError, EngineError, TandemError
from tandem.kv.control import Done, Progress
from tandem.kv.coverage import Coverage
from tandem.kv.dtypes import DTYPES, Array
from tandem.kv.intervals import Span
from tandem.kv.plan import Plan


class Outgoing(NamedTuple):
    """Entries `[heads, tokens, dim]` from `head`, `token` on, or a state as it is after `token` tokens."""

    layer: int
    part: int
    head: int
    token: int
    array: Array
    is_state: bool


class Admission(NamedTuple):
    """A job was queued: `position` others are before it, which take about `seconds`."""

    position: int = 0
    seconds: float = 0.0


class Producer(ABC):
    """Computes jobs. Its methods are called from connection threads."""

    @abstractmethod
    def submit(self, job: PrefillJob) -> Admission:
        """Queue a job. It is worked on in another thread, which feeds it until `finish` or `fail`.

        Raises:
            PrefillBusyError: the queue is full; `retry_after` says how long for.
            TandemError: this job cannot be done; the client reads the message.
        """

    @abstractmethod
    def cancel(self, job: PrefillJob) -> None:
        """Nobody wants the job any more (`job.cancelled` is set). Whatever of it is queued can be dropped."""


class PrefillJob:
    """One request. The producer's methods may be called from any thread.

    Attributes:
        client: name of who asks, for fairness between clients.
        tokens: the prompt's first `end` token ids.
        plan: what is wanted; `plan.wanted` has the range, `plan.checkpoints` where windows and states are due.
        priority: larger is more urgent.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: npt.NDArray[np.uint32],
        *,
        client: str = "",
        priority: int = 0,
        backlog_bytes: int = 256 << 20,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.tokens = tokens
        self.client = client
        self.priority = priority
        self._backlog_limit = backlog_bytes
        self._wake = wake
        self._changed = threading.Condition()
        self._outgoing: deque[Outgoing] = deque()
        self._backlog = 0
        self._emitted: dict[tuple[int, int], Coverage] = {}
        self._states: set[tuple[int, int, int]] = set()
        self._progress = Progress(0, plan.wanted.end)
        self._cancelled = False
        self._end: Done | TandemError | None = None
        self._accepted_at = time.monotonic()
        self._started_at: float | None = None

    # ------------------------------------------------------------------------------------------------ the producer's

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the result any more. A producer looks at it between chunks."""
        return self._cancelled

    @property
    def congested(self) -> bool:
        """Whether so much waits to be sent that `emit` would block. A producer with other work does that first."""
        return self._backlog >= self._backlog_limit

    def needs(self, layer: int, start: int, end: int) -> tuple[Span, ...]:
        """Which tokens of `[start, end)` are wanted of a layer. Empty: nothing of them need be copied out."""
        if layer not in self.plan.layers:
            return ()
        cut = (Span(max(start, span.start), min(end, span.end)) for span in self.plan.spans(layer))
        return tuple(span for span in cut if span.length > 0)

    def emit(self, layer: int, part: int, start: int, entries: Array | memoryview, *, head_start: int = 0) -> None:
        """Hand over entries `[heads, tokens, dim]` of the tokens from `start` on; those not wanted are left out.

        The array is kept, not copied, until it was sent: do not write to it again. Blocks while `congested`.

        Raises:
            CancelledError: nobody wants them any more.
            ValueError: wrong shape or dtype, or entries that were emitted before.
        """
        array, spec = np.asarray(entries), self.plan.layer(layer).parts[part]
        dtype = DTYPES[spec.dtype].array
        if array.ndim != 3 or array.shape[2] != spec.dim or array.dtype != dtype:
            raise ValueError(f"{spec} does not fit entries of shape {array.shape}, {array.dtype}")
        if head_start + array.shape[0] > spec.heads:
            raise ValueError(f"{spec} has no heads up to {head_start + array.shape[0]}")
        heads = self.plan.heads(spec)
        first, last = max(heads.start, head_start), min(heads.end, head_start + array.shape[0])
        for span in self.needs(layer, start, start + array.shape[1]):
            if first < last:
                cut = array[first - head_start : last - head_start, span.start - start : span.end - start]
                self._queue(Outgoing(layer, part, first, span.start, cut, False))

    def emit_state(self, layer: int, number: int, tokens: int, array: Array | memoryview) -> None:
        """Hand over a state array as it is after `tokens` tokens; ignored unless that is one of the checkpoints.

        Raises:
            CancelledError: nobody wants it any more.
            ValueError: wrong shape or dtype, or emitted before.
        """
        state, spec = np.asarray(array), self.plan.layer(layer).states[number]
        if state.shape != spec.shape or state.dtype != DTYPES[spec.dtype].array:
            raise ValueError(f"{spec} does not fit a state of shape {state.shape}, {state.dtype}")
        if layer in self.plan.layers and tokens in self.plan.checkpoints:
            self._queue(Outgoing(layer, number, 0, tokens, state, True))

    def queued(self, position: int) -> None:
        """Tell the client that `position` others are before it now."""
        with self._changed:
            if self._started_at is None:
                self._progress = Progress(0, self.plan.wanted.end, position)
        self._wake()

    def progress(self, processed: int, *, cached: int = 0) -> None:
        """Tell the client that `processed` tokens of the context are computed, `cached` of them from a cache. The
        first call (with 0) says that its turn has come."""
        with self._changed:
            self._start()
            self._progress = Progress(processed, self.plan.wanted.end, 0, True, cached)
        self._wake()

    def finish(self) -> None:
        """Everything was emitted.

        Raises:
            EngineError: something was not. The client is told as well.
        """
        with self._changed:
            missing = self._missing()
            if missing and not self._cancelled:
                error = EngineError(f"The prefill ended without {missing}. Report this: it is a fault of the engine.")
                self._conclude(error)
                raise error
            self._start()
            now = time.monotonic()
            started = self._started_at or now
            self._conclude(
                Done(
                    counts=tuple(self.plan.count(index) for index in self.plan.layers),
                    end=self.plan.wanted.end,
                    payload_bytes=0,
                    queued=started - self._accepted_at,
                    computing=now - started,
                    cached=self._progress.cached,
                )
            )

    def fail(self, error: TandemError) -> None:
        """The job cannot be completed. What was emitted before is sent still."""
        with self._changed:
            self._conclude(error)

    # ---------------------------------------------------------------------------------------------- the connection's

    def cancel(self) -> None:
        """Nobody wants the job any more: drop what waits, and let `emit` raise."""
        with self._changed:
            self._cancelled = True
            self._outgoing.clear()
            self._backlog = 0
            self._changed.notify_all()

    def take(self) -> Outgoing | None:
        """The next entries to send, if any wait."""
        with self._changed:
            if not self._outgoing:
                return None
            item = self._outgoing.popleft()
            self._backlog -= item.array.nbytes
            self._changed.notify_all()
            return item

    @property
    def latest_progress(self) -> Progress:
        """Where the job stands."""
        return self._progress

    @property
    def end(self) -> Done | TandemError | None:
        """How it ended; None while it runs. `take` may still have entries."""
        return self._end

    # ------------------------------------------------------------------------------------------------------ internals

    def _start(self) -> None:
        if self._started_at is None:
            self._started_at = time.monotonic()

    def _conclude(self, end: Done | TandemError) -> None:
        if self._end is None:
            self._end = end
        self._wake()

    def _queue(self, item: Outgoing) -> None:
        with self._changed:
            while self.congested and not self._cancelled:
                self._changed.wait()
            if self._cancelled:
                raise CancelledError("Nobody waits for this prefill any more.")
            if self._end is not None:
                raise ValueError("the job has ended")
            self._start()
            self._record(item)
            self._outgoing.append(item)
            self._backlog += item.array.nbytes
        self._wake()

    def _record(self, item: Outgoing) -> None:
        if item.is_state:
            key = (item.layer, item.part, item.token)
            if key in self._states:
                raise ValueError(f"state {key} was emitted before")
            self._states.add(key)
            return
        heads = Span(item.head, item.head + item.array.shape[0])
        tokens = Span(item.token, item.token + item.array.shape[1])
        self._coverage(item.layer, item.part).add(heads, tokens)

    def _coverage(self, layer: int, part: int) -> Coverage:
        if (layer, part) not in self._emitted:
            self._emitted[layer, part] = Coverage(self.plan.heads(self.plan.layer(layer).parts[part]))
        return self._emitted[layer, part]

    def _missing(self) -> str:
        for index in self.plan.layers:
            layer = self.plan.layer(index)
            for number in range(len(layer.states)):
                for tokens in self.plan.checkpoints:
                    if (index, number, tokens) not in self._states:
                        return f"state {number} of layer {index} after {tokens} tokens"
            for number, part in enumerate(layer.parts):
                for span in self.plan.spans(index):
                    if not self._coverage(index, number).covers(self.plan.heads(part), span):
                        return f"tokens of [{span.start}, {span.end}) in layer {index}, {part.name}"
        return ""
