"""What is special about vLLM: it takes its whole cache as it starts, and cannot load every model."""

from __future__ import annotations

from tandem.models.cards import ModelCard
from tandem.models.quantisation import in_mlx_format
from tandem.placement.memory import Footprint

SEQUENCES = 8
"""Conversations of the planned length that it is granted cache for, where the node has room: as many as an instance
answers at a time by default."""


def cache_grant(needs: Footprint, available: int, wanted: int = 0) -> int:
    """Bytes of cache for one instance: enough for one conversation of the planned length, and for up to `SEQUENCES`
    where they fit. Never what is left of the node.

    Args:
        needs: with the cache of one conversation.
        available: bytes that the node has for the instance.
        wanted: by a person; 0 for none.
    """
    if wanted > 0:
        return wanted
    room = available - needs.weights - needs.fixed
    return max(needs.cache, min(room, SEQUENCES * needs.cache))


def vllm_fault(card: ModelCard) -> str | None:
    """Why vLLM cannot run a model whatever the nodes; None if nothing speaks against it."""
    name = card.model_id.rpartition("/")[2]
    if in_mlx_format(card):
        base = f" of {card.base_model}" if card.base_model else ""
        return (
            f"{name} is quantised in MLX's own format ({card.quantization}), which vLLM cannot load. Run it as "
            f"MlxRing, or take the original weights{base}, or a quantisation that vLLM knows (AWQ, GPTQ, FP8)."
        )
    return None
