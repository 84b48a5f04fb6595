"""One machine: its instances, and the way from a model name to a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tandem.cluster.identity import node_id
from tandem.cluster.instances import InstanceStatus, LocalInstance, LocalInstances
from tandem.config import Settings
from tandem.engines.sim.profile import is_sim_reference
from tandem.errors import InstanceNotReadyError, NotFoundError, TandemError
from tandem.models.store import LocalModel, ModelStore
from tandem.runner.stream import Stream
from tandem.types import GenerationRequest

__all__ = ["InstanceStatus", "Node", "Stream"]


class Node:
    """Everything that runs on this machine.

    Args:
        settings: folders, limits, deadlines.

    Attributes:
        local: the instances on this machine.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.node_id = node_id(settings.home)
        self.store = ModelStore(settings)
        self.local = LocalInstances(settings, self.node_id)
        self._expected: list[str] = []

    async def start(self) -> None:
        """Nothing runs yet; instances are added with `launch`."""

    async def stop(self) -> None:
        """Stop every instance, ending their streams with an error."""
        await self.local.stop()

    def launch(self, model: LocalModel | str) -> str:
        """Create an instance on this machine and begin to load it; see `LocalInstances.launch`."""
        return self.local.launch(model)

    @property
    def expected(self) -> tuple[str, ...]:
        """References of models that are being fetched or converted and will be served."""
        return tuple(self._expected)

    @contextmanager
    def expecting(self, references: Iterable[str]) -> Iterator[None]:
        """While the block runs, requests for these models are told to come back instead of that there are none."""
        added = list(references)
        self._expected.extend(added)
        try:
            yield
        finally:
            for reference in added:
                self._expected.remove(reference)

    async def obtain(self, reference: str) -> LocalModel | str:
        """Find (or fetch) the model that `reference` names, off the event loop. `sim` references stay as they are.

        Raises:
            NotFoundError, ModelError: there is no such model, or it could not be fetched or converted.
        """
        if is_sim_reference(reference):
            return reference
        return await asyncio.to_thread(self.store.obtain, reference)

    async def remove(self, instance_id: str) -> None:
        """Stop one instance.

        Raises:
            NotFoundError: there is no such instance.
        """
        await self.local.remove(instance_id)

    def prefill_peers(self, instance_id: str) -> tuple[str, ...]:
        """The KV ports that may prefill for an instance.

        Raises:
            NotFoundError: there is no such instance.
        """
        return self.local.get(instance_id).supervisor.options.prefill_peers

    def name_peers(self, instance_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """Replace the KV ports that may prefill for an instance; see `LocalInstances.name_peers`."""
        return self.local.name_peers(instance_id, addresses)

    async def wait_ready(self, instance_id: str, deadline: float | None = None) -> None:
        """Wait until an instance is ready; see `LocalInstances.wait_ready`."""
        await self.local.wait_ready(instance_id, deadline)

    def instances(self) -> list[InstanceStatus]:
        """Every instance as it is now."""
        return self.local.statuses()

    def models(self) -> list[LocalModel]:
        """Models on this machine's disks. Reads the disks: call it off the event loop."""
        return self.store.list()

    def generate(self, model: str, request: GenerationRequest) -> Stream:
        """Start one answer on the least busy ready instance of `model`.

        Args:
            model: id or alias; `default` when exactly one model is served.

        Raises:
            NotFoundError: nothing serves this model.
            InstanceNotReadyError: an instance exists, but is not ready.
            QueueFullError: all of its instances are full.
        """
        candidates = self._candidates(model)
        ready = [instance for instance in candidates if instance.supervisor.state == "ready"]
        error: TandemError | None = None
        for instance in sorted(ready or candidates, key=lambda candidate: candidate.supervisor.running):
            try:
                return instance.supervisor.submit(request)
            except TandemError as refused:
                error = refused
        assert error is not None
        raise error

    def _candidates(self, model: str) -> list[LocalInstance]:
        wanted = model.lower()
        found = [instance for instance in self.local if wanted in instance.names]
        if found:
            return found
        for reference in self._expected:
            card = self.store.cards.get(reference)
            names = {reference, card.model_id, *card.aliases} if card is not None else {reference}
            if wanted in {name.lower() for name in names} or (wanted == "default" and len(self._expected) == 1):
                raise InstanceNotReadyError(
                    f"{reference} is being fetched or converted; it will answer when it is loaded.", retry_after=5.0
                )
        served = sorted({instance.card.model_id for instance in self.local})
        if wanted == "default" and len(served) == 1:
            return list(self.local)
        serves = ", ".join(served) or "no model at all"
        raise NotFoundError(f"No instance serves the model '{model}'. This node serves {serves}.", param="model")
