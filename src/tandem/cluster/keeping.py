"""Writes the intent map to disk behind the event loop's back, many changes at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from tandem.cluster.intents import IntentMap
from tandem.cluster.snapshot import SnapshotStore
from tandem.cluster.tasks import background
from tandem.errors import StorageError
from tandem.types.intents import Entry

log = logging.getLogger(__name__)


class Keeper:
    """Keeps `held` in `store`. What arrives while a write is under way goes into the next one.

    Args:
        deadline: longest wait for the disk, in seconds.
        retry: pause before a failed write is tried again, in seconds.
    """

    def __init__(self, held: IntentMap, store: SnapshotStore, *, deadline: float, retry: float) -> None:
        self._map = held
        self._store = store
        self._deadline = deadline
        self._retry = retry
        self._pending: dict[str, Entry] = {}
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._late: str | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def degraded(self) -> str | None:
        """Why the newest changes are not on disk; None if they are, or are on their way."""
        return self._store.degraded or self._late

    def start(self) -> None:
        """Begin to write; first of all a new generation with all there is."""
        self._wake.set()
        self._task = background(self._run(), "intents on disk")

    async def stop(self) -> None:
        """Write what is pending, within the deadline, and end."""
        self._stopping = True
        self._wake.set()
        if self._task is None:
            return
        done, _ = await asyncio.wait({self._task}, timeout=self._deadline)
        if not done:
            log.warning(
                "The disk did not answer within %g s; the newest intents are on other nodes only.", self._deadline
            )
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        # A thread that still waits for the disk holds the store's lock: closing must not wait for it.
        if done:
            await asyncio.to_thread(self._store.close)

    def keep(self, entries: Iterable[Entry]) -> asyncio.Event:
        """Have changes written soon. The event comes when they are, or could not be."""
        self._pending.update({entry.key: entry for entry in entries})
        self._wake.set()
        return self._written

    async def kept(self, written: asyncio.Event) -> None:
        """Wait until what `keep` returned comes. If the disk takes too long, go on without it: see `degraded`."""
        try:
            async with asyncio.timeout(self._deadline):
                await written.wait()
        except TimeoutError:
            self._late = (
                f"The disk did not answer within {self._deadline:g} s: what the cluster should run is kept in memory "
                "and on other nodes until it does."
            )
            log.warning("%s", self._late)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry if self._store.degraded else None):
                    await self._wake.wait()
            self._wake.clear()
            entries, self._pending = list(self._pending.values()), {}
            written, self._written = self._written, asyncio.Event()
            try:
                if self._store.wants_everything:
                    await asyncio.to_thread(self._store.replace, list(self._map), self._map.clock.last)
                elif entries:
                    await asyncio.to_thread(self._store.append, entries, self._map.clock.last)
                self._late = None
            except StorageError as error:
                # Nothing is put back: after a failure everything is written.
                log.warning("%s", error.message)
            finally:
                written.set()
            if self._stopping and not self._pending:
                return
