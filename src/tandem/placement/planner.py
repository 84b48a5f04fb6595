"""One model in one world: what is possible with so many nodes, or why nothing is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tandem.models.cards import ModelCard
from tandem.placement.candidates import Candidates, Group, Member, Shape
from tandem.placement.layers import ranges, split_pipeline, tensor_fault
from tandem.placement.memory import Footprint, footprint, known_cache_elements
from tandem.placement.vllm import cache_grant, vllm_fault
from tandem.placement.world import META_BACKENDS, World, display_name, gigabytes, has_backend, on_accelerator
from tandem.types.facts import Backend
from tandem.types.intents import InstanceMeta, Sharding

RefusalKind: TypeAlias = Literal["request", "nodes", "engine", "tensor", "links", "memory"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits of a person's choosing.

    Attributes:
        node_ids: nodes that have to take part.
        exact: and no other ones.
        context_length: tokens that cache is planned for; 0 for a default.
        ignore_memory: place it whatever fits.
        cache_bytes: of cache for an engine that takes all of it as it starts; 0 lets the planner choose.
    """

    node_ids: frozenset[str] = frozenset()
    exact: bool = False
    context_length: int = 0
    ignore_memory: bool = False
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who takes which layers.

    Attributes:
        layers: half-open ranges, by rank.
        needs: bytes, by rank.
        cache_bytes: of them, the cache that an engine is granted which takes it as it starts; 0 for one that grows it.
    """

    sharding: Sharding
    meta: InstanceMeta
    members: tuple[Member, ...]
    layers: tuple[tuple[int, int], ...]
    needs: tuple[int, ...]
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no plan, and what to do.

    Attributes:
        permanent: no change of the cluster helps.
    """

    kind: RefusalKind
    message: str
    permanent: bool = False


def short_name(card: ModelCard) -> str:
    """The model's name without its publisher's."""
    return card.model_id.rpartition("/")[2]


def normalised(card: ModelCard, sharding: Sharding, meta: InstanceMeta, nodes: int) -> tuple[Sharding, InstanceMeta]:
    """What is really meant: simulated models run simulated, and one node needs neither tensors nor RDMA."""
    if card.family == "sim":
        meta = "Sim"
    if nodes == 1:
        return "Pipeline", "MlxRing" if meta == "MlxJaccl" else meta
    return sharding, meta


@dataclass(slots=True)
class Planner:
    """Remembers what its attempts have in common, so that many are cheap."""

    card: ModelCard
    world: World
    constraints: Constraints = Constraints()
    _candidates: Candidates = field(init=False)
    _footprints: dict[Backend | None, Footprint] = field(default_factory=dict, init=False)
    _faults: dict[InstanceMeta, Refusal | None] = field(default_factory=dict, init=False)
    _cache_elements: int | None = field(init=False)

    def __post_init__(self) -> None:
        self._candidates = Candidates(self.world, self.card.model_id)
        self._cache_elements = known_cache_elements(self.world, self.card.model_id)

    def footprint(self, backend: Backend | None) -> Footprint:
        """What the model takes with an engine, at least."""
        if backend not in self._footprints:
            length = self.constraints.context_length
            on_cpu = any(
                not on_accelerator(facts, backend)
                for facts in self.world.nodes.values()
                if backend == "Vllm" and has_backend(facts, backend)
            )
            self._footprints[backend] = footprint(self.card, backend, length, self._cache_elements, on_cpu=on_cpu)
        return self._footprints[backend]

    def footprint_on(self, member: Member) -> Footprint:
        """What the whole model takes on one node, as the engine will load it there if it has room for that."""
        free, length = member.facts.resources.memory_available, self.constraints.context_length
        on_cpu = not on_accelerator(member.facts, member.backend)
        usual = footprint(self.card, member.backend, length, self._cache_elements, free, on_cpu=on_cpu)
        if member.backend == "Vllm":
            return usual
        return usual if usual.single <= member.available else self.footprint(member.backend)

    def backends(self, meta: InstanceMeta) -> tuple[Backend | None, ...]:
        """Engines that this kind of instance and this model have in common, best first."""
        if meta == "Sim":
            return (None,)
        return tuple(backend for backend in META_BACKENDS[meta] if backend in self.card.backends)

    def request_fault(self, meta: InstanceMeta) -> Refusal | None:
        """What is wrong whatever the number of nodes."""
        if meta not in self._faults:
            self._faults[meta] = self._request_fault(meta)
        return self._faults[meta]

    def _request_fault(self, meta: InstanceMeta) -> Refusal | None:
        card, constraints = self.card, self.constraints
        if not self.backends(meta):
            runs = ", ".join(card.backends) or "no engine"
            return Refusal(
                "request", f"{short_name(card)} does not run as {meta}: its card names {runs}.", permanent=True
            )
        fault = vllm_fault(card) if meta == "Vllm" else None
        if fault is not None:
            return Refusal("request", fault, permanent=True)
        if card.context_length and constraints.context_length > card.context_length:
            return Refusal(
                "request",
                f"{short_name(card)} takes {card.context_length} tokens at most. Ask for a context of that or less.",
                permanent=True,
            )
        if not self.world.nodes:
            return Refusal("nodes", "There is no node to place an instance on. Start one with 'tandem up'.")
        unknown = sorted(constraints.node_ids - self.world.nodes.keys())
        if unknown:
            names = ", ".join(f"'{name}'" for name in unknown)
            return Refusal("nodes", f"There is no node {names} in the cluster now. Name nodes that are there, or none.")
        return None

    def attempt(self, sharding: Sharding, meta: InstanceMeta, size: int) -> Plan | Refusal:
        """The best plan with exactly `size` nodes.

        Engines are looked at before sizes: a node without the engine is no candidate, however much memory it has.
        """
        sharding, meta = normalised(self.card, sharding, meta, size)
        fault = self.request_fault(meta)
        if fault is not None:
            return fault
        if size > self.card.n_layers and sharding == "Pipeline":
            count = self.card.n_layers
            return Refusal(
                "nodes", f"{short_name(self.card)} has {count} layers: no more nodes than that.", permanent=True
            )
        if size > 1 and sharding == "Tensor":
            reason = tensor_fault(self.card, size)
            if reason is not None:
                return Refusal("tensor", reason, permanent=True)
        found: list[tuple[Group, Plan]] = []
        for backend in self.backends(meta):
            for group in self._groups(backend, sharding, meta, size):
                plan = self._plan(group, backend, sharding, meta)
                if plan is not None:
                    found.append((group, plan))
                    break
        if found:
            return min(found, key=lambda pair: (pair[0].merit, pair[0].node_ids))[1]
        return self._why_not(sharding, meta, size)

    def _groups(self, backend: Backend | None, sharding: Sharding, meta: InstanceMeta, size: int) -> tuple[Group, ...]:
        needs, constraints = self.footprint(backend), self.constraints
        least = needs.single if size == 1 else needs.fixed + needs.layer
        if sharding == "Tensor":
            least = needs.tensor(size)
        shape: Shape = "mesh" if sharding == "Tensor" or meta == "MlxJaccl" else "chain"
        return self._candidates.groups(
            backend,
            size,
            shape=shape,
            least=0 if constraints.ignore_memory else least,
            required=constraints.node_ids,
            exact=constraints.exact,
            worst="thunderbolt" if meta == "MlxJaccl" else "unknown",
        )

    def _plan(self, group: Group, backend: Backend | None, sharding: Sharding, meta: InstanceMeta) -> Plan | None:
        members = group.members
        size = len(members)
        needs = self.footprint(backend) if size > 1 else self.footprint_on(members[0])
        if sharding == "Tensor":
            whole = ((0, self.card.n_layers),) * size
            return Plan(sharding, meta, members, whole, (needs.tensor(size),) * size)
        counts = split_pipeline(
            needs,
            [member.available for member in members],
            [member.speed for member in members],
            ignore_memory=self.constraints.ignore_memory,
        )
        if counts is None:
            return None
        sizes = tuple(
            needs.pipeline(count, first=rank == 0, last=rank == size - 1) for rank, count in enumerate(counts)
        )
        if backend == "Vllm" and size == 1:
            on_cpu = not on_accelerator(members[0].facts, backend)
            granted = cache_grant(needs, members[0].available, self.constraints.cache_bytes, on_cpu=on_cpu)
            need = needs.single + granted - needs.cache
            if need > members[0].available and not self.constraints.ignore_memory:
                return None
            return Plan(sharding, meta, members, ranges(counts), (need,), granted)
        return Plan(sharding, meta, members, ranges(counts), sizes)

    # ------------------------------------------------------------------------------------------------------- refusals

    def _why_not(self, sharding: Sharding, meta: InstanceMeta, size: int) -> Refusal:
        name = short_name(self.card)
        engines = self.backends(meta)
        words = " or ".join(str(engine) for engine in engines)
        allowed = self.constraints.node_ids if self.constraints.exact else self.world.nodes.keys()
        if len(allowed) < size:
            return Refusal(
                "nodes", f"Nodes to choose from: {len(allowed)}; asked for: {size}. Ask for fewer nodes, or add some."
            )
        if size < len(self.constraints.node_ids):
            return Refusal("nodes", f"Nodes named: {len(self.constraints.node_ids)}; asked for: {size}. Name fewer.")
        for node_id in sorted(self.constraints.node_ids):
            reason = self._node_fault(node_id, engines)
            if reason is not None:
                return Refusal("engine", reason)
        able = {
            engine: [one for one in self._candidates.members(engine) if one.node_id in allowed] for engine in engines
        }
        if not any(able.values()):
            reason = self._node_fault(min(allowed), engines)
            return Refusal("engine", f"No node can run {name} as {meta}. {reason}")
        if max(len(members) for members in able.values()) < size:
            return Refusal(
                "engine",
                f"{name} was to run on {size} nodes with one engine ({words}), and there are "
                f"{max(len(members) for members in able.values())}. Ask for fewer nodes.",
            )
        engine = max(engines, key=lambda one: (len(able[one]) >= size, sum(member.available for member in able[one])))
        return self._too_small(sharding, meta, size, self.footprint(engine), able[engine])

    def _node_fault(self, node_id: str, engines: tuple[Backend | None, ...]) -> str | None:
        """Why one node is no candidate."""
        facts = self.world.nodes[node_id]
        if any(member.node_id == node_id for engine in engines for member in self._candidates.members(engine)):
            return None
        title = display_name(facts)
        reports = {engine.backend: engine for engine in facts.engines}
        usable = [engine for engine in engines if engine is None or (engine in reports and reports[engine].available)]
        if usable:
            return f"The node '{title}' does not say how much memory it has. Wait for its facts, or look at its log."
        broken = [
            f"{engine}: {reports[engine].reason}" for engine in engines if engine is not None and engine in reports
        ]
        words = " or ".join(str(engine) for engine in engines)
        detail = f" ({'; '.join(broken)})" if broken else ""
        return f"The node '{title}' does not have {words}{detail}. Install it there, or choose another node."

    def _too_small(
        self, sharding: Sharding, meta: InstanceMeta, size: int, needs: Footprint, members: list[Member]
    ) -> Refusal:
        name = short_name(self.card)
        if size > 1 and not self._candidates.groups(
            members[0].backend, size, required=self.constraints.node_ids, exact=self.constraints.exact
        ):
            return Refusal(
                "links",
                f"No {size} nodes that can run {name} reach one another: containers' and virtual machines' addresses "
                "do not count. Connect the nodes to one network.",
            )
        help_ = "Stop an instance or choose a smaller quantisation."
        required = self.constraints.node_ids
        named = [member for member in members if member.node_id in required]
        freest = max(named or members, key=lambda member: (member.available, member.node_id))
        title = display_name(freest.facts)
        if size == 1:
            which = "the node named," if named else "the freest node,"
            return Refusal(
                "memory",
                f"{name} needs {gigabytes(needs.single)}; {which} '{title}', has {gigabytes(freest.available)}. "
                f"{help_}",
            )
        if meta == "MlxJaccl" and not self._candidates.groups(
            "MlxMetal", size, shape="mesh", required=required, exact=self.constraints.exact, worst="thunderbolt"
        ):
            return Refusal(
                "links",
                f"MlxJaccl needs measured Thunderbolt links between all {size} nodes. Connect them, or choose MlxRing.",
            )
        if sharding == "Tensor":
            each = needs.tensor(size)
            fits = sum(member.available >= each for member in members)
            return Refusal(
                "memory",
                f"{name} split by tensors needs {gigabytes(each)} on each of {size} nodes; {fits} have that. {help_}",
            )
        together = sum(sorted((member.available for member in members), reverse=True)[:size])
        total = needs.layers * needs.layer + 2 * needs.table + size * needs.fixed
        return Refusal(
            "memory",
            f"{name} on {size} nodes needs {gigabytes(total)}; the freest {size} nodes have "
            f"{gigabytes(together)}, and none may be without a layer. {help_}",
        )
