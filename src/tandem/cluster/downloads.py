"""Fetching models and deleting them, on this machine or another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.cluster.control import ControlPlane
from tandem.cluster.disk_models import DiskModels, complete
from tandem.cluster.download_job import DownloadJob
from tandem.cluster.facts.throttle import Throttle
from tandem.cluster.fetching import Fetcher
from tandem.cluster.local_models import LocalModels
from tandem.cluster.neighbours import DIGEST, FILES, Neighbours, text_of
from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.nodeport.server import Handler
from tandem.cluster.tasks import background
from tandem.cluster.ways import ways_to
from tandem.engines.sim.profile import is_sim_reference
from tandem.errors import (
    DeadlineError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    PlacementError,
    StorageError,
    TandemError,
)
from tandem.models.progress import Progress, ProgressCallback, ignore_progress
from tandem.models.store import LocalModel, ModelStore, is_path
from tandem.types.facts import DownloadFact

START, CANCEL, DELETE = "download-start", "download-cancel", "download-delete"
AT_ONCE = 2
"""Downloads that run at the same time; others wait."""
BEGIN_SECONDS = 15.0
"""A download that has not begun by then is answered as pending."""
CANCEL_SECONDS = 1.0
DELETE_SECONDS = 30.0
COMMAND_SECONDS = 70.0
"""For another node's answer: longer than what it may take there."""
TELL_SECONDS = 0.25
FORMING_SECONDS = 3.0
"""A node that has just started waits so long for one that has a model before it asks the hub: clusters form within two
seconds, and what a cluster has does not come over the internet again."""
logger = logging.getLogger("tandem.cluster")


class Downloads:
    """What is on this machine's disks and on its way there, told to the cluster; and the same done on other nodes.

    Attributes:
        handlers: the commands that other nodes may have done here.
    """

    def __init__(
        self, node_id: str, store: ModelStore, models: LocalModels, client: NodeClient, control: ControlPlane
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._models = models
        self._client = client
        self._control = control
        self._neighbours = Neighbours(node_id, store, models, client, lambda: control.state)
        self._jobs: dict[str, DownloadJob] = {}
        self._soon = Throttle(self._tell, TELL_SECONDS, asyncio.get_running_loop())
        self._disk = DiskModels(store, self._tell)
        self._fetcher = Fetcher(store, self._neighbours, self._soon.request)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._formed_at = 0.0
        self.handlers: dict[str, Handler] = {
            START: lambda arguments: self._answer(self._start(text_of(arguments, "model_id"))),
            CANCEL: lambda arguments: self._answer(self._cancel(text_of(arguments, "model_id"))),
            DELETE: lambda arguments: self._delete(text_of(arguments, "model_id")),
            FILES: self._neighbours.files,
            DIGEST: self._neighbours.digest,
        }

    def begin(self) -> None:
        """Look at the disks, and keep looking for changes. The node begins to find others now."""
        settings = self._store.settings
        if settings.cluster_discovery or settings.cluster_peers:
            self._formed_at = asyncio.get_running_loop().time() + FORMING_SECONDS
        self._disk.start()

    async def stop(self) -> None:
        """End every download; what has arrived is kept."""
        self._disk.stop()
        self._soon.close()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * CANCEL_SECONDS)

    # -------------------------------------------------------------------------------------------------------- commands

    async def start(self, node_id: str, model_id: str) -> DownloadFact:
        """Have a node fetch a model: from a node that has it, else from the hub. Answers when the transfer has begun.

        Raises:
            NotFoundError: no such node, or no such model anywhere.
            InvalidRequestError: not a model's name.
            NoSpaceError: it does not fit on the disk there.
            DownloadError: nobody could send it.
            NodeLostError, DeadlineError: the node does not answer.
        """
        return await self._have(node_id, START, model_id, self._start)

    async def cancel(self, node_id: str, model_id: str) -> DownloadFact:
        """Have a node stop a download, within a second. What has arrived is kept for the next start.

        Raises:
            NotFoundError: no such node, or it fetches no such model.
            NodeLostError, DeadlineError: the node does not answer.
        """
        return await self._have(node_id, CANCEL, model_id, self._cancel)

    async def delete(self, node_id: str, model_id: str) -> int:
        """Have a node delete a model, or what an unfinished download left of it; the bytes freed.

        Raises:
            NotFoundError: no such node, or no such model on its disk.
            PlacementError: an instance there uses it.
            UnsupportedError: it does not belong to the node's store.
            NodeLostError, DeadlineError: the node does not answer.
        """
        if node_id == self._node_id:
            return await self._delete(model_id)
        return int(await self._ask(node_id, DELETE, model_id))

    async def _have(self, node_id: str, command: str, model_id: str, here: Callable[[str], Any]) -> DownloadFact:
        if node_id == self._node_id:
            fact: DownloadFact = await here(model_id)
            return fact
        return msgspec.convert(await self._ask(node_id, command, model_id), DownloadFact)

    async def _ask(self, node_id: str, command: str, model_id: str) -> Any:
        ways = ways_to(node_id, self._control.state.nodes, self._node_id)
        return await self._client.command(node_id, ways, command, {"model_id": model_id}, deadline=COMMAND_SECONDS)

    async def _answer(self, outcome: Any) -> Any:
        return msgspec.to_builtins(await outcome)

    async def _start(self, model_id: str) -> DownloadFact:
        self._check_name(model_id)
        job = self._job(model_id)
        if job is None or not job.running:
            found = await asyncio.to_thread(self._store.find, model_id)
            if found is not None and found.ready:
                return complete(found)
            job = self._begin(model_id)
        job.asked = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_SECONDS):
                await job.begun.wait()
        if job.error is not None:
            raise job.error
        return job.fact()

    async def _cancel(self, model_id: str) -> DownloadFact:
        job = self._job(model_id)
        if job is None or not job.running or job.task is None:
            raise NotFoundError(f"Node {self._node_id} is not fetching {model_id}.")
        await self._end(job)
        return job.fact()

    async def _delete(self, model_id: str) -> int:
        self._check_name(model_id)
        names = self._names(model_id)
        for intent in self._control.state.instances.values():
            here = any(shard.node_id == self._node_id for shard in intent.shards)
            if here and not names.isdisjoint({intent.model_id.casefold(), intent.reference.casefold()}):
                raise PlacementError(
                    f"Instance {intent.instance_id} on node {self._node_id} uses {model_id}. Remove the instance first."
                )
        job = self._job(model_id)
        if job is not None and job.running:
            await self._end(job)
        canonical = job.model_id if job is not None else self._canonical(model_id)
        late = DeadlineError(f"{model_id} is still being written after {DELETE_SECONDS:g} s. Delete it again later.")
        writing = {job.work} if job is not None and job.work is not None else set()
        if writing and not (await asyncio.wait(writing, timeout=DELETE_SECONDS))[0]:
            raise late
        try:
            async with asyncio.timeout(DELETE_SECONDS):
                freed = await asyncio.to_thread(self._store.remove, canonical)
        except TimeoutError as error:
            raise late from error
        except OSError as error:
            raise StorageError(f"{model_id} cannot be deleted: {error}.") from error
        finally:
            await self._disk.rescan()
        self._jobs.pop(canonical.casefold(), None)
        self._tell()
        return freed

    # ------------------------------------------------------------------------------------------------------ for itself

    async def obtain(self, reference: str, report: ProgressCallback = ignore_progress) -> LocalModel | str:
        """A model for this machine: from its disks, else from a node that has it, else from the hub.

        Args:
            report: told how far it is, in any thread.

        Raises:
            NotFoundError, ModelError: there is no such model, or it could not be had.
        """
        if is_sim_reference(reference):
            return reference
        if not is_path(reference) and await asyncio.to_thread(self._store.find, reference) is None:
            await self._arrival(reference, report)
        model = await self._models.obtain(reference, report)
        if isinstance(model, LocalModel) and model.model_id.casefold() not in self._disk.facts:
            await self._disk.rescan()
        return model

    async def _arrival(self, reference: str, report: ProgressCallback) -> None:
        def step(done: int, total: int) -> None:
            report(Progress("download", done, total, "bytes"))

        job = self._job(reference)
        if job is None or not job.running:
            job = self._begin(reference)
        assert job.task is not None
        job.waiters += 1
        job.watchers.append(step)
        try:
            await asyncio.wait({job.task})
        finally:
            job.waiters -= 1
            job.watchers.remove(step)
            if not job.waiters and not job.asked:
                job.task.cancel()
        if job.state == "cancelled":
            raise ModelError(
                f"The download of {job.model_id} was cancelled. Fetch it again, and place the instance anew."
            )
        if job.error is not None:
            raise job.error

    # ----------------------------------------------------------------------------------------------------------- a job

    def _check_name(self, model_id: str) -> None:
        if is_path(model_id) or is_sim_reference(model_id):
            raise InvalidRequestError(f"{model_id!r} is no model's name. GET /models lists them.", param="model_id")

    def _canonical(self, reference: str) -> str:
        card = self._store.cards.get(reference)
        return card.model_id if card is not None else reference

    def _names(self, reference: str) -> frozenset[str]:
        card = self._store.cards.get(reference)
        return (card.names if card is not None else frozenset()) | {reference.casefold()}

    def _job(self, reference: str) -> DownloadJob | None:
        return self._jobs.get(self._canonical(reference).casefold())

    def _begin(self, reference: str) -> DownloadJob:
        job = DownloadJob(reference, self._canonical(reference), self._names(reference))
        self._jobs[job.model_id.casefold()] = job
        job.task = background(self._run(job), f"download {job.model_id}")
        job.task.add_done_callback(lambda _: job.stopped())
        self._tell()
        return job

    async def _end(self, job: DownloadJob) -> None:
        assert job.task is not None
        job.task.cancel()
        await asyncio.wait({job.task}, timeout=CANCEL_SECONDS)

    async def _run(self, job: DownloadJob) -> None:
        try:
            await self._formed(job)
            async with self._slots:
                job.state = "ongoing"
                await self._fetcher.fetch(job)
        except asyncio.CancelledError:
            job.ended("cancelled")
            raise
        except TandemError as error:
            logger.warning("download %s: %s", job.model_id, error.message)
            job.ended("failed", error)
        except OSError as error:
            job.ended("failed", StorageError(f"{job.model_id} cannot be written: {error}."))
        else:
            await self._disk.rescan()
            job.ended("completed")
            self._jobs.pop(job.model_id.casefold(), None)
        finally:
            self._tell()

    async def _formed(self, job: DownloadJob) -> None:
        """Wait until a node has the model, or the cluster has had the time to form."""
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout_at(self._formed_at), self._control.log.subscribe() as events:
                while not self._neighbours.having(job.names):
                    await anext(events)

    # ----------------------------------------------------------------------------------------------------------- facts

    def facts(self) -> list[DownloadFact]:
        """Complete models, and those on their way, by id."""
        under_way = {key: job.fact() for key, job in self._jobs.items() if job.running or key not in self._disk.facts}
        merged = self._disk.facts | under_way
        return [merged[key] for key in sorted(merged)]

    def _tell(self) -> bool:
        self._control.facts.set_downloads(self.facts())
        return True
