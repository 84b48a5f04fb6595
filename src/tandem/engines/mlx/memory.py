"""How much memory caches may take, and who has it."""

from __future__ import annotations

import mlx.core as mx
import psutil

from tandem.engines.mlx.load import on_accelerator

SHARE_FOR_CACHES = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations and other programs."""
SHARE_FOR_PREFIXES = 0.3
"""Of what caches may take, the part that earlier prompts may keep while nobody needs it."""


class MemoryBudget:
    """Bytes for the caches of running sequences and for the prefix cache, together.

    Args:
        total: bytes.
        bytes_per_token: growth of one sequence's cache with each token.
    """

    def __init__(self, total: int, bytes_per_token: int) -> None:
        self.total = total
        self.bytes_per_token = bytes_per_token
        self.active = 0

    @classmethod
    def measure(cls, bytes_per_token: int) -> MemoryBudget:
        """Look at the device as it is now, with the weights loaded."""
        if on_accelerator():
            free = int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory()
        else:
            free = psutil.virtual_memory().available
        return cls(int(max(0, free) * SHARE_FOR_CACHES), bytes_per_token)

    def prefix_budget(self, setting: int) -> int:
        """The prefix cache's bytes: as set, or a share of the total for -1."""
        return int(self.total * SHARE_FOR_PREFIXES) if setting < 0 else setting

    def fits(self, size: int) -> bool:
        """Whether running sequences may take `size` bytes."""
        return size <= self.total

    def needed(self, tokens: int) -> int:
        """Bytes for a sequence of `tokens`."""
        return tokens * self.bytes_per_token
