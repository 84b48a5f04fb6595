"""The arrays of a cache that does not exist yet, for its entries to arrive in.

numpy and MLX see the same memory. Nothing computes with it before the cache is made, and then numpy's views are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from tandem.engines.mlx.cache_kinds import kind_of, leaves
from tandem.engines.mlx.layout import MLX_DTYPES, entries_of
from tandem.kv.dtypes import Array
from tandem.kv.layout import Layout


class CacheLanding:
    """Arrays for all *tokens* layers; *windows* and *states* are copied at the end, as they take little.

    Args:
        cache: an empty cache of the model.
        end: tokens that the cache will have seen. There is room for more, as the cache itself would make it.
    """

    def __init__(self, layout: Layout, cache: list[Any], end: int) -> None:
        self._parts: dict[int, list[mx.array]] = {}
        for index, (leaf, layer) in enumerate(zip(leaves(cache), layout.layers, strict=True)):
            if kind_of(leaf) == "tokens":
                capacity = end + leaf.step - end % leaf.step
                self._parts[index] = [
                    # numpy has no bfloat16.
                    mx.zeros(
                        (1, part.heads, capacity, part.dim),
                        mx.uint16 if part.dtype == "bfloat16" else MLX_DTYPES[part.dtype],
                    )
                    for part in layer.parts
                ]
        self._layout = layout
        mx.eval(self._parts)

    def view(self, layer: int, part: int) -> Array | None:
        """See `tandem.kv.staging.Landing`."""
        if layer not in self._parts:
            return None
        view: Array = np.array(self._parts[layer][part], copy=False)[0]
        return view

    def holds(self, layer: int) -> bool:
        """Whether a layer's entries arrive here."""
        return layer in self._parts

    def take(self, layer: int) -> tuple[Any, Any]:
        """(keys, values) for a cache to own. No view may be left: the cache's first update would copy all of them."""
        arrays = self._parts.pop(layer)
        return entries_of(
            [
                array.view(mx.bfloat16) if part.dtype == "bfloat16" else array
                for part, array in zip(self._layout.layers[layer].parts, arrays, strict=True)
            ]
        )


def land(layout: Layout, make_cache: Callable[[], list[Any]], start: int, end: int) -> CacheLanding | None:
    """A landing for the tokens `[start, end)`. None where the cache begins with tokens that are held already: with them
    in the same arrays they would be there twice while the rest arrives."""
    return None if start else CacheLanding(layout, make_cache(), end)
