"""A zenoh session that is opened anew when it has to be, with everything that was declared on it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import zenoh

from tandem.cluster.bus.addresses import Watch
from tandem.cluster.bus.config import BusOptions, zenoh_config
from tandem.cluster.bus.pump import pump
from tandem.cluster.bus.sockets import release_udp_port, switch_linger_off
from tandem.errors import ConfigError
from tandem.kv.tls import identity_for

CLOSE_DEADLINE = 10.0
"""Longest wait for zenoh to close, in seconds; usually milliseconds."""
RETRY, RETRY_LONGEST = 0.1, 2.0
"""Seconds between attempts to open anew, doubling; a port may take a moment until it is free again."""
_log = logging.getLogger(__name__)


class Undeclarable(Protocol):
    """Anything that was declared on a session."""

    def undeclare(self) -> None: ...


Declare: TypeAlias = Callable[[zenoh.Session], Undeclarable]


@dataclass(frozen=True)
class LinkChange:
    """A link to another node came up or went down. `source` and `destination` are zenoh's, `scheme/host:port`.

    Attributes:
        zid: zenoh's id of the other side, which its heartbeats name as well.
        name: node id in the certificate of the other side; None without a secret.
    """

    up: bool
    zid: str
    source: str
    destination: str
    name: str | None

    @classmethod
    def of(cls, link: zenoh.Link, *, up: bool) -> LinkChange:
        """What zenoh says of a link."""
        return cls(up, str(link.zid), str(link.src), str(link.dst), link.auth_identifier)


@dataclass
class Declaration:
    """One declaration, which outlives the session it is on."""

    make: Declare
    made: Undeclarable | None = None


class Session:
    """Opens, reopens and closes. All methods are called on one event loop, `wait_open` on other threads.

    Args:
        on_link: called on the loop.
        on_reopened: called on the loop before anything is heard on the new session, with the reason.
    """

    def __init__(
        self, options: BusOptions, *, on_link: Callable[[LinkChange], None], on_reopened: Callable[[str], None]
    ) -> None:
        self.options = options
        self._identity = identity_for(options.secret, options.node_id)
        self._on_link = on_link
        self._on_reopened = on_reopened
        self._declarations: list[Declaration] = []
        self._lock = asyncio.Lock()
        self._zenoh: zenoh.Session | None = None
        self._listener: Undeclarable | None = None
        self._open = threading.Event()
        self._closed = False
        self._extra: tuple[str, ...] = ()
        self._watch: Watch | None = None
        self._reopening: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def zid(self) -> str:
        """zenoh's id of this side; empty while no session is open."""
        return str(self._zenoh.zid()) if self._zenoh is not None else ""

    def links(self) -> list[LinkChange]:
        """The links that are up."""
        session = self._zenoh
        return [] if session is None else [LinkChange.of(link, up=True) for link in session.info.links()]

    def wait_open(self, timeout: float) -> zenoh.Session | None:
        """The open session; None when there is none in time or any more. Blocks: for other threads than the loop's."""
        self._open.wait(timeout)
        return self._zenoh

    async def open(self) -> None:
        """Open for the first time.

        Raises:
            ConfigError: the port is taken, or zenoh refuses the configuration.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._open_now)
        except zenoh.ZError as error:
            raise ConfigError(
                f"The cluster's port {self.options.port} cannot be opened: {error}. If another program has it, set "
                "TANDEM_CLUSTER_PORT to another port, or to 0 for a free one."
            ) from error
        if not self.options.loopback_only:
            self._watch = Watch(self._changed)
            self._watch.start()

    async def reopen(self, reason: str, endpoints: tuple[str, ...] = ()) -> None:
        """Close and open anew, dialling `endpoints` as well from now on. Does nothing once closed."""
        async with self._lock:
            self._extra = tuple(dict.fromkeys([*endpoints, *self._extra]))[:64]
            _log.info("opening the cluster's session anew: %s", reason)
            await asyncio.to_thread(self._close_now)
            wait = RETRY
            while not self._closed:
                self._on_reopened(reason)
                try:
                    await asyncio.to_thread(self._open_now)
                    return
                except zenoh.ZError as error:
                    _log.warning("the cluster's session cannot be opened, trying again: %s", error)
                    await asyncio.sleep(wait)
                    if self.options.scheme == "quic" and release_udp_port(self.options.port):
                        _log.info("port %d was still held by the closed session", self.options.port)
                    wait = min(2 * wait, RETRY_LONGEST)

    async def declare(self, make: Declare) -> Declaration:
        """Declare now and on every later session."""
        declaration = Declaration(make)
        async with self._lock:
            self._declarations.append(declaration)
            if self._zenoh is not None:
                declaration.made = await asyncio.to_thread(make, self._zenoh)
        return declaration

    async def withdraw(self, declaration: Declaration) -> None:
        """Undo `declare`."""
        async with self._lock:
            self._declarations.remove(declaration)
            if declaration.made is not None and self._zenoh is not None:
                await asyncio.to_thread(declaration.made.undeclare)

    async def close(self) -> None:
        """Close for good. Others see this node's tokens go at once."""
        self._closed = True
        if self._watch is not None:
            await asyncio.to_thread(self._watch.stop)
        for task in self._reopening:
            task.cancel()
        async with self._lock:
            try:
                await asyncio.wait_for(asyncio.to_thread(self._close_now), CLOSE_DEADLINE)
            except TimeoutError:
                _log.error("zenoh did not close within %.0f s; left to the end of the process", CLOSE_DEADLINE)

    def _changed(self, reason: str) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._reopen_soon, reason)
        except RuntimeError:  # the loop is closed, and with it goes everything here
            _log.debug("no loop to open the session on: %s", reason)

    def _reopen_soon(self, reason: str) -> None:
        assert self._loop is not None
        if not self._closed and not self._reopening:
            task = self._loop.create_task(self.reopen(reason))
            self._reopening.add(task)
            task.add_done_callback(self._reopening.discard)

    def _open_now(self) -> None:
        try:
            session = zenoh.open(zenoh_config(self.options, self._identity, self._extra))
        except zenoh.ZError:
            session = zenoh.open(zenoh_config(self.options, self._identity, self._extra, ipv6=False))
        # Without a close the interpreter hangs in its exit.
        atexit.register(self._close_now)
        listener = session.info.declare_link_events_listener(zenoh.handlers.FifoChannel(1024), history=True)
        # Undeclared as soon as nobody holds it.
        self._listener = listener
        pump("links", listener.handler.recv, self._link)
        for declaration in self._declarations:
            declaration.made = declaration.make(session)
        self._zenoh = session
        self._open.set()

    def _close_now(self) -> None:
        session, self._zenoh = self._zenoh, None
        self._open.clear()
        if session is not None:
            atexit.unregister(self._close_now)
            session.close()

    def _link(self, event: Any) -> None:
        up = event.kind == zenoh.SampleKind.PUT
        if up and self.options.scheme == "tcp":
            switch_linger_off()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_link, LinkChange.of(event.link, up=up))
