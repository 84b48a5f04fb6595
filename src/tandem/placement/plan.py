"""Where an instance goes: `place` turns a wish and the state of the cluster into an intent, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import PlacementError, UnplaceableError
from tandem.models.cards import ModelCard, plain_card
from tandem.placement.planner import Constraints, Plan, Planner, Refusal, normalised, short_name
from tandem.placement.world import World, display_name
from tandem.types.intents import InstanceIntent, InstanceMeta, Shard, Sharding

__all__ = ["PlacementRequest", "instance_of", "over_several", "place"]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What somebody wants to run.

    Attributes:
        reference: what a node obtains the model by.
        min_nodes: at least so many.
        node_ids: nodes that have to take part; with `exact`, no other ones.
        context_length: tokens that have to fit; 0 for a default that is enough for most conversations.
        override_memory: do not refuse for lack of memory.
        cache_bytes: of cache for an engine that takes all of it as it starts (vLLM); 0 lets the planner choose.
    """

    card: ModelCard
    reference: str
    sharding: Sharding = "Pipeline"
    meta: InstanceMeta = "MlxRing"
    min_nodes: int = 1
    node_ids: tuple[str, ...] = ()
    exact: bool = False
    context_length: int = 0
    override_memory: bool = False
    cache_bytes: int = 0

    def constraints(self) -> Constraints:
        """The part of it that every attempt has in common."""
        return Constraints(
            frozenset(self.node_ids), self.exact, self.context_length, self.override_memory, self.cache_bytes
        )


def place(
    request: PlacementRequest, world: World, instance_id: str, *, launch: bool = False, created: float = 0.0
) -> InstanceIntent:
    """Plan an instance on as few nodes as hold it, on the best of those sets. The same arguments give the same plan.

    Args:
        instance_id: of the new instance; its runners are named after it.
        launch: the plan is to be carried out now, and not only to be shown.
        created: unix seconds, for people.

    Raises:
        UnplaceableError: 422; this cannot work whatever the cluster's state is, or not in this version.
        PlacementError: 409; it does not fit the cluster as it is now.
    """
    planner = Planner(request.card, world, request.constraints())
    least = max(1, request.min_nodes, len(set(request.node_ids)))
    refusals: list[Refusal] = []
    for size in range(least, max(least, len(world.nodes)) + 1):
        found = planner.attempt(request.sharding, request.meta, size)
        if isinstance(found, Plan):
            if launch and size > 1:
                raise UnplaceableError(_not_yet(request.card, found, refusals))
            return instance_of(found, request, instance_id, created)
        refusals.append(found)
        if _settled(planner, request, least):
            break
    # What may pass says more than that some number of nodes does not divide the model.
    for refusal in refusals:
        if not refusal.permanent:
            raise PlacementError(refusal.message)
    raise UnplaceableError(refusals[0].message)


def _settled(planner: Planner, request: PlacementRequest, least: int) -> bool:
    """Whether more nodes cannot help: the request is at fault, or exactly its nodes are wanted."""
    _, meta = normalised(request.card, request.sharding, request.meta, least)
    return planner.request_fault(meta) is not None or (request.exact and bool(request.node_ids))


def _not_yet(card: ModelCard, plan: Plan, why: Sequence[Refusal]) -> str:
    names = ", ".join(f"'{display_name(member.facts)}'" for member in plan.members)
    instead = why[0].message if why else "Place it on one node."
    return (
        f"{short_name(card)} would fit on {len(plan.members)} nodes ({names}), but {over_several(plan.meta)}; this "
        f"version shows such plans only. {instead}"
    )


def over_several(meta: InstanceMeta) -> str:
    """Why no instance of this kind runs on several nodes yet; the end of a sentence."""
    if meta == "Vllm":
        return "vLLM over several nodes (tensor or pipeline parallel, by Ray) comes in a later version"
    return "running one instance over several nodes comes in a later version"


def instance_of(plan: Plan, request: PlacementRequest, instance_id: str, created: float = 0.0) -> InstanceIntent:
    """The intent that carries out a plan."""
    world = len(plan.members)
    return InstanceIntent(
        instance_id=instance_id,
        model_id=request.card.model_id,
        reference=request.reference,
        meta=plan.meta,
        sharding=plan.sharding,
        shards=tuple(
            Shard(member.node_id, f"{instance_id}-{rank}", rank, world, *plan.layers[rank])
            for rank, member in enumerate(plan.members)
        ),
        card=plain_card(request.card),
        options={
            name: value
            for name, value in (("context_length", request.context_length), ("cache_bytes", plan.cache_bytes))
            if value
        },
        created=created,
    )
