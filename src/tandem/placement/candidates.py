"""Which sets of nodes are tried for an instance: few, and good ones first.

Sets grow greedily from a few first nodes, so that their number is bounded whatever the cluster looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from tandem.placement.addresses import LINK_RANK, LinkKind, Reach
from tandem.placement.memory import Availability
from tandem.placement.world import World, has_backend, node_speed
from tandem.types.facts import Backend, NodeFacts

MOST_SEEDS = 6
"""First nodes that a set grows from."""
NO_LINK = 9
ACCELERATED: frozenset[Backend | None] = frozenset(("MlxMetal", "MlxCuda", "Vllm"))
Shape: TypeAlias = Literal["chain", "mesh"]
"""Who talks to whom: each node to the next (pipeline), or everybody to everybody (tensor)."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node as a candidate for one model and engine.

    Attributes:
        available: bytes.
        downloaded: share of the model that is on its disk, 0 to 1.
        speed: see `world.node_speed`.
    """

    facts: NodeFacts
    backend: Backend | None
    available: int
    downloaded: float
    speed: float | None

    @property
    def node_id(self) -> str:
        """Its id."""
        return self.facts.node_id

    def merit(self) -> tuple[float, ...]:
        """Smaller is better: accelerated, downloaded, memory by powers of two, speed, memory."""
        return (
            0.0 if self.backend in ACCELERATED else 1.0,
            -self.downloaded,
            -float((self.available >> 28).bit_length()),
            -(self.speed or 0.0),
            -float(self.available),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes in order of rank, and the worst link that they would use."""

    members: tuple[Member, ...]
    worst_link: int

    def merit(self) -> tuple[object, ...]:
        """Smaller is better: links, then what `Member.merit` compares, over all members."""
        each = [member.merit() for member in self.members]
        count = len(each)
        accelerated, downloaded, _, _, memory = (sum(values) / count for values in zip(*each, strict=True))
        buckets = max(merit[2] for merit in each)
        slowest = max(merit[3] for merit in each)
        ids = tuple(member.node_id for member in self.members)
        return self.worst_link, accelerated, downloaded, buckets, slowest, memory, ids


@dataclass(slots=True)
class Candidates:
    """Sets of nodes for one model in one world. Remembers what it has worked out."""

    world: World
    model_id: str
    _availability: Availability = field(init=False)
    _reach: dict[str, Reach] = field(default_factory=dict, init=False)
    _ranks: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    _members: dict[Backend | None, tuple[Member, ...]] = field(default_factory=dict, init=False)
    _chains: dict[object, tuple[Group, ...]] = field(default_factory=dict, init=False)

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
                    downloaded = 1.0 if backend is None else _downloaded(facts, self.model_id)
                    found.append(Member(facts, backend, available, downloaded, node_speed(facts)))
            found.sort(key=lambda member: (member.merit(), member.node_id))
            self._members[backend] = tuple(found)
        return self._members[backend]

    def rank(self, one: str, other: str) -> int:
        """How bad the link between two nodes is: `LINK_RANK`, or `NO_LINK`."""
        key = (one, other) if one < other else (other, one)
        if key not in self._ranks:
            kind = self._reach_of(one).link(self._reach_of(other))
            self._ranks[key] = NO_LINK if kind is None else LINK_RANK[kind]
        return self._ranks[key]

    def _reach_of(self, node_id: str) -> Reach:
        if node_id not in self._reach:
            self._reach[node_id] = Reach.of(self.world.nodes[node_id])
        return self._reach[node_id]

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
            return tuple(Group((member,), 0) for member in able if not required or member.node_id in required)
        key = (backend, shape, least, required, exact, worst)
        if key not in self._chains:
            self._chains[key] = self._grow(able, shape, required, LINK_RANK[worst])
        found: dict[tuple[str, ...], Group] = {}
        for chain in self._chains[key]:
            if len(chain.members) >= size:
                members = chain.members[:size]
                ids = tuple(member.node_id for member in members)
                found.setdefault(ids, Group(members, self._worst(members, shape)))
        return tuple(sorted(found.values(), key=Group.merit))

    def _worst(self, members: Sequence[Member], shape: Shape) -> int:
        ids = [member.node_id for member in members]
        if shape == "chain":
            return max(self.rank(one, other) for one, other in pairwise(ids))
        return max(self.rank(one, other) for index, one in enumerate(ids) for other in ids[:index])

    def _grow(self, able: Sequence[Member], shape: Shape, required: frozenset[str], worst: int) -> tuple[Group, ...]:
        """Chains as long as they get. Required nodes come first, so that every beginning that is long enough has them.

        Besides the sets with the best links there is one by memory alone: if any set holds the model, it does, or comes
        near to it.
        """
        by_merit = {member.node_id: (member.merit(), member.node_id) for member in able}
        by_memory = {member.node_id: ((-float(member.available),), member.node_id) for member in able}
        seeds = [member for member in able if not required or member.node_id in required]
        largest = sorted(seeds, key=lambda member: by_memory[member.node_id])
        chains = [self._chain(seed, able, by_merit, shape, required, worst, True) for seed in seeds[:MOST_SEEDS]]
        chains += [self._chain(seed, able, by_memory, shape, required, worst, True) for seed in largest[:MOST_SEEDS]]
        chains.append(self._chain(largest[0], able, by_memory, shape, required, worst, False))
        return tuple(Group(tuple(chain), 0) for chain in chains)

    def _chain(
        self,
        seed: Member,
        able: Sequence[Member],
        merits: Mapping[str, tuple[tuple[float, ...], str]],
        shape: Shape,
        required: frozenset[str],
        worst: int,
        links_first: bool,
    ) -> list[Member]:
        chain = [seed]
        rest = {member.node_id: member for member in able if member is not seed}
        ranks = {node_id: self.rank(seed.node_id, node_id) for node_id in rest}
        while rest:
            missing = required & rest.keys()
            offers = [node_id for node_id in (missing or rest) if ranks[node_id] <= worst]
            if not offers:
                break
            if links_first:
                chosen = min(offers, key=lambda node_id: (ranks[node_id], merits[node_id]))
            else:
                chosen = min(offers, key=merits.__getitem__)
            chain.append(rest.pop(chosen))
            for node_id in rest:
                rank = self.rank(chosen, node_id)
                ranks[node_id] = max(ranks[node_id], rank) if shape == "mesh" else rank
        return chain


def _downloaded(facts: NodeFacts, model_id: str) -> float:
    for download in facts.downloads:
        if download.model_id.casefold() == model_id.casefold():
            if download.state == "completed":
                return 1.0
            return min(1.0, download.done / download.total) if download.total > 0 else 0.0
    return 0.0
