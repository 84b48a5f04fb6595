"""One request to one peer, from the client's side: ask, receive into a staging, check."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tandem.errors import (
    CancelledError,
    HandoffError,
    InvalidRequestError,
    PeerLostError,
    PeerRefusedError,
    PeerSilentError,
    PrefillBusyError,
    TandemError,
    WireError,
)
from tandem.kv.codec import CODEC_NAMES, RAW
from tandem.kv.control import Accepted, Busy, Done, PrefillRequest, Problem, Progress
from tandem.kv.handshake import expect_nonce
from tandem.kv.intake import Intake
from tandem.kv.outcome import Outcome as Outcome
from tandem.kv.peer import Link, Peer
from tandem.kv.plan import Wanted
from tandem.kv.staging import Staging
from tandem.kv.transport import Patience
from tandem.kv.wire import FrameType, Header


class Transfer:
    """One request to one peer. `run` blocks its caller's thread; `cancel` may be called from any other."""

    def __init__(
        self,
        peer: Peer,
        tokens: Sequence[int],
        staging: Staging,
        wanted: Wanted | None,
        codecs: tuple[str, ...],
        priority: int,
        most_queue: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._wanted = staging.rest() if wanted is None else wanted
        unknown = [name for name in codecs if name not in CODEC_NAMES]
        if unknown:
            raise InvalidRequestError(
                f"No codec is called {unknown[0]!r}. Use {', '.join(CODEC_NAMES)}.", param="codecs"
            )
        if len(tokens) < self._wanted.end:
            raise InvalidRequestError(
                f"{len(tokens)} tokens are no context of {self._wanted.end}. Pass the whole prompt.", param="tokens"
            )
        self._peer = peer
        self._options = peer.options
        self._tokens = np.asarray(tokens[: self._wanted.end], np.dtype("<u4")).tobytes()
        self._staging = staging
        self._codecs = codecs
        self._priority = priority
        self._most_queue = most_queue
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._cancelled = False
        self._link: Link | None = None
        self._codec = RAW
        self._progress = Progress(0, self._wanted.end)
        self._done: Done | None = None
        self._began = self._accepted_at = self._started_at = self._moved_at = 0.0
        self._bytes_before = 0
        self._clean = False

    def cancel(self) -> None:
        """Stop: `run` returns with a `CancelledError`, the server stops computing. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self._link is not None:
                self._link.transport.wake()

    def run(self) -> Outcome:
        """Ask, receive and check. Errors are part of the outcome; what is complete despite them is usable."""
        self._began = time.monotonic()
        outcome, stale = self._attempt(fresh=False)
        if stale:
            # A server may close an idle connection at the very moment that it is used again.
            outcome, _ = self._attempt(fresh=True)
        return outcome

    def _attempt(self, *, fresh: bool) -> tuple[Outcome, bool]:
        """Try once. Also says whether the connection was a kept one that turned out to be dead."""
        intake: Intake | None = None
        error: TandemError | None = None
        link: Link | None = None
        try:
            link = self._attach(fresh=fresh)
            if not link.welcome.checkpoints:
                self._wanted = self._wanted._replace(checkpoint=0)
            intake = self._staging.open(secrets.randbelow((1 << 64) - 1) + 1, self._wanted)
            self._request(link, intake)
            self._clean = True
        except TandemError as caught:
            error = caught
        finally:
            if intake is not None:
                intake.close()
            if link is not None:
                self._detach(link, keep=self._clean)
        reused = link is not None and link.requests > 0
        if link is not None:
            link.requests += 1
        stale = reused and isinstance(error, PeerLostError) and not self._accepted_at
        return self._outcome(link, intake.bytes if intake else 0, error, reused=reused), stale

    # ------------------------------------------------------------------------------------------------------ internals

    def _attach(self, *, fresh: bool) -> Link:
        link = self._peer.take(fresh=fresh)
        with self._lock:
            self._link = link
            link.transport.interrupted = lambda: self._cancelled
        self._bytes_before = link.transport.received
        return link

    def _detach(self, link: Link, *, keep: bool) -> None:
        with self._lock:
            self._link = None
            link.transport.interrupted = None
        if keep:
            self._peer.give_back(link)
        else:
            link.transport.close()

    def _request(self, link: Link, intake: Intake) -> None:
        wanted = self._wanted
        if wanted.end > link.welcome.max_tokens:
            self._clean = True
            raise PeerRefusedError(
                f"{wanted.end} tokens are over the peer's limit of {link.welcome.max_tokens}. Prefill elsewhere."
            )
        layers, heads = wanted.layers or (0, 0), wanted.heads or (0, 0)
        request = PrefillRequest(
            self._tokens, wanted.start, wanted.end, *layers, *heads, self._codecs, wanted.checkpoint, self._priority
        )
        link.writer.control(request, intake.nonce, Patience(self._options.silence))
        while not self._next_frame(link, intake):
            pass

    def _next_frame(self, link: Link, intake: Intake) -> bool:
        """Receive one frame; True at the end of the request."""
        if self._cancelled:
            self._stop(link, intake.nonce)
            raise CancelledError("The hand-off was cancelled.")
        patience = self._patience()
        # While entries come faster than they are received, there is no need to wait.
        waited = "readable" if link.reader.begun() else link.transport.wait_readable(patience)
        if waited == "late":
            raise self._late()
        if waited == "woken":
            return False
        header = link.reader.header(patience)
        expect_nonce(header, intake.nonce)
        if header.type in (FrameType.DATA, FrameType.STATE):
            self._expect_accepted(header)
            link.reader.tensor(header, intake.destinations, patience)
            intake.commit(header)
            self._start()
            self._moved_at = time.monotonic()
        elif header.type == FrameType.KEEP_ALIVE:
            link.reader.nothing(header)
        elif header.type == FrameType.PROGRESS:
            self._expect_accepted(header)
            self._advance(link.reader.control(header, Progress, patience))
        elif header.type == FrameType.DONE:
            self._expect_accepted(header)
            done = link.reader.control(header, Done, patience)
            if done.payload_bytes != intake.bytes:
                raise WireError(f"The peer sent {done.payload_bytes} bytes, {intake.bytes} arrived. Prefill the rest.")
            intake.finish(done)
            self._done = done
            return True
        else:
            self._answer(link, header, intake, patience)
        return False

    def _answer(self, link: Link, header: Header, intake: Intake, patience: Patience) -> None:
        """The frames that accept or refuse a request."""
        if header.type == FrameType.BUSY:
            busy = link.reader.control(header, Busy, patience)
            self._clean = True
            raise PrefillBusyError(
                f"The prefill queue of {link.name or self._peer.address} is full. Prefill elsewhere.",
                retry_after=busy.seconds,
            )
        if header.type == FrameType.ERROR:
            problem = link.reader.control(header, Problem, patience)
            self._clean = True
            raise PeerRefusedError(
                f"The peer could not prefill ({problem.code}): {problem.message}", retry_after=problem.retry_after
            )
        accepted = link.reader.control(header, Accepted, patience)
        if self._accepted_at or accepted.codec not in (RAW, *self._codecs):
            raise WireError(f"The peer accepted twice, or in the codec {accepted.codec!r}, which was not offered.")
        self._codec = intake.codec = accepted.codec
        self._accepted_at = self._moved_at = time.monotonic()
        self._tell(Progress(0, self._wanted.end, accepted.position))
        if accepted.seconds > self._most_queue:
            self._stop(link, intake.nonce)
            raise PrefillBusyError(
                f"{link.name or self._peer.address} would begin in {accepted.seconds:.1f} s only.",
                retry_after=accepted.seconds,
            )

    def _stop(self, link: Link, nonce: int) -> None:
        """Cancel at the peer, and clear the connection for the next request."""
        patience = Patience.total(self._options.drain)
        # From here on a wake-up must not cut the draining short.
        link.transport.interrupted = None
        # Where the peer does not stop in time, or is gone, closing the connection stops it.
        with contextlib.suppress(HandoffError):
            link.writer.signal(FrameType.CANCEL, nonce, patience)
            while not self._clean:
                header = link.reader.header(patience)
                expect_nonce(header, nonce)
                scratch = memoryview(bytearray(header.length))
                link.reader.tensor(header, lambda _, scratch=scratch: (scratch,), patience)  # type: ignore[misc]
                self._clean = header.type in (FrameType.ERROR, FrameType.BUSY, FrameType.DONE)

    def _expect_accepted(self, header: Header) -> None:
        if not self._accepted_at:
            raise WireError(f"A {header.name} frame came before the request was accepted. The peer is broken.")

    def _patience(self) -> Patience:
        """Until when the next frame has to come: depends on progress alone."""
        now = time.monotonic()
        if not self._accepted_at:
            return Patience(self._options.silence, now + self._options.silence)
        limit = self._options.stall if self._started_at else self._options.queue
        return Patience(self._options.silence, self._moved_at + limit)

    def _late(self) -> PeerSilentError:
        if time.monotonic() >= self._patience().until and self._accepted_at:
            what = "computed nothing more" if self._started_at else "did not begin"
            return PeerSilentError(f"The peer is alive and {what} for too long. What is complete is kept.")
        return PeerSilentError(
            f"Nothing came from the peer for {self._options.silence:g} s. What is complete is kept; check the link."
        )

    def _start(self) -> None:
        if not self._started_at:
            self._started_at = time.monotonic()

    def _advance(self, progress: Progress) -> None:
        if progress.computing:
            self._start()
        before = self._progress
        if progress.processed > before.processed or progress.computing > before.computing:
            self._moved_at = time.monotonic()
        self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)

    def _outcome(self, link: Link | None, payload_bytes: int, error: TandemError | None, *, reused: bool) -> Outcome:
        now = time.monotonic()
        seconds = now - self._began
        if self._done is not None:
            queued, computing = self._done.queued, self._done.computing
        else:
            queued = (self._started_at or now) - self._accepted_at if self._accepted_at else 0.0
            computing = now - self._started_at if self._started_at else 0.0
        return Outcome(
            complete=self._staging.complete_through(),
            error=error,
            peer=(link.name if link else "") or f"{self._peer.address[0]}:{self._peer.address[1]}",
            codec=self._codec,
            tokens=self._wanted.end - self._wanted.start,
            cached=self._done.cached if self._done else self._progress.cached,
            payload_bytes=payload_bytes,
            wire_bytes=link.transport.received - self._bytes_before if link else 0,
            queued=queued,
            computing=computing,
            transferring=max(0.0, seconds - queued - computing),
            seconds=seconds,
            reused=reused,
            mixed=link is not None and link.mixed,
        )
