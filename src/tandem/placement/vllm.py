"""What is special about vLLM: it takes its whole cache as it starts, and cannot load every model."""

from __future__ import annotations

from tandem.models.cards import ModelCard
from tandem.models.quantisation import in_mlx_format
from tandem.placement.memory import VLLM_PADDING, VLLM_SEQUENCES, Footprint

SHORT_TOKENS = 2048
"""On a CPU, whose memory is the machine's, all requests but one are planned to be as long at most."""


def cache_grant(needs: Footprint, available: int, wanted: int = 0, *, on_cpu: bool = False) -> int:
    """Bytes of cache for one instance: enough for one request of the planned length, and for `VLLM_SEQUENCES` where
    they fit. Never what is left of the node: vLLM by itself takes nine tenths of a machine.

    Args:
        needs: with the cache of one request of the planned length.
        available: bytes that the node has for the instance.
        wanted: by a person; 0 for none.
        on_cpu: vLLM computes on the processor there.
    """
    if wanted > 0:
        return wanted
    length = needs.tokens - VLLM_PADDING
    others = (VLLM_SEQUENCES - 1) * (min(length, SHORT_TOKENS) if on_cpu else length)
    most = needs.cache * (needs.tokens + others) // needs.tokens
    return max(needs.cache, min(available - needs.weights - needs.fixed, most))


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
