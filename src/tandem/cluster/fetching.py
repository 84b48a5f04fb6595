"""Where a model comes from: another node if one has it, else the hub."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from tandem.cluster.download_job import DownloadJob
from tandem.cluster.neighbours import Neighbours
from tandem.errors import CancelledError, DownloadError, NoSpaceError, NotFoundError, TandemError
from tandem.models.progress import Progress
from tandem.models.store import ModelStore

REPORT_SECONDS = 0.1
logger = logging.getLogger("tandem.cluster")


class Fetcher:
    """Brings models into the store.

    Args:
        told: called when a job has come further.
    """

    def __init__(self, store: ModelStore, neighbours: Neighbours, told: Callable[[], None]) -> None:
        self._store = store
        self._neighbours = neighbours
        self._told = told

    async def fetch(self, job: DownloadJob) -> None:
        """Fetch it. Cancelling ends it within a second; what has arrived is kept.

        Raises:
            NotFoundError: nobody has it, and it is no name that the hub could know.
            NoSpaceError: it does not fit on the disk.
            DownloadError, ModelError: nobody could send it whole.
        """

        def report(done: int, total: int) -> None:
            job.progressed(done, total)
            self._told()

        refused: list[str] = []
        for node_id, model_id in self._neighbours.having(job.names):
            try:
                return await self._neighbours.fetch(node_id, model_id, job.model_id, report)
            except NoSpaceError:
                raise
            except TandemError as error:
                logger.warning("%s does not come from node %s: %s", job.model_id, node_id, error.message)
                refused.append(error.message)
        try:
            await self._from_hub(job, report)
        except (DownloadError, NotFoundError) as error:
            if not refused or isinstance(error, NoSpaceError):
                raise
            raise DownloadError(f"{refused[-1]} And from elsewhere: {error.message}") from error

    async def _from_hub(self, job: DownloadJob, report: Callable[[int, int], None]) -> None:
        loop = asyncio.get_running_loop()
        given_up = threading.Event()
        reported = 0.0

        def progress(step: Progress) -> None:
            nonlocal reported
            if given_up.is_set():
                raise CancelledError("The download was cancelled. What has arrived is kept.")
            now = time.monotonic()
            if step.unit == "bytes" and (now - reported >= REPORT_SECONDS or step.done == step.total):
                reported = now
                loop.call_soon_threadsafe(report, step.done, step.total)

        job.work = work = loop.run_in_executor(None, self._store.obtain, job.reference, progress)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(work)
        finally:
            # The thread ends at its next byte. One that waits for a silent hub is left to its own deadline.
            given_up.set()
