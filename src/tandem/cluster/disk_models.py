"""The complete models on this machine's disks, looked at anew when something changed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from tandem.cluster.tasks import background
from tandem.models.store import LocalModel, ModelStore
from tandem.types.facts import DownloadFact

LOOK_SECONDS = 10.0
"""Between two looks at whether another process changed the folders: a few system calls."""
logger = logging.getLogger("tandem.cluster")


class DiskModels:
    """Knows what is complete without reading the disks again and again.

    Args:
        changed: called after every look at the disks.

    Attributes:
        facts: what the cluster is told of each, by its id in lower case.
    """

    def __init__(self, store: ModelStore, changed: Callable[[], object]) -> None:
        self._store = store
        self._changed = changed
        self._scanning = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.facts: dict[str, DownloadFact] = {}

    def start(self) -> None:
        """Look at the disks, and keep looking for changes."""
        self._task = background(self._watch(), "models on disk")

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def rescan(self) -> None:
        """Look at the disks now."""
        async with self._scanning:
            try:
                found = await asyncio.to_thread(self._store.list)
            except OSError as error:
                logger.warning("The models on this machine cannot be listed: %s", error)
                return
            self.facts = {model.model_id.casefold(): complete(model) for model in found if model.ready}
        self._changed()

    async def _watch(self) -> None:
        seen = None
        while True:
            now = await asyncio.to_thread(self._folders)
            if now != seen:
                seen = now
                await self.rescan()
            await asyncio.sleep(LOOK_SECONDS)

    def _folders(self) -> list[tuple[str, int]]:
        """The folders that models come and go in, with their times of change."""
        settings = self._store.settings
        others = [Path(name).expanduser() for name in settings.models_dirs.split(os.pathsep) if name]
        found: list[tuple[str, int]] = []
        for folder in (settings.models_dir, settings.converted_dir, *others):
            with contextlib.suppress(OSError):
                found.append((str(folder), folder.stat().st_mtime_ns))
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
                found += sorted((entry.path, entry.stat().st_mtime_ns) for entry in visible)
        return found


def complete(model: LocalModel) -> DownloadFact:
    """What the cluster is told of a model that is all here."""
    return DownloadFact(model.model_id, "completed", model.size_bytes, model.size_bytes)
