"""How much memory caches may take, and who has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import psutil

from tandem.engines.mlx.cache_kinds import arrays_in, kind_of, leaves
from tandem.engines.mlx.load import on_accelerator

SHARE_FOR_CACHES = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations and other programs."""
SHARE_FOR_PREFIXES = 0.3
"""Of what caches may take, the part that earlier prompts may keep while nobody needs it."""


class Growth(NamedTuple):
    """One simple cache: bytes for each token, for at most `limit` tokens (None: for all)."""

    bytes_per_token: int
    limit: int | None


class SequenceSize(NamedTuple):
    """How large one sequence's cache gets.

    Attributes:
        constant: bytes that do not depend on the sequence's length.
        growth: one for each simple cache that grows.
    """

    constant: int
    growth: tuple[Growth, ...]

    @property
    def bytes_per_token(self) -> int:
        """Growth with each token, until the first window is full."""
        return sum(part.bytes_per_token for part in self.growth)

    def bytes_for(self, tokens: int) -> int:
        """Bytes for a sequence of `tokens`."""
        return self.constant + sum(
            part.bytes_per_token * (tokens if part.limit is None else min(tokens, part.limit)) for part in self.growth
        )


def measure_sequence(cache: list[Any]) -> SequenceSize:
    """How large a cache gets, read off one that has seen tokens."""
    constant = 0
    growth: list[Growth] = []
    for leaf in leaves(cache):
        if hasattr(leaf, "keys"):
            per_token = sum(int(array.nbytes) // array.shape[-2] for array in arrays_in((leaf.keys, leaf.values)))
            growth.append(Growth(per_token, leaf.max_size if kind_of(leaf) == "window" else None))
        else:
            constant += int(leaf.nbytes)
    return SequenceSize(constant, tuple(growth))


class MemoryBudget:
    """Bytes for the caches of running sequences and for the prefix cache, together.

    Args:
        total: bytes.
        sequence: how large a sequence's cache gets.
        padded: sequences are decoded in one batch, where each takes as much as the largest.
    """

    def __init__(self, total: int, sequence: SequenceSize, *, padded: bool = True) -> None:
        self.total = total
        self.sequence = sequence
        self.active = 0
        self._padded = padded

    @classmethod
    def measure(cls, sequence: SequenceSize, *, padded: bool) -> MemoryBudget:
        """Look at the device as it is now, with the weights loaded."""
        if on_accelerator():
            free = int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory()
        else:
            free = psutil.virtual_memory().available
        return cls(int(max(0, free) * SHARE_FOR_CACHES), sequence, padded=padded)

    def prefix_budget(self, setting: int) -> int:
        """The prefix cache's bytes: as set, or a share of the total for -1."""
        return int(self.total * SHARE_FOR_PREFIXES) if setting < 0 else setting

    def fits(self, size: int) -> bool:
        """Whether running sequences may take `size` bytes."""
        return size <= self.total

    def needed(self, tokens: int) -> int:
        """Bytes for a sequence of `tokens`."""
        return self.sequence.bytes_for(tokens)

    def together(self, sizes: Sequence[int]) -> int:
        """Bytes for sequences that alone would take `sizes`."""
        if not sizes:
            return 0
        return len(sizes) * max(sizes) if self._padded else sum(sizes)
