"""The kv plane's view of an MLX cache: what it looks like, and its entries as plain arrays.

Parts of a *tokens* or *window* leaf are named `keys` and `values`; those of a quantised one `keys.packed`,
`keys.scales`, `keys.biases`, and the same for values. States are numbered: what holds them is MLX's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import QuantizedKVCache

from tandem.engines.mlx.cache_kinds import kind_of, leaves
from tandem.kv.dtypes import Array, DTypeName
from tandem.kv.layout import Layer, Layout, Part, StateArray

DTYPE_NAMES: dict[mx.Dtype, DTypeName] = {
    mx.float32: "float32",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.uint8: "uint8",
    mx.int8: "int8",
    mx.uint16: "uint16",
    mx.int16: "int16",
    mx.uint32: "uint32",
    mx.int32: "int32",
    mx.uint64: "uint64",
    mx.int64: "int64",
}
MLX_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SUFFIXES = ("packed", "scales", "biases")


def layout_of(cache: list[Any]) -> Layout:
    """What each leaf of a cache holds, read off one that has seen tokens."""
    return Layout(tuple(_layer(leaf) for leaf in leaves(cache)))


def _layer(leaf: Any) -> Layer:
    kind = kind_of(leaf)
    if kind == "state":
        return Layer(
            "state",
            states=tuple(
                StateArray(str(number), tuple(array.shape), DTYPE_NAMES[array.dtype])
                for number, (_, array) in enumerate(state_arrays(leaf))
            ),
        )
    parts = tuple(
        Part(name, array.shape[1], array.shape[3], DTYPE_NAMES[array.dtype])
        for name, array in named_parts((leaf.keys, leaf.values))
    )
    if kind == "window":
        return Layer("window", parts=parts, window=leaf.max_size)
    if isinstance(leaf, QuantizedKVCache):
        return Layer("tokens", parts=parts, group_size=leaf.group_size, bits=leaf.bits)
    return Layer("tokens", parts=parts)


def named_parts(entries: Any) -> list[tuple[str, mx.array]]:
    """(name, array) of a leaf's keys and values, in the layout's order. Arrays are `[1, heads, tokens, dim]`."""
    found: list[tuple[str, mx.array]] = []
    for name, tensor in zip(("keys", "values"), entries, strict=True):
        if isinstance(tensor, mx.array):
            found.append((name, tensor))
        else:
            found.extend((f"{name}.{suffix}", part) for suffix, part in zip(_SUFFIXES, tensor, strict=False))
    return found


def entries_of(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """The reverse of `named_parts`: (keys, values) from arrays in the layout's order."""
    half = len(arrays) // 2
    if half == 1:
        return arrays[0], arrays[1]
    return tuple(arrays[:half]), tuple(arrays[half:])


def state_arrays(leaf: Any) -> list[tuple[str, mx.array]]:
    """(name, array) of a *state* leaf, in the layout's order; what is no array stays out."""
    return [(name, value) for name, value in tree_flatten(leaf.state) if isinstance(value, mx.array)]


def set_state_arrays(leaf: Any, template: Any, arrays: Sequence[mx.array]) -> None:
    """Give a *state* leaf the arrays that `state_arrays` named, in that order.

    Args:
        template: a leaf of the same kind that has seen tokens, for what is no array.
    """
    values = iter(arrays)
    flat = [
        (name, next(values) if isinstance(value, mx.array) else value) for name, value in tree_flatten(template.state)
    ]
    leaf.state = tree_unflatten(flat)


def to_numpy(array: mx.array) -> Array:
    """An evaluated array's memory as numpy, without a copy where MLX allows it; bfloat16 as its 2-byte pattern."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    view: Array = np.array(array, copy=False)
    view.flags.writeable = False
    return view


def to_mlx(array: Array, dtype: DTypeName) -> mx.array:
    """An MLX array with a copy of `array`'s content; bfloat16 comes as its 2-byte pattern."""
    wanted = MLX_DTYPES[dtype]
    if wanted == mx.bfloat16:
        return mx.array(array).view(mx.bfloat16)
    return mx.array(array, wanted)
