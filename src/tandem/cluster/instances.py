"""The instances that run on this machine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.serving import any_host
from tandem.config import Settings, parse_addresses
from tandem.engines.base import EngineName, EngineOptions, LoadProgress, PrefillPort
from tandem.engines.installed import require
from tandem.engines.sim.profile import parse_sim_reference
from tandem.errors import ConfigError, InstanceNotReadyError, InvalidRequestError, NotFoundError
from tandem.kv.server import require_secret
from tandem.kv.tls import identity_for
from tandem.models.cards import ModelCard
from tandem.models.store import LocalModel
from tandem.runner.messages import CacheIdentity
from tandem.runner.stream import Stream
from tandem.runner.supervisor import RunnerState, Supervisor
from tandem.types import EngineLoad, GenerationRequest, ModelInfo

logger = logging.getLogger("tandem.cluster")


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
    identity: CacheIdentity


@dataclass(slots=True)
class LocalInstance:
    """One instance and its runner."""

    instance_id: str
    card: ModelCard
    supervisor: Supervisor
    launched_with: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)

    def status(self) -> InstanceStatus:
        """As it is now."""
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
            identity=supervisor.identity,
        )


class LocalInstances:
    """Launches, watches and removes them.

    Args:
        node_id: of this node, for certificates.
        secret: the cluster's; empty for none.
    """

    def __init__(self, settings: Settings, node_id: str, secret: str = "") -> None:
        self._settings = settings
        self._secret = secret
        self._identity = identity_for(secret, node_id)
        self._node_id = node_id
        self._by_id: dict[str, LocalInstance] = {}
        self._listeners: set[Callable[[], None]] = set()

    def __iter__(self) -> Iterator[LocalInstance]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._by_id

    def get(self, instance_id: str) -> LocalInstance:
        """One of them.

        Raises:
            NotFoundError: it does not run here.
        """
        instance = self._by_id.get(instance_id)
        if instance is None:
            raise NotFoundError(f"There is no instance {instance_id}. GET /health lists them.")
        return instance

    def instances(self) -> list[InstanceStatus]:
        """Every instance as it is now."""
        return [instance.status() for instance in self._by_id.values()]

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a state changes, until the returned function is called."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    def launch(
        self,
        model: LocalModel | str,
        *,
        instance_id: str | None = None,
        engine: EngineName = "mlx",
        **options: Any,
    ) -> str:
        """Create an instance and begin to load it.

        Args:
            model: a local model, or a reference to the `sim` engine such as `sim:decode_tps=100`.
            instance_id: None makes one up.
            engine: that runs a local model.
            options: fields of `EngineOptions` that differ from the settings; `prefill_peers` as addresses.

        Returns:
            The instance's id.

        Raises:
            ConfigError: the engine is not installed.
        """
        if isinstance(model, str):
            profile = parse_sim_reference(model)
            card = profile.card()
            chosen = self._options(card, "sim", profile=profile.to_dict(), **options)
        else:
            card = model.card
            require(engine, self._settings.home)
            chosen = self._options(card, engine, path=str(model.path), **options)
        instance_id = instance_id or str(uuid.uuid4())
        supervisor = Supervisor(instance_id, chosen, self._settings, self._notify)
        self._by_id[instance_id] = LocalInstance(instance_id, card, supervisor, options)
        supervisor.start()
        return instance_id

    def _options(self, card: ModelCard, engine: EngineName, **more: Any) -> EngineOptions:
        settings = self._settings
        defaults = card.sampling_defaults
        values: dict[str, Any] = {
            "max_batch": settings.max_batch,
            "prefill_chunk": settings.prefill_chunk,
            "max_decode_stall": settings.max_decode_stall,
            "prefix_cache_bytes": settings.prefix_cache_bytes,
            "kv_bits": settings.kv_bits,
            "context_length": settings.context_length,
            "dtype": settings.dtype,
            "sampling_defaults": defaults.model_dump(exclude_none=True) if defaults is not None else {},
            "kv_codec": settings.kv_codec,
            "kv_host": settings.kv_host or self._kv_host,
            "kv_port": settings.kv_port,
            "cluster_secret": self._secret,
            "cluster_open": settings.cluster_open,
            "node_id": self._node_id,
        }
        peers = more.pop("prefill_peers", parse_addresses(settings.prefill_peers.split(",")))
        ports = tuple(PrefillPort(address) for address in peers)
        return EngineOptions(engine=engine, model_id=card.model_id, prefill_peers=ports, **values | more)

    @property
    def _kv_host(self) -> str:
        return any_host() if self._secret or self._settings.cluster_open else "127.0.0.1"

    async def remove(self, instance_id: str) -> None:
        """Stop one instance.

        Raises:
            NotFoundError: it does not run here.
        """
        instance = self.get(instance_id)
        del self._by_id[instance_id]
        await instance.supervisor.stop()

    async def stop(self) -> None:
        """Stop every instance, ending their streams with an error."""
        instances = list(self._by_id.values())
        self._by_id.clear()
        results = await asyncio.gather(*(one.supervisor.stop() for one in instances), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                logger.error("an instance did not stop in order", exc_info=result)

    async def wait_ready(self, instance_id: str, deadline: float | None = None) -> None:
        """Wait until an instance is ready.

        Args:
            deadline: seconds; None waits as long as the supervisor keeps trying (its own deadlines bound that).

        Raises:
            TandemError: it failed, with the runner's reason.
            TimeoutError: the deadline passed.
        """
        changed = asyncio.Event()
        forget = self.on_change(changed.set)
        try:
            async with asyncio.timeout(deadline):
                while True:
                    changed.clear()
                    instance = self._by_id.get(instance_id)
                    if instance is None:
                        raise NotFoundError(f"Instance {instance_id} was removed.")
                    if instance.supervisor.state == "ready":
                        return
                    if instance.supervisor.state == "failed":
                        raise instance.supervisor.error or InstanceNotReadyError("The runner failed.")
                    await changed.wait()
        finally:
            forget()

    def submit(self, instance_id: str, request: GenerationRequest) -> Stream:
        """Start an answer on this instance.

        Raises:
            NotFoundError: it does not run here.
            InstanceNotReadyError, QueueFullError: it cannot take the request now.
        """
        return self.get(instance_id).supervisor.submit(request)

    def check_peers(self, instance_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """KV ports (`host:port`) that could prefill for an instance, as they would be used.

        Raises:
            NotFoundError: it does not run here.
            InvalidRequestError: an address has another form, or would need a cluster secret.
        """
        self.get(instance_id)
        try:
            peers = parse_addresses(addresses)
            for peer in peers:
                host = peer.rpartition(":")[0].strip("[]")
                require_secret(host, self._identity, open_to_all=self._settings.cluster_open)
        except (ValueError, ConfigError) as error:
            raise InvalidRequestError(f"prefill_peers: {error}", param="prefill_peers") from error
        return peers

    def name_peers(self, instance_id: str, peers: tuple[PrefillPort, ...]) -> None:
        """Replace the KV ports that may prefill for an instance, from its next prompt on.

        Raises:
            NotFoundError, InvalidRequestError: see `check_peers`.
        """
        supervisor = self.get(instance_id).supervisor
        if supervisor.options.prefill_peers != peers:
            self.check_peers(instance_id, (peer.address for peer in peers))
            supervisor.name_peers(peers)
