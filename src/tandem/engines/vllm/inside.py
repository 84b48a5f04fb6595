"""What is read from within vLLM that its interface does not tell: how far a prompt is, what its cache holds.

Written against vLLM 0.32; nothing else of the engine reaches into vLLM's scheduler.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm import LLMEngine, SamplingParams
from vllm.v1.request import Request


class Computed(NamedTuple):
    """How far a prompt is: tokens in the cache, and how many of them were there before."""

    tokens: int
    cached: int


class Inside:
    """A running vLLM's scheduler and cache.

    Args:
        engine: in this process.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._core: Any = engine.engine_core.engine_core
        self._scheduler: Any = self._core.scheduler
        config = self._scheduler.kv_cache_config
        self._blocks = int(config.num_blocks)
        self._bytes = sum(int(tensor.size) for tensor in config.kv_cache_tensors)

    def computed(self, vllm_id: str) -> Computed:
        """How far a request is that vLLM has and that has not ended."""
        request = self._scheduler.requests[vllm_id]
        stats = request.prefill_stats
        return Computed(int(request.num_computed_tokens), int(stats.num_cached_tokens) if stats is not None else 0)

    def has(self, vllm_id: str) -> bool:
        """Whether vLLM has a request that has not ended."""
        return vllm_id in self._scheduler.requests

    def prefix_length(self, tokens: list[int]) -> int:
        """How many leading tokens of a prompt are in the prefix cache now, in whole blocks, and not all of it."""
        params = SamplingParams(max_tokens=1)
        request = Request("", tokens, params, None, block_hasher=self._core.request_block_hasher)
        hit = int(self._scheduler.kv_cache_manager.get_computed_blocks(request)[1])
        return hit - hit % int(self._scheduler.block_size)

    def limit(self, tokens: int) -> None:
        """The next steps compute at most so many tokens each."""
        self._scheduler.max_num_scheduled_tokens = tokens

    @property
    def kv_bytes_per_token(self) -> int:
        """Growth of the cache with each token, until the first window is full; 0 where it is constant."""
        total = 0
        for group in self._scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            if hasattr(spec, "head_size"):
                total += len(group.layer_names) * int(spec.page_size_bytes) // int(spec.block_size)
        return total

    @property
    def cache_bytes(self) -> int:
        """Of the blocks that running requests hold."""
        return int(self._bytes * self._scheduler.kv_cache_manager.usage)

    @property
    def prefix_cache_bytes(self) -> int:
        """Of all blocks that a prompt to come may find."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return self._bytes * len(pool.cached_block_hash_to_block) // max(1, self._blocks)

    @property
    def is_empty(self) -> bool:
        """No request is left, and no block is held for one."""
        scheduler = self._scheduler
        return not (scheduler.requests or scheduler.running or len(scheduler.waiting)) and self.cache_bytes == 0
