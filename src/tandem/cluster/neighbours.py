"""Models that other nodes have: who has one, fetching it from there, and sending it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from tandem.cluster.local_models import LocalModels
from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.state import ClusterState
from tandem.cluster.threads import in_thread
from tandem.cluster.ways import ways_to
from tandem.errors import CorruptModelError, InvalidRequestError, NodeLostError, NotFoundError
from tandem.models.arriving import ArrivingFile, finish, prepare
from tandem.models.atomic import lock_of
from tandem.models.cards import file_name
from tandem.models.manifest import Digests, Manifest, ModelFile, manifest_of, sha256_of
from tandem.models.store import DOWNLOADS, ModelStore, is_path

FILES, DIGEST = "model-files", "model-digest"
LIST_SECONDS = 15.0
HASH_SECONDS, HASH_RATE = 30.0, 50e6
"""A node may take so long to hash a file, plus its bytes by this rate."""
ATTEMPTS = 2
"""How often a file that arrives damaged is fetched."""
LOCK_POLL_SECONDS = 0.2


class Neighbours:
    """Fetches models from other nodes, and lists this one's for them.

    Args:
        client: for speaking to them.
        state: the cluster as it is known now.
    """

    def __init__(
        self,
        node_id: str,
        store: ModelStore,
        models: LocalModels,
        client: NodeClient,
        state: Callable[[], ClusterState],
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._models = models
        self._client = client
        self._state = state
        self._digests = Digests()

    def having(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Nodes that have a complete model under one of these names, and its id there: fast links first, then those
        with little to do."""
        wanted = {name.casefold() for name in names}
        nodes = self._state().nodes
        me = nodes.get(self._node_id)
        rates: dict[str, float] = {}
        for rate in me.links if me is not None else ():
            rates[rate.node_id] = max(rates.get(rate.node_id, 0.0), rate.bandwidth or 0.0)
        found = [
            (-rates.get(node_id, 0.0), sum(runner.running for runner in facts.runners), node_id, download.model_id)
            for node_id, facts in nodes.items()
            for download in facts.downloads
            if node_id != self._node_id and download.state == "completed" and download.model_id.casefold() in wanted
        ]
        return [(node_id, model_id) for _, _, node_id, model_id in sorted(found)]

    # -------------------------------------------------------------------------------------------------------- fetching

    async def fetch(self, node_id: str, model_id: str, wanted: str, report: Callable[[int, int], None]) -> None:
        """Fetch a model from a node into the store, going on from what an earlier try left there.

        Cancelling ends it at once; what has arrived is kept.

        Args:
            model_id: its id there.
            wanted: the id that it gets here.
            report: called with the bytes that are here, and all.

        Raises:
            NodeLostError, NotFoundError: the node, or there the model, is not there (any more).
            NoSpaceError: it does not fit on the disk.
            CorruptModelError: its list of files cannot be used, or a file was damaged twice.
        """
        answer = await self._ask(node_id, FILES, LIST_SECONDS, model_id=model_id)
        try:
            manifest = msgspec.structs.replace(msgspec.convert(answer, Manifest), model_id=wanted)
        except msgspec.ValidationError as error:
            raise CorruptModelError(f"Node {node_id} lists {model_id} in a way that cannot be read: {error}") from error
        manifest.check()
        target = self._store.settings.models_dir / file_name(wanted)
        staging = self._store.settings.models_dir / DOWNLOADS / target.name
        async with _held(lock_of(target)):
            if target.is_dir():
                return
            done = await asyncio.to_thread(prepare, staging, manifest)

            def count(more: int) -> None:
                nonlocal done
                done += more
                report(done, manifest.size)

            count(0)
            for file in manifest.files:
                await self._fetch_file(node_id, model_id, file, staging, count)
            await asyncio.to_thread(finish, staging, target, manifest)

    async def _fetch_file(
        self, node_id: str, model_id: str, file: ModelFile, staging: Path, count: Callable[[int], None]
    ) -> None:
        # The node there hashes while it sends.
        deadline = HASH_SECONDS + file.size / HASH_RATE
        asked = asyncio.create_task(self._ask(node_id, DIGEST, deadline, model_id=model_id, path=file.path))
        try:
            if (staging / file.path).is_file():
                digest = await in_thread(partial(sha256_of, staging / file.path))
                if digest.hexdigest() == await asked:
                    return
                (staging / file.path).unlink()
                count(-file.size)
            for _ in range(ATTEMPTS):
                arriving = await in_thread(partial(ArrivingFile, staging, file))
                try:
                    await self._append(node_id, model_id, file, arriving, count)
                    whole = await asyncio.to_thread(arriving.keep_if, str(await asked))
                finally:
                    arriving.close()
                if whole:
                    return
                count(-arriving.size)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        raise CorruptModelError(f"{file.path} of {model_id} arrived damaged {ATTEMPTS} times from node {node_id}.")

    async def _append(
        self, node_id: str, model_id: str, file: ModelFile, arriving: ArrivingFile, count: Callable[[int], None]
    ) -> None:
        if arriving.size < file.size:
            ways = ways_to(node_id, self._state().nodes, self._node_id)
            async with self._client.file(node_id, ways, model_id, file.path, start=arriving.size) as pieces:
                async for piece in pieces:
                    if arriving.size + len(piece) > file.size:
                        raise CorruptModelError(f"Node {node_id} sends more of {file.path} than it said.")
                    await asyncio.to_thread(arriving.write, piece)
                    count(len(piece))
        if arriving.size != file.size:
            raise NodeLostError(f"Node {node_id} ended {file.path} of {model_id} in the middle.", retry_after=1.0)

    async def _ask(self, node_id: str, command: str, deadline: float, **arguments: Any) -> Any:
        ways = ways_to(node_id, self._state().nodes, self._node_id)
        return await self._client.command(node_id, ways, command, arguments, deadline=deadline)

    # --------------------------------------------------------------------------------------------------------- sending

    async def files(self, arguments: dict[str, Any]) -> Any:
        """Answers `FILES`: the manifest of a complete model.

        Raises:
            NotFoundError: it is not here, or not in a form that can be sent.
        """
        return msgspec.to_builtins(await asyncio.to_thread(self._manifest, text_of(arguments, "model_id")))

    async def digest(self, arguments: dict[str, Any]) -> Any:
        """Answers `DIGEST`: the SHA-256 of one of its files.

        Raises:
            NotFoundError: there is no such model or file here.
        """
        model_id, path = text_of(arguments, "model_id"), text_of(arguments, "path")
        return await asyncio.to_thread(lambda: self._digests.of(self._models.file_of(model_id, path)))

    def _manifest(self, model_id: str) -> Manifest:
        model = None if is_path(model_id) else self._store.find(model_id)
        if model is None or not model.ready:
            raise NotFoundError(f"This node has no complete model {model_id}.")
        return manifest_of(model)


def text_of(arguments: dict[str, Any], name: str) -> str:
    """A text among a command's arguments.

    Raises:
        InvalidRequestError: it is missing, or something else.
    """
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"The command needs a text as '{name}'. Install the same Tandem on both nodes.")
    return value


@asynccontextmanager
async def _held(lock: FileLock) -> AsyncIterator[None]:
    """Hold a lock, however long another process has it. A wait in a thread could not be given up."""
    while True:
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
            break
        await asyncio.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()
