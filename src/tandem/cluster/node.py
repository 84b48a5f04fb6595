"""One machine: its instances, and the way from a model name to a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.identity import node_id
from tandem.config import Settings, parse_addresses
from tandem.engines.base import EngineName, EngineOptions, LoadProgress
from tandem.engines.sim.profile import is_sim_reference, parse_sim_reference
from tandem.errors import ConfigError, InstanceNotReadyError, InvalidRequestError, NotFoundError, TandemError
from tandem.kv.server import require_secret
from tandem.kv.tls import identity_for
from tandem.models.cards import ModelCard
from tandem.models.store import LocalModel, ModelStore
from tandem.runner.stream import Stream
from tandem.runner.supervisor import RunnerState, Supervisor
from tandem.types import EngineLoad, GenerationRequest, ModelInfo

__all__ = ["InstanceStatus", "Node", "Stream"]


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance as it is now.

    Attributes:
        error: why it failed or restarts.
        progress: layers loaded, while it loads.
        running: requests submitted and not ended.
        created: unix time.
        kv_address: host and port where it prefills for other nodes, if it does.
    """

    instance_id: str
    model_id: str
    card: ModelCard
    state: RunnerState
    error: str | None
    info: ModelInfo | None
    load: EngineLoad | None
    progress: LoadProgress | None
    running: int
    restarts: int
    created: float
    pid: int | None
    kv_address: tuple[str, int] | None


@dataclass(slots=True)
class _Instance:
    instance_id: str
    card: ModelCard
    supervisor: Supervisor
    created: float = field(default_factory=time.time)

    @property
    def names(self) -> set[str]:
        return {name.lower() for name in (self.card.model_id, *self.card.aliases)}

    def status(self) -> InstanceStatus:
        supervisor = self.supervisor
        return InstanceStatus(
            instance_id=self.instance_id,
            model_id=self.card.model_id,
            card=self.card,
            state=supervisor.state,
            error=supervisor.error.message if supervisor.error else None,
            info=supervisor.info,
            load=supervisor.load,
            progress=supervisor.progress,
            running=supervisor.running,
            restarts=supervisor.restarts,
            created=self.created,
            pid=supervisor.pid,
            kv_address=supervisor.kv_address,
        )


class Node:
    """Everything that runs on this machine.

    Args:
        settings: folders, limits, deadlines.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.node_id = node_id(settings.home)
        self.store = ModelStore(settings)
        self._instances: dict[str, _Instance] = {}
        self._expected: list[str] = []
        self._changed: set[asyncio.Event] = set()

    async def start(self) -> None:
        """Nothing runs yet; instances are added with `launch`."""

    async def stop(self) -> None:
        """Stop every instance, ending their streams with an error."""
        await asyncio.gather(*(instance.supervisor.stop() for instance in self._instances.values()))
        self._instances.clear()

    def launch(self, model: LocalModel | str) -> str:
        """Create an instance and begin to load it.

        Args:
            model: a local model, or a reference to the `sim` engine such as `sim:decode_tps=100`.

        Returns:
            The instance's id.
        """
        if isinstance(model, str):
            profile = parse_sim_reference(model)
            card = profile.card()
            options = self._options(card, "sim", profile=profile.to_dict())
        else:
            card = model.card
            options = self._options(card, "mlx", path=str(model.path))
        instance_id = str(uuid.uuid4())
        supervisor = Supervisor(instance_id, options, self.settings, self._notify)
        self._instances[instance_id] = _Instance(instance_id, card, supervisor)
        supervisor.start()
        return instance_id

    def _options(
        self, card: ModelCard, engine: EngineName, *, path: str = "", profile: dict[str, Any] | None = None
    ) -> EngineOptions:
        settings = self.settings
        defaults = card.sampling_defaults
        return EngineOptions(
            engine=engine,
            model_id=card.model_id,
            path=path,
            max_batch=settings.max_batch,
            prefill_chunk=settings.prefill_chunk,
            max_decode_stall=settings.max_decode_stall,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            kv_bits=settings.kv_bits,
            context_length=settings.context_length,
            dtype=settings.dtype,
            sampling_defaults=defaults.model_dump(exclude_none=True) if defaults is not None else {},
            profile=profile or {},
            prefill_peers=parse_addresses(settings.prefill_peers.split(",")),
            kv_codec=settings.kv_codec,
            kv_host=settings.kv_host,
            kv_port=settings.kv_port,
            cluster_secret=settings.cluster_secret,
            node_id=self.node_id,
        )

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
        instance = self._instance(instance_id)
        del self._instances[instance_id]
        await instance.supervisor.stop()

    def prefill_peers(self, instance_id: str) -> tuple[str, ...]:
        """The KV ports that may prefill for an instance.

        Raises:
            NotFoundError: there is no such instance.
        """
        return self._instance(instance_id).supervisor.options.prefill_peers

    def name_peers(self, instance_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """Replace the KV ports (`host:port`) that may prefill for an instance, from its next prompt on.

        Raises:
            NotFoundError: there is no such instance.
            InvalidRequestError: an address has another form, or would need a cluster secret.
        """
        instance = self._instance(instance_id)
        try:
            peers = parse_addresses(addresses)
            identity = identity_for(self.settings.cluster_secret, self.node_id)
            for peer in peers:
                require_secret(peer.rpartition(":")[0].strip("[]"), identity, open_to_all=False)
        except (ValueError, ConfigError) as error:
            raise InvalidRequestError(f"prefill_peers: {error}", param="prefill_peers") from error
        instance.supervisor.name_peers(peers)
        return peers

    def _instance(self, instance_id: str) -> _Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            raise NotFoundError(f"There is no instance {instance_id}. GET /health lists them.")
        return instance

    async def wait_ready(self, instance_id: str, deadline: float | None = None) -> None:
        """Wait until an instance is ready.

        Args:
            deadline: seconds; None waits as long as the supervisor keeps trying (its own deadlines bound that).

        Raises:
            TandemError: it failed, with the runner's reason.
            TimeoutError: the deadline passed.
        """
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            async with asyncio.timeout(deadline):
                while True:
                    changed.clear()
                    instance = self._instances.get(instance_id)
                    if instance is None:
                        raise NotFoundError(f"Instance {instance_id} was removed.")
                    if instance.supervisor.state == "ready":
                        return
                    if instance.supervisor.state == "failed":
                        raise instance.supervisor.error or InstanceNotReadyError("The runner failed.")
                    await changed.wait()
        finally:
            self._changed.discard(changed)

    def _notify(self) -> None:
        for changed in self._changed:
            changed.set()

    def instances(self) -> list[InstanceStatus]:
        """Every instance as it is now."""
        return [instance.status() for instance in self._instances.values()]

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

    def _candidates(self, model: str) -> list[_Instance]:
        wanted = model.lower()
        found = [instance for instance in self._instances.values() if wanted in instance.names]
        if found:
            return found
        for reference in self._expected:
            card = self.store.cards.get(reference)
            names = {reference, card.model_id, *card.aliases} if card is not None else {reference}
            if wanted in {name.lower() for name in names} or (wanted == "default" and len(self._expected) == 1):
                raise InstanceNotReadyError(
                    f"{reference} is being fetched or converted; it will answer when it is loaded.", retry_after=5.0
                )
        served = sorted({instance.card.model_id for instance in self._instances.values()})
        if wanted == "default" and len(served) == 1:
            return list(self._instances.values())
        serves = ", ".join(served) or "no model at all"
        raise NotFoundError(f"No instance serves the model '{model}'. This node serves {serves}.", param="model")
