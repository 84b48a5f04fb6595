"""Every way in which a model could be placed now, for people to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem.models.cards import ModelCard
from tandem.placement.plan import PlacementRequest, instance_of
from tandem.placement.planner import Plan, Planner, RefusalKind, normalised
from tandem.placement.world import World
from tandem.types.intents import InstanceIntent, InstanceMeta, Sharding

SHARDINGS: tuple[Sharding, ...] = ("Pipeline", "Tensor")
METAS: tuple[InstanceMeta, ...] = ("MlxRing", "MlxJaccl", "Vllm")


@dataclass(frozen=True, slots=True)
class Preview:
    """One way to place a model, or why it is none.

    Attributes:
        nodes: how many; 0 with an error that does not depend on their number.
        memory_delta_by_node: bytes that each node's own layers, cache and engine take; None with an error.
        error: what is in the way, and what to do about it.
    """

    model_id: str
    sharding: Sharding
    meta: InstanceMeta
    nodes: int
    instance: InstanceIntent | None
    memory_delta_by_node: dict[str, int] | None
    error: str | None


def previews(
    card: ModelCard,
    world: World,
    node_ids: Iterable[str] = (),
    *,
    identify: Callable[[], str],
    reference: str = "",
    context_length: int = 0,
) -> list[Preview]:
    """Plans of {Pipeline, Tensor} x {MlxRing, MlxJaccl, Vllm} with 1 to all nodes.

    One for each sharding, kind and number of nodes; of what is impossible, one for each sharding, kind and
    sort of reason, with the fewest nodes.
    What amounts to the same (one node is never split) appears once.

    Args:
        node_ids: nodes that have to take part.
        identify: gives each planned instance an id. A client may send a preview back to have it created, so ids have
            to be new.
        reference: what nodes obtain the model by; its id by default.
    """
    required = tuple(dict.fromkeys(node_ids))
    request = PlacementRequest(card, reference or card.model_id, node_ids=required, context_length=context_length)
    planner = Planner(card, world, request.constraints())
    found: dict[tuple[Sharding, InstanceMeta, int], Preview] = {}
    refused: dict[tuple[Sharding, InstanceMeta, RefusalKind], Preview] = {}
    metas: tuple[InstanceMeta, ...] = ("Sim",) if card.family == "sim" else METAS
    for wanted_sharding in SHARDINGS:
        for wanted_meta in metas:
            for size in range(max(1, len(required)), max(1, len(world.nodes)) + 1):
                sharding, meta = normalised(card, wanted_sharding, wanted_meta, size)
                if (sharding, meta, size) in found:
                    continue
                plan = planner.attempt(sharding, meta, size)
                if isinstance(plan, Plan):
                    instance = instance_of(plan, request, identify())
                    needs = {member.node_id: need for member, need in zip(plan.members, plan.needs, strict=True)}
                    found[sharding, meta, size] = Preview(card.model_id, sharding, meta, size, instance, needs, None)
                    continue
                if planner.request_fault(meta) is not None:
                    # Whatever the number of nodes: once for this combination, as it was wanted.
                    sharding, meta, size = wanted_sharding, wanted_meta, 0
                refused.setdefault(
                    (sharding, meta, plan.kind),
                    Preview(card.model_id, sharding, meta, size, None, None, plan.message),
                )
                if size == 0:
                    break
    return [*found.values(), *refused.values()]
