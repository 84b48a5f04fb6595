"""The cluster as placement and routing look at it, made anew only when something has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from tandem.cluster.intents import effective_links, trimmed_links
from tandem.cluster.state import ClusterState
from tandem.placement.links import automatic_links
from tandem.placement.world import World
from tandem.types.facts import NodeFacts, RunnerFact
from tandem.types.intents import Entry, InstanceIntent, LinkIntent

MEETING_SECONDS = 5.0
"""A node that has just started knows instances from its disk before it has met the nodes that run them: for so long
those count as being loaded, not as dead."""


class View:
    """Facts and intents as one `World`.

    Args:
        state: as it is known now.
        automatic: add the links that the cluster makes by itself.
    """

    def __init__(
        self,
        node_id: str,
        state: Callable[[], ClusterState],
        *,
        automatic: bool,
    ) -> None:
        self._node_id = node_id
        self._state = state
        self._runners: tuple[RunnerFact, ...] = ()
        self._with_automatic = automatic
        self._automatic: dict[str, LinkIntent] = {}
        self._met: set[str] = set()
        self._meets_until = time.monotonic() + MEETING_SECONDS
        self._routing: tuple[ClusterState, World] | None = None
        self._whole: tuple[ClusterState, World] | None = None
        self._wanted: tuple[dict[str, Entry], dict[str, InstanceIntent], dict[str, LinkIntent]] | None = None

    def runners_are(self, runners: tuple[RunnerFact, ...]) -> None:
        """Those of this machine, as they are now: what is told to others is told a few times a second at most."""
        self._runners = runners
        self._routing = self._whole = None

    def routing(self) -> World:
        """Links trimmed to instances that are there; without automatic ones, which change nobody's role."""
        state = self._state()
        if self._meets_until and time.monotonic() >= self._meets_until:
            self._meets_until = 0.0
            self._routing = self._whole = None
        if self._routing is None or self._routing[0] is not state:
            if self._wanted is None or self._wanted[0] is not state.intents:
                self._wanted = (state.intents, state.instances, effective_links(state))
            _, instances, links = self._wanted
            nodes = state.nodes
            if self._node_id in nodes:
                mine = msgspec.structs.replace(nodes[self._node_id], runners=self._runners)
                nodes = {**nodes, self._node_id: mine}
            self._routing = (state, World(nodes, instances, links, self._unmet(nodes, instances)))
        return self._routing[1]

    def _unmet(self, nodes: Mapping[str, NodeFacts], instances: Mapping[str, InstanceIntent]) -> frozenset[str]:
        """Nodes of instances that were not seen yet, while this one is new; who left was seen."""
        if not self._meets_until:
            return frozenset()
        self._met.update(nodes)
        return frozenset(shard.node_id for one in instances.values() for shard in one.shards) - self._met

    def whole(self) -> World:
        """The same with automatic links."""
        state, world = self._state(), self.routing()
        if self._whole is None or self._whole[0] is not state:
            if self._with_automatic:
                # With those of before, which are kept longer than they would be made: rates go up and down.
                before = trimmed_links(self._automatic, world.instances)
                found = automatic_links(replace(world, links={**world.links, **before}))
                self._automatic = {link.link_id: link for link in found}
                world = replace(world, links={**world.links, **self._automatic})
            self._whole = (state, world)
        return self._whole[1]
