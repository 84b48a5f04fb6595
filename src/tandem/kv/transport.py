"""Bytes over one connected socket, plain or TLS, in and out of buffers that already exist.

Sockets are non-blocking and every wait goes through `poll`, together with a wake-up pipe: so a wait has two deadlines
(none of the bytes came for a while; the whole took too long), and another thread can interrupt it. One thread owns a
transport; only `wake` and `abort` may be called from others.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from tandem.errors import CancelledError, PeerLostError, PeerSilentError
from tandem.kv.buffers import MAX_BUFFERS, pieces, split

_PIECE = 512 << 10
"""Bytes received at a time: few enough to be in the processor's cache still when their checksum is computed."""


class Digest(Protocol):
    """A running checksum."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""
        ...


class Patience(NamedTuple):
    """How long to wait: `idle` seconds without a single byte, and never beyond `until` (monotonic clock)."""

    idle: float
    until: float = float("inf")

    @classmethod
    def total(cls, seconds: float) -> Patience:
        """Wait no longer than this in all."""
        return cls(seconds, time.monotonic() + seconds)


class Transport:
    """Owns a connected socket. Not thread-safe but for `wake` and `abort`.

    Attributes:
        sent, received: bytes so far, without TLS's own.
        interrupted: asked after a `wake` in the middle of a transfer; True ends that in `CancelledError`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            # Control frames are small and awaited. A Unix socket has no such option.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        # What `recv_into` comes to, with a call less for each record. Its type stub knows only of bytes.
        self._read_tls: Any = self._tls.read if self._tls is not None else None
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        # `wake` must not write to a descriptor that `close` gave back and somebody else got.
        self._lock = threading.Lock()
        self._aborted = False
        self._closed = False
        self.interrupted: Callable[[], bool] | None = None
        self.sent = 0
        self.received = 0

    # ------------------------------------------------------------------------------------------- from other threads

    def wake(self) -> None:
        """End a `wait_readable` early."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending already
                    os.write(self._waker, b"\0")

    def abort(self) -> None:
        """Make every wait, the present one included, end in `CancelledError`."""
        self._aborted = True
        self.wake()

    # -------------------------------------------------------------------------------------------------- owner's side

    def handshake(self, patience: Patience) -> None:
        """Do the TLS handshake.

        Raises:
            ssl.SSLError: the peer has no certificate of our authority, or speaks something else.
            PeerLostError, PeerSilentError: the connection ended or a deadline passed.
        """
        while self._tls is not None:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, patience)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, patience)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                raise PeerLostError(f"The connection ended in the TLS handshake ({error}). Is the peer up?") from None
            except ssl.SSLError:
                raise
            except OSError as error:
                raise PeerLostError(f"The connection ended in the TLS handshake ({error}). Is the peer up?") from error
            else:
                return

    def send(self, views: Sequence[memoryview | bytes], patience: Patience) -> None:
        """Send all bytes of all buffers, in order, without joining them.

        Raises:
            PeerLostError, PeerSilentError, CancelledError: as for every wait.
        """
        pending = [memoryview(view) for view in views if len(view)]
        while pending:
            try:
                if self._tls is not None:
                    count = self._tls.send(pending[0])
                else:
                    count = self._socket.sendmsg(pending[:MAX_BUFFERS])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, patience)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, patience)
            except OSError as error:
                raise PeerLostError(f"The peer closed the connection ({error}). Is it still up?") from error
            else:
                self.sent += count
                pending = split(pending, count)[1]

    def receive(
        self,
        views: Sequence[memoryview],
        patience: Patience,
        *,
        digest: Digest | None = None,
        ahead: memoryview | None = None,
    ) -> int:
        """Fill all buffers, in order. Returns how many bytes of `ahead` were filled along with them.

        Args:
            digest: is updated with the bytes as they come, while the processor still has them in its cache.
            ahead: memory for what comes next; what of it is there already spares a system call later.

        Raises:
            PeerLostError: the connection ended before they were full.
            PeerSilentError, CancelledError: as for every wait.
        """
        views = list(filter(len, views))
        if self._tls is not None:
            for view in views:
                self._fill(view, patience, digest)
            return 0
        early = 0
        while views:
            now, views = pieces(views, _PIECE)
            size = sum(map(len, now))
            if ahead is not None and not views:
                count = self._receive_some([*now, ahead], patience)
                early = max(0, count - size)
                count -= early
            else:
                count = self._receive_some(now, patience)
            if count < size:
                now, rest = split(now, count)
                views = [*rest, *views]
            if digest is not None:
                for view in now:
                    digest.update(view)
        return early

    def _fill(self, view: memoryview, patience: Patience, digest: Digest | None) -> None:
        """Fill one buffer from TLS, whose records of 16 KiB come one at a time."""
        filled, digested, size = 0, 0, len(view)
        read = self._read_tls
        while filled < size:
            # The loop that all bytes go through: every call less for a record shows in the throughput.
            try:
                count = read(size - filled, view[filled:])
            except OSError:  # TLS's own among them
                count = self._receive_some([view[filled:]], patience)
            else:
                if not count:
                    raise _ended()
                self.received += count
            filled += count
            if digest is not None and (filled == size or filled - digested >= _PIECE):
                digest.update(view[digested:filled])
                digested = filled

    def _receive_some(self, views: list[memoryview], patience: Patience) -> int:
        while True:
            try:
                return self._receive_into(views)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, patience)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, patience)

    def take(self, view: memoryview) -> int:
        """Receive what is there already of `view`'s bytes, without waiting. Returns how many.

        Raises:
            PeerLostError: the connection ended.
        """
        try:
            return self._receive_into([view])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def _receive_into(self, views: list[memoryview]) -> int:
        try:
            if self._tls is not None:
                count: int = self._read_tls(len(views[0]), views[0])
            elif len(views) == 1:
                count = self._socket.recv_into(views[0])
            else:
                count = self._socket.recvmsg_into(views)[0]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError as error:
            raise PeerLostError(f"The connection broke ({error}). Is the peer still up?") from error
        if not count:
            raise _ended()
        self.received += count
        return count

    def wait_readable(self, patience: Patience) -> Literal["readable", "woken", "late"]:
        """Wait for a first byte (or the end of the stream), a `wake`, or a deadline.

        Raises:
            CancelledError: the transport was aborted.
        """
        if self._tls is not None and self._tls.pending():
            return "readable"
        return self._poll_for(select.POLLIN, patience)

    def readable(self) -> bool:
        """Whether a byte, or the end of the stream, is there already."""
        if self._tls is not None and self._tls.pending():
            return True
        self._poll.modify(self._socket, select.POLLIN)
        return any(descriptor != self._woken for descriptor, _ in self._poll.poll(0))

    def _wait(self, event: int, patience: Patience) -> None:
        """Wait, in the middle of something, until the socket is ready."""
        while (outcome := self._poll_for(event, patience)) != "readable":
            if outcome == "late":
                raise PeerSilentError("The peer did nothing for too long. Check whether it hangs, or the link.")
            if self.interrupted is not None and self.interrupted():
                raise CancelledError("The hand-off was cancelled.")

    def _poll_for(self, event: int, patience: Patience) -> Literal["readable", "woken", "late"]:
        now = time.monotonic()
        self._poll.modify(self._socket, event)
        remaining = min(patience.idle, patience.until - now)
        if self._aborted:
            raise CancelledError("The hand-off was cancelled: this side is closing.")
        ready = self._poll.poll(max(0.0, min(remaining * 1000 + 1, 1e9)))
        woken = any(descriptor == self._woken for descriptor, _ in ready)
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._aborted:
            raise CancelledError("The hand-off was cancelled: this side is closing.")
        if woken:
            return "woken"
        return "readable" if ready else "late"

    def peer_name(self) -> str | None:
        """The common name in the peer's certificate; None without TLS."""
        if self._tls is None:
            return None
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        for pairs in certificate.get("subject", ()):
            for key, value in pairs:
                if key == "commonName":
                    return str(value)
        return None

    def close(self) -> None:
        """Close the socket. Idempotent; by the owner only, after its last wait."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            os.close(self._waker)
            os.close(self._woken)


def _ended() -> PeerLostError:
    return PeerLostError("The peer closed the connection in the middle. Is it still up?")
