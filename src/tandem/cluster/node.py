"""One machine of a cluster: everything that runs on it, and what it can ask of the others."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from tandem.cluster.bus.secret import cluster_secret
from tandem.cluster.commands import Commands
from tandem.cluster.control import ControlPlane
from tandem.cluster.downloads import Downloads
from tandem.cluster.events import Subscription
from tandem.cluster.facts.gather import Sources
from tandem.cluster.granting import with_options
from tandem.cluster.identity import node_id
from tandem.cluster.instances import InstanceStatus, LocalInstances
from tandem.cluster.link_rates import LinkRates
from tandem.cluster.local_models import LocalModels, reference_to
from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.nodeport.server import NodePort
from tandem.cluster.peering import Peering
from tandem.cluster.reconciler import Reconciler, instance_here
from tandem.cluster.remote_status import statuses
from tandem.cluster.router import Router
from tandem.cluster.scale import slower
from tandem.cluster.serving import any_host
from tandem.cluster.state import ClusterState
from tandem.cluster.tasks import background, cancelled
from tandem.cluster.view import View
from tandem.config import Settings
from tandem.engines.base import EngineName
from tandem.errors import ConfigError, InstanceNotReadyError, NotFoundError
from tandem.kv.tls import identity_for
from tandem.models.store import LocalModel, ModelStore
from tandem.placement.world import World
from tandem.runner.stream import Stream
from tandem.types import GenerationRequest
from tandem.types.intents import Entry, InstanceIntent

__all__ = ["InstanceStatus", "Node", "Stream"]

BOUND = uuid.UUID("5a3f4a0c-5d8c-4c6e-9f6e-3f0a5f4b2d11")
"""Namespace of the ids of instances that a command line names."""
FACTS_PAUSE = 0.2
"""Seconds that facts may wait before prefill peers are named by them, longer in large clusters; intents never wait."""


class Node:
    """Everything that runs on this machine, and its place in the cluster.

    Args:
        settings: folders, limits, deadlines, the cluster's name and secret.
        sources: where its facts come from; None for this machine.

    Attributes:
        local: the instances on this machine.
        store, models: what is on its disks.
        downloads: what is on its way there; and the same on other nodes.
        control: what is known of the cluster.
        commands: what can be asked of it.
        client: for speaking to other nodes directly.
    """

    def __init__(self, settings: Settings, sources: Sources | None = None) -> None:
        self.settings = settings
        self._sources = sources
        self.node_id = node_id(settings.home)
        self.store = ModelStore(settings)
        self.models = LocalModels(self.store)
        self.secret = cluster_secret(settings)
        self.local = LocalInstances(settings, self.node_id, self.secret)
        self._peering = Peering(settings, self.local)
        self._running: contextlib.AsyncExitStack | None = None
        self.control: ControlPlane
        self.commands: Commands
        self.client: NodeClient
        self.downloads: Downloads
        self._link_rates: LinkRates
        self._reconciler: Reconciler
        self._view: View
        self._router: Router
        self._port: NodePort

    # ------------------------------------------------------------------------------------------------------- lifetime

    async def start(self, on_conflict: Callable[[ConfigError], None] = lambda error: None) -> None:
        """Join the cluster, and begin to run what it wants here.

        Args:
            on_conflict: called when another process turns out to have this node's id.

        Raises:
            ConfigError: a port is taken, or the settings do not fit together.
            StorageError: the intents on disk cannot be read.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack, on_conflict)
            # From here on `stop` undoes it; a failure before has undone what was begun.
            self._running = stack.pop_all()

    async def _start(self, stack: contextlib.AsyncExitStack, on_conflict: Callable[[ConfigError], None]) -> None:
        settings, identity = self.settings, identity_for(self.secret, self.node_id)
        stack.push_async_callback(self.local.stop)
        self.client = NodeClient(identity.client_context() if identity else None)
        self.control = ControlPlane(
            settings,
            self.node_id,
            self.secret,
            on_left=self._left,
            on_conflict=on_conflict,
            sources=self._sources,
        )
        self.commands = Commands(self.control, self.world)
        self.downloads = Downloads(self.node_id, self.store, self.models, self.client, self.control)
        self._link_rates = LinkRates(self.node_id, self.client, self.world, self.control.facts.set_links)
        self._reconciler = Reconciler(self.node_id, self.local, self.downloads.obtain, self._tell)
        self._view = View(self.node_id, lambda: self.control.state, automatic=settings.automatic_links)
        self._router = Router(self.node_id, self.local, self.client, self._view.routing)
        host = any_host() if self.secret or settings.cluster_open else "127.0.0.1"
        context = identity.server_context() if identity else None
        self._port = NodePort(self.node_id, self.local, self.models, self.downloads.handlers, host, 0, context)
        await self._port.start()
        stack.push_async_callback(self._port.stop)
        stack.push_async_callback(self.client.close)
        # With the very first facts: whoever sees this node may ask it something.
        self.control.facts.set_ports(api_port=None, node_port=self._port.port)
        stack.push_async_callback(self.control.stop)
        await self.control.start()
        self.downloads.begin()
        stack.push_async_callback(self.downloads.stop)
        self._link_rates.start()
        stack.push_async_callback(self._link_rates.stop)
        stack.push_async_callback(self._reconciler.stop)
        self.local.on_change(self._tell)
        following = background(self._follow(), "reconcile")
        stack.push_async_callback(cancelled, following)

    async def stop(self) -> None:
        """Leave the cluster and stop every instance here, ending their streams with an error."""
        running, self._running = self._running, None
        if running is None:
            await self.local.stop()
            return
        async with running:
            await self.run_here([])

    @property
    def answering(self) -> int:
        """Answers for other nodes that are under way here."""
        return self._port.answering if self._running is not None else 0

    async def finish(self, deadline: float) -> None:
        """Send other nodes' requests elsewhere, and let what is under way for them take `deadline` seconds more. `stop`
        itself waits for nobody."""
        if self._running is not None:
            self._reconciler.leaving = True
            self._tell()
            await self._port.finish(deadline)

    def serves_at(self, api_port: int) -> None:
        """The HTTP surface listens at this port."""
        self.control.facts.set_ports(api_port=api_port, node_port=self._port.port)

    def _left(self, gone: str) -> None:
        self.client.lost(gone, "it left the cluster")

    def _tell(self) -> None:
        runners = tuple(self._reconciler.runner_facts())
        self._view.runners_are(runners)
        self.control.facts.set_runners(runners)

    async def _follow(self) -> None:
        """Keep instances and their prefill peers as the state says."""
        intents: dict[str, Entry] | None = None
        async with self.control.log.subscribe() as events:
            while True:
                state = self.control.state
                if state.intents is not intents:
                    intents = state.intents
                    self._reconciler.apply(state.instances.values())
                    self._tell()
                if len(self.local):
                    self._peering.apply(self.world())
                if not await self._next_change(events, intents):
                    return

    async def _next_change(self, events: Subscription, intents: dict[str, Entry]) -> bool:
        """Wait for an event, and for those that come just after it if all of them are facts: prefill peers need not
        follow the load of fifty nodes at every step. False when there will be none."""
        loop = asyncio.get_running_loop()
        try:
            await anext(events)
            until = loop.time() + FACTS_PAUSE * slower(len(self.control.state.nodes))
            while self.control.state.intents is intents and (left := until - loop.time()) > 0:
                if await events.next_within(left) is None:
                    return True
            while events.behind:
                await anext(events)
        except StopAsyncIteration:
            return False
        return True

    # ---------------------------------------------------------------------------------------------------- the cluster

    @property
    def state(self) -> ClusterState:
        """Facts and intents as they are known here now."""
        return self.control.state

    def world(self) -> World:
        """The state as placement looks at it: links trimmed to instances that are there, automatic ones added."""
        return self._view.whole()

    async def launch(self, model: LocalModel | str, *, engine: EngineName = "mlx", **options: Any) -> str:
        """Have this machine run one more instance of a model.

        Args:
            model: a local model, or a reference to the `sim` engine such as `sim:decode_tps=100`.
            engine: that runs a local model.
            options: fields of `EngineOptions` that differ from the settings.

        Returns:
            The instance's id.
        """
        intent = instance_here(self.node_id, model, str(uuid.uuid4()), engine)
        await self.commands.create(with_options(intent, self.world(), self.settings, options))
        return intent.instance_id

    async def run_here(self, models: Iterable[LocalModel | str], *, engine: EngineName = "mlx") -> list[str]:
        """Have this machine run these models for as long as this process lives, and none of an earlier process's.

        Args:
            engine: that runs local models.

        Returns:
            The instances' ids. The same models get the same ids every time, so that links to them last.
        """
        wanted: dict[str, InstanceIntent] = {}
        for model in models:
            reference = reference_to(model)
            count = sum(intent.reference == reference for intent in wanted.values())
            instance_id = str(uuid.uuid5(BOUND, f"{self.node_id}/{reference}/{count}"))
            wanted[instance_id] = replace(instance_here(self.node_id, model, instance_id, engine), bound=True)
        for instance_id in self._bound() - wanted.keys():
            await self.commands.remove(instance_id)
        for intent in wanted.values():
            # Not `create`: it may be there from an earlier process.
            await self.control.intents.put(with_options(intent, self.world(), self.settings))
        return list(wanted)

    def _bound(self) -> set[str]:
        return {
            intent.instance_id
            for intent in self.control.state.instances.values()
            if intent.bound and all(shard.node_id == self.node_id for shard in intent.shards)
        }

    async def wait_ready(self, instance_id: str, deadline: float | None = None) -> None:
        """Wait until an instance is ready, on whatever nodes it runs.

        Args:
            deadline: seconds; None waits as long as its supervisor keeps trying (its own deadlines bound that).

        Raises:
            TandemError: it failed, with the runner's reason.
            TimeoutError: the deadline passed.
        """
        async with asyncio.timeout(deadline), self.control.log.subscribe() as events:
            while True:
                if instance_id in self.local:
                    await self.local.wait_ready(instance_id)
                status = next((one for one in self.instances() if one.instance_id == instance_id), None)
                if status is None:
                    raise NotFoundError(f"Instance {instance_id} was removed.")
                if status.state == "ready":
                    return
                if status.state == "failed":
                    raise self._reconciler.error_of(instance_id) or InstanceNotReadyError(
                        status.error or "The runner failed."
                    )
                await anext(events)

    # -------------------------------------------------------------------------------------------------------- requests

    def instances(self) -> list[InstanceStatus]:
        """Every instance of the cluster as it is known here now; those of this machine as they are."""
        return statuses(self.control.state, self.local, self.node_id)

    def prefill_peers(self, instance_id: str) -> tuple[str, ...]:
        """The KV ports that may prefill for an instance of this machine: those that were named, and those of links.

        Raises:
            NotFoundError: it does not run here.
        """
        return tuple(peer.address for peer in self.local.get(instance_id).supervisor.options.prefill_peers)

    def name_peers(self, instance_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """Replace the KV ports that may prefill for an instance, beside those that links lead to; see
        `LocalInstances.name_peers`."""
        self._peering.name(instance_id, addresses)
        self._peering.apply(self.world())
        return self.prefill_peers(instance_id)

    def generate(self, model: str, request: GenerationRequest) -> Stream:
        """Start one answer on the instance of `model` that is expected to be soonest; see `Router.generate`.

        Args:
            model: id or alias; `default` when exactly one model is served.
        """
        try:
            return self._router.generate(model, request)
        except NotFoundError:
            self.models.check_expected(model)
            raise
