"""What an instance says of itself."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """What a loaded instance says of its model.

    Attributes:
        context_length: the longest prompt plus answer, in tokens.
        capabilities: `text`, `thinking`, `tools`, ...
        engine: `mlx`, `vllm` or `sim`.
        dtype: of the weights as loaded, e.g. `float32`.
        weight_bytes: memory that the weights take.
        kv_bytes_per_token: cache growth per token and sequence, 0 where it is constant.
    """

    model_id: str
    engine: str
    architecture: str
    context_length: int
    vocabulary_size: int
    dtype: str
    capabilities: tuple[str, ...] = ("text",)
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


class EngineLoad(msgspec.Struct, frozen=True):
    """How busy an engine is now. Counts of requests, bytes of memory; `steps` grows with every engine step.

    Attributes:
        elsewhere: of the prefilling requests, those whose prompt another node is computing: nothing to do for this one.
    """

    waiting: int = 0
    prefilling: int = 0
    elsewhere: int = 0
    decoding: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    active_memory: int = 0
    steps: int = 0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
