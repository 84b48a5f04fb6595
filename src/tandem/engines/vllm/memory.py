"""How much memory vLLM's paged cache gets. vLLM takes all of it at start, so this asks for what is needed, no more."""

from __future__ import annotations

from typing import Any, NamedTuple

from tandem.errors import ModelError

SHARE = 0.85
"""Of the free memory, what weights and caches may take together; the rest is for activations and other programs."""
CPU_SHARE = 0.5
"""The same where the memory is the machine's own: everything else on it lives there, too."""
CPU_TYPICAL_TOKENS = 2048
"""On a CPU the cache has room for one sequence of the full context and for others of this length. When they get longer
together, vLLM puts the youngest aside and computes it again later."""
BLOCK_TOKENS = 128
"""The largest usual block: what a sequence takes is rounded up to it, and vLLM keeps one block for itself."""
LEAST_CONTEXT = 256


class CachePlan(NamedTuple):
    """Bytes of the cache, and the context that fits into them."""

    bytes: int
    context_length: int


def bytes_per_token(config: dict[str, Any], itemsize: int) -> int:
    """Cache of one token, as if every layer kept all tokens: an upper bound for windows and recurrent layers.

    Args:
        config: the folder's `config.json`.
        itemsize: bytes of an element.
    """
    text = config.get("text_config") or config
    layers = int(text.get("num_hidden_layers") or text.get("n_layer") or 1)
    if rank := text.get("kv_lora_rank"):
        return layers * (int(rank) + int(text.get("qk_rope_head_dim") or 0)) * itemsize
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    width = int(text.get("hidden_size") or text.get("n_embd") or 0)
    dim = int(text.get("head_dim") or width // heads)
    return layers * 2 * kv_heads * dim * itemsize


def plan(
    per_token: int, context_length: int, max_batch: int, free: int, weights: int, *, accelerator: bool, granted: int = 0
) -> CachePlan:
    """What to ask vLLM for.

    Args:
        per_token: bytes.
        free: bytes that nobody uses now.
        weights: bytes that are still to be loaded.
        granted: bytes that placement set aside for caches; 0 for none.

    Raises:
        ModelError: there is no room for a context of any use.
    """
    padding = BLOCK_TOKENS * (max_batch + 1)
    others = context_length if accelerator else min(context_length, CPU_TYPICAL_TOKENS)
    wanted = per_token * (context_length + (max_batch - 1) * others + padding)
    most = granted or int(free * (SHARE if accelerator else CPU_SHARE)) - weights
    if wanted <= most:
        return CachePlan(granted or wanted, context_length)
    fitting = most // per_token - 2 * BLOCK_TOKENS
    if fitting < min(LEAST_CONTEXT, context_length):
        raise ModelError(
            f"There are {max(0, most) >> 20} MiB for caches beside the weights; one token takes {per_token} bytes, so "
            "that no useful context fits. Stop other instances, or take a smaller model."
        )
    return CachePlan(most, min(context_length, fitting))
