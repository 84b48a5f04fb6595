"""The server's side of one connection: a thread that shakes hands, then serves one request after the other.

The thread alone touches the socket. While it sends it looks for a `cancel` between frames, and while it has nothing to
send it waits for entries, a `cancel`, and the next keep-alive at the same time.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import (
    CancelledError,
    HandoffError,
    InvalidRequestError,
    PrefillBusyError,
    TandemError,
    WireError,
)
from tandem.kv.codec import negotiate
from tandem.kv.control import Accepted, Busy, Done, PrefillRequest, Problem, Progress, Welcome
from tandem.kv.conversion import converted
from tandem.kv.frames import FrameReader, FrameWriter
from tandem.kv.handshake import expect_nonce, greet_client
from tandem.kv.intervals import Span
from tandem.kv.job import PrefillJob
from tandem.kv.outgoing import frames_of
from tandem.kv.plan import Plan, Wanted
from tandem.kv.transport import Patience, Transport
from tandem.kv.wire import FrameType, Header

if TYPE_CHECKING:
    from tandem.kv.server import PrefillServer

logger = logging.getLogger(__name__)


class Connection:
    """Serves one accepted connection until it ends. `run` is its thread's function."""

    def __init__(self, server: PrefillServer, transport: Transport, address: str) -> None:
        options = server.options
        self.transport = transport
        self._server = server
        self._options = options
        self._address = address
        self._client = address
        self._wanted = server.layout
        self._reader = FrameReader(transport, max_request_bytes=4 * options.max_tokens + 4096)
        self._writer = FrameWriter(transport)
        self._patience = Patience(options.send_seconds)
        self._last_nonce = 0

    def run(self, shaken: Callable[[], None]) -> None:
        """Serve, then close the transport. `shaken` is called once the handshake is over, whatever came of it."""
        try:
            try:
                self._shake_hands()
            finally:
                shaken()
            while self._next_request():
                pass
        except (HandoffError, ssl.SSLError) as error:
            logger.info("Connection of %s ended: %s", self._client, error)
        except CancelledError:
            logger.debug("Connection of %s ended: the server is closing", self._client)
        finally:
            self.transport.close()

    def _shake_hands(self) -> None:
        options = self._options
        patience = Patience.total(options.handshake_seconds)
        self.transport.handshake(patience)
        welcome = Welcome(
            fingerprint=self._server.fingerprint,
            codecs=options.codecs,
            max_tokens=options.max_tokens,
            keep_alive=options.keep_alive,
            node=options.node,
            checkpoints=self._server.checkpoints,
        )
        hello = greet_client(self.transport, self._reader, self._writer, welcome, patience)
        self._client = self.transport.peer_name() or hello.node or self._address
        # The handshake let float types differ and nothing else.
        self._wanted = converted(self._server.layout, hello.fingerprint.dtype) or self._server.layout

    def _next_request(self) -> bool:
        """Serve one request; False at the end of the stream, or if none came for long."""
        if self.transport.wait_readable(Patience(self._options.idle_seconds)) == "late":
            return False
        header = self._reader.header(self._patience)
        if header.type == FrameType.CANCEL:
            # It crossed the end of its request on the way.
            self._reader.nothing(header)
            return True
        request = self._reader.control(header, PrefillRequest, self._patience)
        try:
            job, codec = self._job(header, request)
            admission = self._server.producer.submit(job)
        except PrefillBusyError as error:
            self._writer.control(Busy(error.retry_after or 0.0), header.nonce, self._patience)
        except HandoffError:
            raise
        except TandemError as error:
            self._problem(error, header.nonce)
        else:
            try:
                accepted = Accepted(admission.position, admission.seconds, codec)
                self._writer.control(accepted, header.nonce, self._patience)
                self._stream(job, header.nonce, codec)
            finally:
                self._drop(job)
        return True

    def _job(self, header: Header, request: PrefillRequest) -> tuple[PrefillJob, str]:
        options = self._options
        if header.nonce in (0, self._last_nonce):
            raise InvalidRequestError("The request's nonce was used before. Draw a fresh one.", param="nonce")
        self._last_nonce = header.nonce
        if len(request.tokens) != 4 * request.end:
            raise InvalidRequestError(
                f"{len(request.tokens)} bytes are not the first {request.end} token ids. Send exactly those.",
                param="tokens",
            )
        if request.end > options.max_tokens:
            raise InvalidRequestError(
                f"{request.end} tokens are over this server's {options.max_tokens}. Prefill elsewhere.", param="end"
            )
        layers = Span(request.layer_start, request.layer_end) if request.layer_end else None
        heads = Span(request.head_start, request.head_end) if request.head_end else None
        if request.checkpoint and not self._server.checkpoints:
            raise InvalidRequestError(
                "This server has windows and states for the end of a prompt alone. Ask without checkpoints.",
                param="checkpoint",
            )
        wanted = Wanted(request.start, request.end, layers, heads, request.checkpoint)
        job = PrefillJob(
            Plan(self._server.layout, wanted),
            np.frombuffer(request.tokens, np.dtype("<u4")),
            client=self._client,
            priority=request.priority,
            backlog_bytes=options.backlog_bytes,
            wake=self.transport.wake,
        )
        return job, negotiate(request.codecs, options.codecs)

    def _stream(self, job: PrefillJob, nonce: int, codec: str) -> None:
        """Send what the job has until it ends or is cancelled."""
        sent, told, payload_bytes = time.monotonic(), Progress(0, job.plan.wanted.end), 0
        while True:
            # In this order: what was emitted before the end must not be missed.
            end, item = job.end, job.take()
            if item is not None:
                size, wanted = self._options.frame_bytes, self._wanted
                for frame in frames_of(item, job.plan.layout, nonce, codec, size, wanted=wanted):
                    if self._cancelled(job, nonce):
                        return
                    payload_bytes += self._writer.tensor(frame.header, frame.views, self._patience)
                sent = time.monotonic()
                continue
            if isinstance(end, Done):
                done = Done(end.counts, end.end, payload_bytes, end.queued, end.computing, end.cached)
                self._writer.control(done, nonce, self._patience)
                return
            if end is not None:
                self._problem(end, nonce)
                return
            if job.latest_progress != told:
                told = job.latest_progress
                self._writer.control(told, nonce, self._patience)
                sent = time.monotonic()
            quiet = self._options.keep_alive - (time.monotonic() - sent)
            outcome = self.transport.wait_readable(Patience(max(0.0, quiet)))
            if outcome == "late":
                self._writer.signal(FrameType.KEEP_ALIVE, nonce, self._patience)
                sent = time.monotonic()
            elif outcome == "readable" and self._cancelled(job, nonce):
                return

    def _cancelled(self, job: PrefillJob, nonce: int) -> bool:
        """Look for a `cancel`, and answer it."""
        if not self.transport.readable():
            return False
        header = self._reader.header(self._patience)
        expect_nonce(header, nonce)
        if header.type != FrameType.CANCEL:
            raise WireError(f"A {header.name} frame came during a prefill; only cancel may. The peer is broken.")
        self._reader.nothing(header)
        self._drop(job)
        self._problem(CancelledError("The prefill was cancelled, as asked."), nonce)
        return True

    def _drop(self, job: PrefillJob) -> None:
        """Tell the producer that nobody wants the rest, if there is one."""
        if job.end is None and not job.cancelled:
            job.cancel()
            self._server.producer.cancel(job)
        job.cancel()

    def _problem(self, error: TandemError, nonce: int) -> None:
        problem = Problem(error.code, error.message[:4096], error.retry_after)
        self._writer.control(problem, nonce, self._patience)
