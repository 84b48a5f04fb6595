"""From a model's name to a stream of events, wherever in the cluster the model runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tandem.cluster.instances import LocalInstances
from tandem.cluster.nodeport.client import NodeClient
from tandem.cluster.ways import ways_to
from tandem.errors import InstanceNotReadyError, NodeLostError, RunnerDiedError, TandemError, UnavailableError
from tandem.placement.routing import Asked, Refused, Route, choose
from tandem.placement.world import World
from tandem.runner.stream import Stream
from tandem.types import GenerationRequest

MOST_ATTEMPTS = 3
"""Instances that a request is tried on before anything of its answer was read. Those on nodes that turned out to be
gone do not count: many may go at once."""
SUSPECT_SECONDS = 2.0
"""For which a node that could not be reached is asked only if there is no other."""


class _Sent(NamedTuple):
    """A request under way to another node, and its node's facts when it was sent."""

    node_id: str
    life: str
    sequence: int


class Router:
    """Chooses an instance for each request, and brings its answer here.

    Args:
        world: the cluster as it is known now.
    """

    def __init__(self, node_id: str, local: LocalInstances, client: NodeClient, world: Callable[[], World]) -> None:
        self._node_id = node_id
        self._local = local
        self._client = client
        self._world = world
        self._ids = itertools.count(1)
        self._flying: dict[str, list[_Sent]] = {}
        self._suspects: dict[str, float] = {}

    def generate(self, model: str, request: GenerationRequest) -> Stream:
        """Start one answer.

        Args:
            model: id or alias; `default` when exactly one model is served.

        Raises:
            NotFoundError: nothing serves this model.
            PlacementError: its instances only prefill for others.
            InstanceNotReadyError, UnavailableError: none of its instances can answer now.
            QueueFullError: all of them are full.
        """
        return self._try(model, request, f"{self._node_id}-{next(self._ids)}", frozenset(), None)

    def _try(
        self, model: str, request: GenerationRequest, name: str, avoid: frozenset[str], last: TandemError | None
    ) -> Stream:
        world = self._world()
        pending = self._pending(world)
        while True:
            suspects = self._on_suspects(world)
            route = choose(Asked(model, name, pending=pending, avoid=avoid | suspects), world)
            if suspects and isinstance(route, Refused):
                route = choose(Asked(model, name, pending=pending, avoid=avoid), world)
            if isinstance(route, Refused):
                raise last or route.error()
            avoid |= {route.instance_id}
            try:
                stream = self._start(route, world, request)
            except UnavailableError as error:
                last = error
                if len(avoid - suspects) >= MOST_ATTEMPTS:
                    raise
                continue
            if len(avoid - suspects) < MOST_ATTEMPTS:
                stream.elsewhere = partial(self._elsewhere, model, request, name, avoid, route.node_id)
            return stream

    def _elsewhere(
        self,
        model: str,
        request: GenerationRequest,
        name: str,
        tried: frozenset[str],
        node_id: str,
        error: TandemError,
    ) -> Stream | None:
        if isinstance(error, NodeLostError):
            self._suspects[node_id] = time.monotonic() + SUSPECT_SECONDS
        # A request that is wrong is wrong everywhere, and one that kills runners is not given all of them.
        if not isinstance(error, UnavailableError) or (isinstance(error, RunnerDiedError) and len(tried) > 1):
            return None
        try:
            return self._try(model, request, name, tried, error)
        except TandemError:
            return None  # the first failure says more than that there is nobody else

    def _on_suspects(self, world: World) -> frozenset[str]:
        """Instances on nodes that could not be reached a moment ago, and whose loss is not noticed yet."""
        now = time.monotonic()
        self._suspects = {node_id: until for node_id, until in self._suspects.items() if until > now}
        if not self._suspects:
            return frozenset()
        return frozenset(
            instance.instance_id
            for instance in world.instances.values()
            if any(shard.node_id in self._suspects for shard in instance.shards)
        )

    def _start(self, route: Route, world: World, request: GenerationRequest) -> Stream:
        if route.node_id == self._node_id:
            if route.instance_id not in self._local:
                raise InstanceNotReadyError(f"Instance {route.instance_id} is gone. Ask again.", retry_after=1.0)
            return self._local.submit(route.instance_id, request)
        ways = ways_to(route.node_id, world.nodes, self._node_id)
        facts = world.nodes[route.node_id]
        sent = _Sent(route.node_id, facts.life, facts.sequence)
        flying = self._flying.setdefault(route.instance_id, [])
        flying.append(sent)
        return self._client.generate(
            route.node_id, ways, route.instance_id, request, ended=partial(self._landed, route.instance_id, sent)
        )

    def _landed(self, instance_id: str, sent: _Sent) -> None:
        flying = self._flying[instance_id]
        flying.remove(sent)
        if not flying:
            del self._flying[instance_id]

    def _pending(self, world: World) -> dict[str, int]:
        """For each instance elsewhere, requests of ours that its node's newest facts cannot count yet. Those of this
        machine are counted as they are."""
        pending = {}
        for instance_id, flying in self._flying.items():
            facts = world.nodes.get(flying[0].node_id)
            if facts is not None:
                new = sum((one.life, one.sequence) == (facts.life, facts.sequence) for one in flying)
                pending[instance_id] = new
        return pending
