"""The kv plane's view of a model in vLLM: the same as of the same model in MLX, but for element types."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engines.vllm.exchange import CacheLayer
from tandem.kv.layout import Layer, Layout, Part, StateArray


def layout_of(layers: Sequence[CacheLayer]) -> Layout:
    """The layout of a model with these leaf caches."""
    return Layout(tuple(_layer(layer) for layer in layers))


def _layer(layer: CacheLayer) -> Layer:
    if layer.kind == "state":
        return Layer("state", states=tuple(StateArray(state.name, state.shape, state.dtype) for state in layer.states))
    dims = (("keys", layer.key_dim), ("values", layer.value_dim))
    parts = tuple(Part(name, layer.heads, dim, layer.dtype) for name, dim in dims)
    return Layer(layer.kind, parts=parts, window=layer.window)
