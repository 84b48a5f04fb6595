"""What an instance that a person asked this very machine for may take of it: no planner has looked at it before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.config import Settings
from tandem.errors import UnplaceableError
from tandem.placement.memory import Availability, footprint, known_cache_elements
from tandem.placement.vllm import cache_grant, vllm_fault
from tandem.placement.world import World, card_of, on_accelerator
from tandem.types.intents import InstanceIntent


def with_options(
    intent: InstanceIntent, world: World, settings: Settings, options: Mapping[str, Any] | None = None
) -> InstanceIntent:
    """The intent with its options; one for vLLM is granted a cache, as placement would, by what its node has now.

    Raises:
        UnplaceableError: the engine cannot load the model.
    """
    chosen = dict(options or {})
    card, [shard] = card_of(intent), intent.shards
    if intent.meta == "Vllm" and card is not None:
        if fault := vllm_fault(card):
            raise UnplaceableError(fault)
        if not chosen.get("cache_bytes"):
            facts = world.nodes.get(shard.node_id)
            length = chosen.get("context_length") or settings.context_length
            on_cpu = facts is not None and not on_accelerator(facts, "Vllm")
            needs = footprint(card, "Vllm", length, known_cache_elements(world, card.model_id), on_cpu=on_cpu)
            available = Availability(world).available(facts, "Vllm") if facts is not None else None
            chosen["cache_bytes"] = cache_grant(needs, available or 0, on_cpu=on_cpu)
    return msgspec.structs.replace(intent, options=chosen)
