"""One machine of a cluster: everything that runs on it, and what it can ask of the others."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tandem.cluster.bus.secret import cluster_secret
from tandem.cluster.commands import Commands
from tandem.cluster.control import ControlPlane
from tandem.cluster.events import Subscription
from tandem.cluster.facts.gather import Sources
from tandem.cluster.identity import node_id
from tandem.cluster.instances import InstanceStatus, LocalInstances
from tandem.cluster.intents import effective_links
from tandem.cluster.local_models import LocalModels, reference_to
from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.nodeport.server import Handler, NodePort
from tandem.cluster.reconciler import Reconciler, instance_here
from tandem.cluster.remote_status import statuses
from tandem.cluster.router import Router
from tandem.cluster.serving import any_host
from tandem.cluster.state import ClusterState
from tandem.config import Settings, parse_addresses
from tandem.errors import ConfigError, InstanceNotReadyError, NotFoundError
from tandem.kv.tls import identity_for
from tandem.models.store import LocalModel, ModelStore
from tandem.placement.links import automatic_links, prefill_peers
from tandem.placement.world import World
from tandem.runner.stream import Stream
from tandem.types import GenerationRequest
from tandem.types.intents import Entry, InstanceIntent, LinkIntent

__all__ = ["InstanceStatus", "Node", "Stream"]

BOUND = uuid.UUID("5a3f4a0c-5d8c-4c6e-9f6e-3f0a5f4b2d11")
"""Namespace of the ids of instances that a command line names."""

FACTS_PAUSE = 0.2
"""Seconds that facts may wait before prefill peers are named by them; intents never wait."""


class Node:
    """Everything that runs on this machine, and its place in the cluster.

    Args:
        settings: folders, limits, deadlines, the cluster's name and secret.
        sources: where its facts come from; None for this machine. Nodes that share a machine may share what is costly.

    Attributes:
        local: the instances on this machine.
        store, models: what is on its disks, and on its way there.
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
        self._named_peers: dict[str, tuple[str, ...]] = {}
        self._world: tuple[ClusterState, World] | None = None
        self._told: tuple[ClusterState, World] | None = None
        self._wanted: tuple[dict[str, Entry], dict[str, InstanceIntent], dict[str, LinkIntent]] | None = None
        self._handlers: dict[str, Handler] = {}
        self._on_conflict: Callable[[ConfigError], None] = lambda error: None
        self._task: asyncio.Task[None] | None = None
        self.control: ControlPlane
        self.commands: Commands
        self.client: NodeClient
        self._reconciler: Reconciler
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
        identity = identity_for(self.secret, self.node_id)
        self.client = NodeClient(identity.client_context() if identity else None)
        self.control = ControlPlane(
            self.settings,
            self.node_id,
            self.secret,
            on_left=self._left,
            on_conflict=on_conflict,
            sources=self._sources,
        )
        self.commands = Commands(self.control, self.world)
        self._reconciler = Reconciler(self.node_id, self.local, self.models.obtain, self._tell)
        self._router = Router(self.node_id, self.local, self.client, self._told_world)
        host = any_host() if self.secret or self.settings.cluster_open else "127.0.0.1"
        context = identity.server_context() if identity else None
        self._port = NodePort(self.node_id, self.local, self.models, self._handlers, host, 0, context)
        await self._port.start()
        await self.control.start()
        self.control.facts.set_ports(api_port=None, node_port=self._port.port)
        self.local.on_change(self._tell)
        self._task = asyncio.create_task(self._follow(), name="reconcile")

    async def stop(self) -> None:
        """Leave the cluster and stop every instance here, ending their streams with an error."""
        if self._task is not None:
            await self.run_here([])
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self._reconciler.stop()
            await self.control.stop()
            await self.client.close()
            await self._port.stop()
            self._task = None
        await self.local.stop()

    def serves_at(self, api_port: int) -> None:
        """The HTTP surface listens at this port."""
        self.control.facts.set_ports(api_port=api_port, node_port=self._port.port)

    def answer_to(self, command: str, handler: Handler) -> None:
        """Let other nodes have `command` done here."""
        self._handlers[command] = handler

    def _left(self, gone: str) -> None:
        self.client.lost(gone, "it left the cluster")

    def _tell(self) -> None:
        self._world = self._told = None
        self.control.facts.set_runners(self._reconciler.runner_facts())

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
                self._name_peers()
                # Every other event that is there already changes nothing that has not been looked at.
                await self._next_change(events, intents)

    async def _next_change(self, events: Subscription, intents: dict[str, Entry]) -> None:
        """Wait for an event, and for those that come just after it if all of them are facts: prefill peers need not
        follow the load of fifty nodes at every step."""
        loop = asyncio.get_running_loop()
        await anext(events)
        until = loop.time() + FACTS_PAUSE
        while self.control.state.intents is intents and (left := until - loop.time()) > 0:
            if await events.next_within(left) is None:
                return
        while events.behind:
            await anext(events)

    def _name_peers(self) -> None:
        if not len(self.local):
            return
        world = self.world()
        for instance in list(self.local):
            named = self._named_peers.get(instance.instance_id)
            if named is None:
                named = parse_addresses(self.settings.prefill_peers.split(","))
            linked = prefill_peers(instance.instance_id, world).addresses
            self.local.name_peers(instance.instance_id, (*named, *linked))

    # ---------------------------------------------------------------------------------------------------- the cluster

    @property
    def state(self) -> ClusterState:
        """Facts and intents as they are known here now."""
        return self.control.state

    def world(self) -> World:
        """The state as placement looks at it: links trimmed to instances that are there, automatic ones added."""
        state = self.control.state
        if self._world is None or self._world[0] is not state:
            world = self._told_world()
            if self.settings.automatic_links:
                found = {link.link_id: link for link in automatic_links(world)}
                world = World(world.nodes, world.instances, dict(world.links) | found)
            self._world = (state, world)
        return self._world[1]

    def _told_world(self) -> World:
        """The same without automatic links, which change nobody's role: for routing, at every request."""
        state = self.control.state
        if self._told is None or self._told[0] is not state:
            if self._wanted is None or self._wanted[0] is not state.intents:
                self._wanted = (state.intents, state.instances, effective_links(state))
            _, instances, links = self._wanted
            nodes = state.nodes
            if self.node_id in nodes:
                # What is told to others is told a few times a second at most.
                runners = tuple(self._reconciler.runner_facts())
                nodes = {**nodes, self.node_id: msgspec.structs.replace(nodes[self.node_id], runners=runners)}
            self._told = (state, World(nodes, instances, links))
        return self._told[1]

    async def launch(self, model: LocalModel | str, **options: Any) -> str:
        """Have this machine run one more instance of a model.

        Args:
            model: a local model, or a reference to the `sim` engine such as `sim:decode_tps=100`.
            options: fields of `EngineOptions` that differ from the settings.

        Returns:
            The instance's id.
        """
        intent = instance_here(self.node_id, model, str(uuid.uuid4()))
        await self.commands.create(msgspec.structs.replace(intent, options=options))
        return intent.instance_id

    async def run_here(self, models: Iterable[LocalModel | str]) -> list[str]:
        """Have this machine run these models for as long as this process lives, and none of an earlier process's.

        Returns:
            The instances' ids. The same models get the same ids every time, so that links to them last.
        """
        wanted: dict[str, InstanceIntent] = {}
        for model in models:
            reference = reference_to(model)
            count = sum(intent.reference == reference for intent in wanted.values())
            instance_id = str(uuid.uuid5(BOUND, f"{self.node_id}/{reference}/{count}"))
            wanted[instance_id] = msgspec.structs.replace(instance_here(self.node_id, model, instance_id), bound=True)
        for instance_id in self._bound() - wanted.keys():
            await self.commands.remove(instance_id)
        for intent in wanted.values():
            # Not `create`: it may be there from an earlier process.
            await self.control.intents.put(intent)
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
        """The KV ports that may prefill for an instance of this machine.

        Raises:
            NotFoundError: it does not run here.
        """
        return self.local.get(instance_id).supervisor.options.prefill_peers

    def name_peers(self, instance_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
        """Replace the KV ports that may prefill for an instance, beside those that links lead to; see
        `LocalInstances.name_peers`."""
        peers = self.local.name_peers(instance_id, addresses)
        self._named_peers[instance_id] = peers
        return peers

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
