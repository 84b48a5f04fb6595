"""Key/value caches in 4 or 8 bits.

mlx-lm's `QuantizedKVCache` takes the place of each `KVCache`; windows and recurrent states, which do not grow, stay as
they are. Entries are quantised as they are written, so that what attention reads never depends on how a prompt was cut
into chunks, or on how much of it came from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from tandem.engines.mlx.cache_kinds import arrays_in, leaves
from tandem.errors import ConfigError, UnsupportedError

BITS = (4, 8)
GROUP_SIZES = (64, 32)
"""Preferred first. mlx also knows 128, but what 128 divides, 64 does."""


class KvQuantisation(NamedTuple):
    """How entries are quantised: `bits` each, with one scale and one offset for `group_size` of them."""

    bits: int
    group_size: int

    def apply(self, caches: Sequence[Any]) -> list[Any]:
        """Empty caches, with those that grow replaced by quantised ones."""
        return [self._replaced(cache) for cache in caches]

    def _replaced(self, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*self.apply(cache.caches))
        return cache.to_quantized(self.group_size, self.bits) if type(cache) is KVCache else cache


def choose_quantisation(model: nn.Module, model_id: str, bits: int) -> KvQuantisation:
    """How to quantise `model`'s cache, tried out on a few tokens.

    Raises:
        ConfigError: no such number of bits.
        UnsupportedError: the model keeps nothing that could be quantised, or cannot read it back.
    """
    if bits not in BITS:
        raise ConfigError(
            f"The KV cache can be quantised to 4 or 8 bits, not to {bits}. Set TANDEM_KV_BITS to 4, 8 or 0."
        )
    off = "Set TANDEM_KV_BITS=0."
    cache: list[Any] = make_prompt_cache(model)
    _feed(model, cache, 2)
    growing = [leaf for leaf in leaves(cache) if type(leaf) is KVCache]
    if not growing:
        raise UnsupportedError(f"The cache of {model_id} does not grow with the prompt and cannot be quantised. {off}")
    widths = {array.shape[-1] for leaf in growing for array in arrays_in((leaf.keys, leaf.values))}
    sizes = [size for size in GROUP_SIZES if all(width and width % size == 0 for width in widths)]
    if not sizes:
        raise UnsupportedError(
            f"The cache of {model_id} has rows of {', '.join(map(str, sorted(widths)))} values, and only multiples of "
            f"{GROUP_SIZES[-1]} can be quantised. {off}"
        )
    chosen = KvQuantisation(bits, sizes[0])
    trial = chosen.apply(make_prompt_cache(model))
    try:
        for count in (2, 1):
            _feed(model, trial, count)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(f"The attention of {model_id} cannot read a quantised cache ({error}). {off}") from error
    return chosen


def _feed(model: nn.Module, cache: list[Any], count: int) -> None:
    logits = model(mx.zeros((1, count), mx.uint32), cache=cache)
    mx.eval(logits, [leaf.state for leaf in leaves(cache)])
