"""Which sets of nodes are tried for an instance: few, and good ones first.

Sets grow greedily from a few first nodes, so that their number is bounded whatever the cluster looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tandem.placement.addresses import LINK_RANK, LinkKind, Reach
from tandem.placement.memory import Availability
from tandem.placement.world import World, has_backend, node_speed, on_accelerator
from tandem.types.facts import Backend, NodeFacts

MOST_SEEDS = 6
"""First nodes that a set grows from."""
Merit: TypeAlias = tuple[float, float, float, float, float]
Shape: TypeAlias = Literal["chain", "mesh"]
"""Who talks to whom: each node to the next (pipeline), or everybody to everybody (tensor)."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node as a candidate for one model and engine.

    Attributes:
        available: bytes.
        speed: see `world.node_speed`.
        merit: smaller is better: accelerated, downloaded, memory by powers of two, speed, memory.
    """

    facts: NodeFacts
    backend: Backend | None
    available: int
    speed: float | None
    merit: Merit

    @classmethod
    def of(cls, facts: NodeFacts, backend: Backend | None, available: int, model_id: str) -> Member:
        """A node that could give `available` bytes."""
        speed = node_speed(facts)
        merit = (
            0.0 if on_accelerator(facts, backend) else 1.0,
            -(1.0 if backend is None else _downloaded(facts, model_id)),
            -float((available >> 28).bit_length()),
            -(speed or 0.0),
            -float(available),
        )
        return cls(facts, backend, available, speed, merit)

    @property
    def node_id(self) -> str:
        """Its id."""
        return self.facts.node_id


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes in order of rank.

    Attributes:
        merit: smaller is better: the worst link that they would use, then what `Member.merit` compares, as the mean or
            the worst of all members.
    """

    members: tuple[Member, ...]
    node_ids: tuple[str, ...]
    merit: tuple[float, ...]


class Chain:
    """Nodes in the order in which they were added. Every beginning of it is a group."""

    def __init__(self, members: Sequence[Member], links: Sequence[int]) -> None:
        self.members = tuple(members)
        self.node_ids = tuple(member.node_id for member in members)
        self._merits: list[tuple[float, ...]] = []
        link = accelerated = downloaded = memory = 0.0
        buckets = slowest = float("-inf")
        for count, (member, rank) in enumerate(zip(members, links, strict=True), 1):
            link = max(link, rank)
            accelerated += member.merit[0]
            downloaded += member.merit[1]
            buckets = max(buckets, member.merit[2])
            slowest = max(slowest, member.merit[3])
            memory += member.merit[4]
            self._merits.append((link, accelerated / count, downloaded / count, buckets, slowest, memory / count))

    def group(self, size: int) -> Group:
        """Its first `size` nodes."""
        return Group(self.members[:size], self.node_ids[:size], self._merits[size - 1])


@dataclass(slots=True)
class Candidates:
    """Sets of nodes for one model in one world. Remembers what it has worked out."""

    world: World
    model_id: str
    _availability: Availability = field(init=False)
    _reach: dict[str, Reach] = field(default_factory=dict, init=False)
    _rows: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    _members: dict[Backend | None, tuple[Member, ...]] = field(default_factory=dict, init=False)
    _chains: dict[object, tuple[Chain, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._availability = Availability(self.world)

    def members(self, backend: Backend | None) -> tuple[Member, ...]:
        """Every node on which `backend` really imports and whose memory is known, best first. None takes every node."""
        if backend not in self._members:
            found = []
            for facts in self.world.nodes.values():
                if backend is not None and not has_backend(facts, backend):
                    continue
                available = self._availability.available(facts, backend)
                if available is not None:
                    found.append(Member.of(facts, backend, available, self.model_id))
            found.sort(key=lambda member: (member.merit, member.node_id))
            self._members[backend] = tuple(found)
        return self._members[backend]

    def _row(self, node_id: str) -> dict[str, int]:
        """How bad a node's link to every other one is: `LINK_RANK`, or `NO_LINK`."""
        if not self._reach:
            self._reach = {one: Reach.of(facts) for one, facts in self.world.nodes.items()}
        if node_id not in self._rows:
            mine = self._reach[node_id]
            self._rows[node_id] = {
                other: self._rows[other][node_id] if other in self._rows else mine.rank(reach)
                for other, reach in self._reach.items()
                if other != node_id
            }
        return self._rows[node_id]

    def groups(
        self,
        backend: Backend | None,
        size: int,
        *,
        shape: Shape = "chain",
        least: int = 0,
        required: frozenset[str] = frozenset(),
        exact: bool = False,
        worst: LinkKind = "unknown",
    ) -> tuple[Group, ...]:
        """At most `2 * MOST_SEEDS + 1` sets of `size` nodes of one engine, best first.

        Args:
            least: bytes that every member has to have.
            required: nodes that have to be in it.
            exact: and no other ones.
            worst: links that are not worse than this kind.
        """
        able = [member for member in self.members(backend) if member.available >= least]
        if exact:
            able = [member for member in able if member.node_id in required]
        if not required <= {member.node_id for member in able} or len(able) < size or size < len(required):
            return ()
        if size == 1:
            return tuple(Chain([one], [0]).group(1) for one in able if not required or one.node_id in required)
        key = (backend, shape, least, required, exact, worst)
        if key not in self._chains:
            self._chains[key] = self._grow(able, shape, required, LINK_RANK[worst])
        groups = [chain.group(size) for chain in self._chains[key] if len(chain.members) >= size]
        found = {group.node_ids: group for group in groups}
        return tuple(sorted(found.values(), key=lambda group: (group.merit, group.node_ids)))

    def _grow(self, able: Sequence[Member], shape: Shape, required: frozenset[str], worst: int) -> tuple[Chain, ...]:
        """Chains as long as they get. Required nodes come first, so that every beginning that is long enough has them.

        Besides the sets with the best links there is one by memory alone: if any set holds the model, it does, or comes
        near to it.
        """
        by_memory = sorted(able, key=lambda member: (-member.available, member.node_id))
        chains: list[Chain] = []
        for order in (able, by_memory):
            seeds = [member for member in order if not required or member.node_id in required]
            chains += [self._chain(seed, order, shape, required, worst) for seed in seeds[:MOST_SEEDS]]
        chains.append(self._chain(seeds[0], by_memory, shape, required, worst, links_first=False))
        return tuple({chain.node_ids: chain for chain in chains}.values())

    def _chain(
        self,
        seed: Member,
        order: Sequence[Member],
        shape: Shape,
        required: frozenset[str],
        worst: int,
        *,
        links_first: bool = True,
    ) -> Chain:
        """Add one node after another: the best linked one, and of these the first in `order`."""
        chain, links = [seed], [0]
        rest = {member.node_id: member for member in order if member is not seed}
        row = self._row(seed.node_id)
        ranks = {node_id: row[node_id] for node_id in rest}
        missing = [node_id for node_id in rest if node_id in required]
        while rest:
            offers = [node_id for node_id in (missing or rest) if ranks[node_id] <= worst]
            if not offers:
                break
            chosen = min(offers, key=ranks.__getitem__) if links_first else offers[0]
            if missing:
                missing.remove(chosen)
            chain.append(rest.pop(chosen))
            links.append(ranks[chosen])
            row = self._row(chosen)
            ranks = {
                node_id: max(ranks[node_id], row[node_id]) if shape == "mesh" else row[node_id] for node_id in rest
            }
        return Chain(chain, links)


def _downloaded(facts: NodeFacts, model_id: str) -> float:
    for download in facts.downloads:
        if download.model_id.casefold() == model_id.casefold():
            if download.state == "completed":
                return 1.0
            return min(1.0, download.done / download.total) if download.total > 0 else 0.0
    return 0.0
