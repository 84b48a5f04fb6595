"""From a model's name to a stream of events, wherever in the cluster the model runs."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from tandem.cluster.instances import LocalInstances
from tandem.cluster.nodeport.client import NodeClient
from tandem.errors import NodeLostError, TandemError, UnavailableError
from tandem.placement.addresses import addresses, with_port
from tandem.placement.routing import Asked, Refused, Route, choose
from tandem.placement.world import World
from tandem.runner.stream import Stream
from tandem.types import GenerationRequest

SUSPECT_SECONDS = 2.0
"""For which a node that could not be reached is asked only if there is no other."""
MOST_ATTEMPTS = 3
"""Instances that a request is tried on before anything of its answer was read. Those on nodes that
turned out to be gone do not count: many may go at once."""


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
        self._pending: Counter[str] = Counter()
        self._seen: dict[str, tuple[str, int]] = {}
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
        self._forget_shown(world)
        while True:
            suspects = self._on_suspects(world)
            route = choose(Asked(model, name, pending=self._pending, avoid=avoid | suspects), world)
            if suspects and isinstance(route, Refused):
                route = choose(Asked(model, name, pending=self._pending, avoid=avoid), world)
            if isinstance(route, Refused):
                raise last or route.error()
            try:
                stream = self._start(route, world, request)
            except UnavailableError as error:
                last = error
                avoid |= {route.instance_id}
                if len(avoid - suspects) >= MOST_ATTEMPTS:
                    raise
                continue
            self._pending[route.instance_id] += 1
            avoid |= {route.instance_id}
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
        # A request that is wrong is wrong everywhere.
        if not isinstance(error, UnavailableError):
            return None
        try:
            return self._try(model, request, name, tried, error)
        except TandemError:
            return None  # the first failure says more than that there is nobody else

    def _on_suspects(self, world: World) -> frozenset[str]:
        """Instances on nodes that could not be reached just now. Where several nodes die at once, a request would use
        up its attempts on them before their facts are gone."""
        if not self._suspects:
            return frozenset()
        now = time.monotonic()
        self._suspects = {node_id: until for node_id, until in self._suspects.items() if until > now}
        return frozenset(
            instance.instance_id
            for instance in world.instances.values()
            if any(shard.node_id in self._suspects for shard in instance.shards)
        )

    def _start(self, route: Route, world: World, request: GenerationRequest) -> Stream:
        if route.node_id == self._node_id:
            return self._local.submit(route.instance_id, request)
        there, here = world.nodes[route.node_id], world.nodes.get(self._node_id)
        if there.node_port is None or here is None:
            raise NodeLostError(f"Node {route.node_id} has not said where it can be reached. Try again in a second.")
        ways = [with_port(address, there.node_port) for address in addresses(there, here, here.links)]
        return self._client.generate(route.node_id, ways, route.instance_id, request)

    def _forget_shown(self, world: World) -> None:
        """Requests that a node's newest facts count already are not counted again."""
        for node_id, facts in world.nodes.items():
            if self._seen.get(node_id) != (facts.life, facts.sequence):
                self._seen[node_id] = (facts.life, facts.sequence)
                for runner in facts.runners:
                    self._pending.pop(runner.instance_id, None)
