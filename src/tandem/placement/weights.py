"""What a model's weights take in memory: on a CPU that is more than what they take on disk."""

from __future__ import annotations

import re

from tandem.models.cards import ModelCard
from tandem.types.facts import Backend

WIDENED_MOST = 8
"""Weights in 4 bits take eight times as much in float32, less what their scales took."""
WIDENED_SHARE = 0.5
"""Of the free memory, what they may take at most."""
HALF = frozenset(("", "none", "bf16", "bfloat16", "f16", "fp16", "float16"))


def widens(stored: int, free: int) -> bool:
    """Whether MLX on a CPU computes quantised weights of `stored` bytes in float32, which is much faster, or as they
    are, as `free` bytes of memory do not suffice for that."""
    return stored * WIDENED_MOST < free * WIDENED_SHARE


def stored_bits(card: ModelCard) -> float:
    """Bits of one weight on disk, scales included; of the widest tensors, as embeddings often are: `MXFP4-Q8` has them
    at 8 bits. A card that names no quantisation has 16-bit numbers."""
    name = card.quantization.lower()
    if name in HALF:
        return 16
    if "32" in name:
        return 32
    return 4.5 if "4" in name and "8" not in name else 8.5


def loaded_bits(card: ModelCard, backend: Backend | None, free: int | None = None, *, on_cpu: bool = False) -> float:
    """Bits of one weight in memory.

    Args:
        free: bytes that the node will have free as it loads the model. None counts quantised weights as they are
            stored: the least that they can take.
        on_cpu: for vLLM, that it computes on the processor: in float32, and quantised weights as they are.
    """
    stored = stored_bits(card)
    if backend == "Vllm" and on_cpu:
        return 32 if stored == 16 else stored
    if backend != "MlxCpu" or stored == 32:
        return stored
    return 32 if stored == 16 or (free is not None and widens(card.storage_size, free)) else stored


def loaded_size(card: ModelCard, backend: Backend | None, free: int | None = None, *, on_cpu: bool = False) -> int:
    """Bytes of all weights in memory, at most; `free` and `on_cpu` as in `loaded_bits`."""
    stored = stored_bits(card)
    if loaded_bits(card, backend, free, on_cpu=on_cpu) == stored:
        return card.storage_size
    if stored == 16:
        return 2 * card.storage_size
    bits = min((int(digit) for digit in re.findall("[2-8]", card.quantization)), default=32 // WIDENED_MOST)
    return -(-card.storage_size * 32 // bits)
