"""What vLLM's cache looks like, layer by layer, and moving tokens and states out of and into it.

The only module that knows vLLM's cache: which kinds of layers there are, where a token of a request is, and in which
order states are kept. `cache_blocks` has what is inside a block. Written against vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tandem.engines.vllm.cache_blocks import Blocks, BlockShape, cpu_blocks, gpu_blocks
from tandem.engines.vllm.exchange import CacheLayer, CacheState
from tandem.errors import UnsupportedError
from tandem.kv.dtypes import Array, DTypeName

_DTYPE_NAMES: dict[torch.dtype, DTypeName] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True)
class EntryLayer:
    """A layer with one entry per token.

    Attributes:
        group: which of a request's block tables is the layer's.
        block_tokens: tokens in a block of that table.
        split: how many of the kernels' blocks such a block is.
    """

    layer: CacheLayer
    group: int
    block_tokens: int
    split: int
    blocks: Blocks

    def gather(self, table: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the tokens `[start, end)`, each `[heads, tokens, dim]`, on the cache's device."""
        size = self.blocks.tokens
        first, last = start // size, -(-end // size)
        wanted = [table[index // self.split] * self.split + index % self.split for index in range(first, last)]
        keys, values = self.blocks.gather(torch.tensor(wanted))
        cut = slice(start - first * size, end - first * size)
        return keys[:, cut], values[:, cut]

    def scatter(self, table: Sequence[int], start: int, keys: Array, values: Array) -> None:
        """Write the entries `[heads, tokens, dim]` of the tokens from `start` on."""
        tokens = torch.arange(start, start + keys.shape[1])
        index = tokens // self.blocks.tokens
        blocks = torch.tensor(table)[index // self.split] * self.split + index % self.split
        self.blocks.scatter(blocks, tokens % self.blocks.tokens, self._tensor(keys), self._tensor(values))

    def _tensor(self, array: Array) -> torch.Tensor:
        return to_tensor(array, self.layer.dtype)


@dataclass(frozen=True)
class StateLayer:
    """A recurrent layer.

    Attributes:
        tensors: one per state array, `[blocks, ...]`, as the kernels keep them.
        turned: which of them mlx-lm keeps with their last two axes exchanged.
    """

    layer: CacheLayer
    group: int
    block_tokens: int
    tensors: tuple[torch.Tensor, ...]
    turned: tuple[bool, ...]

    def read(self, block: int) -> list[torch.Tensor]:
        """Copies of the state arrays in a block, with a leading axis of one."""
        pairs = zip(self.tensors, self.turned, strict=True)
        states = [one[block].mT if turned else one[block] for one, turned in pairs]
        return [state.clone(memory_format=torch.contiguous_format)[None] for state in states]

    def write(self, block: int, arrays: Sequence[Array]) -> None:
        """The reverse of `read`."""
        for one, turned, state, array in zip(self.tensors, self.turned, self.layer.states, arrays, strict=True):
            tensor = to_tensor(array, state.dtype)[0]
            one[block] = tensor.mT if turned else tensor


@dataclass(frozen=True)
class CacheLayout:
    """All leaf caches of a loaded model, in the model's order."""

    leaves: tuple[EntryLayer | StateLayer, ...]

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """Their description."""
        return tuple(leaf.layer for leaf in self.leaves)


def to_numpy(tensor: torch.Tensor) -> Array:
    """A tensor in the processor's memory as numpy, without a copy; bfloat16 as its 2-byte pattern."""
    if tensor.dtype == torch.bfloat16:
        found: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return found
    plain: Array = tensor.numpy()
    return plain


def to_tensor(array: Array, dtype: DTypeName) -> torch.Tensor:
    """The reverse of `to_numpy`. A copy where the array is read-only."""
    source = array if array.flags.writeable else array.copy()
    if dtype == "bfloat16":
        return torch.from_numpy(source.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(source)


def describe(config: KVCacheConfig, tensors: Mapping[str, torch.Tensor], modules: Mapping[str, Any]) -> CacheLayout:
    """The layout of the cache that vLLM has made.

    Args:
        tensors: by layer name, as vLLM registers them with a connector.
        modules: the model's layers by name (`static_forward_context`).

    Raises:
        UnsupportedError: there is a layer of a kind, or a tensor of a shape, that is not known.
    """
    found = []
    for group, group_spec in enumerate(config.kv_cache_groups):
        for name in group_spec.layer_names:
            spec = group_spec.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            found.append(_leaf(name, group, spec, config.num_blocks, tensors, modules[name]))
    return CacheLayout(tuple(sorted(found, key=lambda leaf: _place(leaf.layer))))


def windows_of(spec: KVCacheSpec) -> set[int]:
    """The windows of a cache group's layers."""
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return {one.sliding_window for one in specs if isinstance(one, SlidingWindowSpec)}


def _leaf(
    name: str, group: int, spec: KVCacheSpec, count: int, tensors: Mapping[str, torch.Tensor], module: Any
) -> EntryLayer | StateLayer:
    # Kinds derived from these differ in ways that nobody has looked at here.
    if type(spec) in (FullAttentionSpec, SlidingWindowSpec):
        assert isinstance(spec, AttentionSpec)
        return _entry_leaf(name, group, spec, count, tensors[name], module)
    if type(spec) is MambaSpec:
        return _state_leaf(name, group, spec, module)
    raise UnsupportedError(f"{_where(name)}: Tandem does not know how to hand off a {type(spec).__name__} cache.")


def _entry_leaf(
    name: str, group: int, spec: AttentionSpec, count: int, tensor: torch.Tensor, module: Any
) -> EntryLayer:
    if spec.kv_quant_mode != KVQuantMode.NONE or spec.dtype not in _DTYPE_NAMES or spec.tokens_per_state != 1:
        raise UnsupportedError(
            f"{_where(name)}: a cache of {spec.dtype}, {spec.kv_quant_mode.name}, cannot be handed off. "
            "Load the model with kv_cache_dtype auto."
        )
    shape = BlockShape(spec.num_kv_heads, spec.head_size, spec.head_size_v, _where(name))
    if current_platform.is_cpu():
        blocks = cpu_blocks(tensor, shape, module.isa, _write_by_kernel(module.isa))
    else:
        blocks = gpu_blocks(tensor, shape)
    split, rest = divmod(spec.block_size, blocks.tokens)
    if rest or blocks.count != count * split:
        raise UnsupportedError(
            f"{_where(name)}: {blocks.count} blocks of {blocks.tokens} tokens are not {count} of {spec.block_size}."
        )
    window = getattr(module, "sliding_window", None) or 0
    if window != (spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0):
        # Loading fills windows only, and vLLM would take such a block for complete.
        raise UnsupportedError(
            f"{_where(name)}: a window of {window} in a cache for all tokens cannot be handed off. "
            "Load the model with vLLM's hybrid cache manager."
        )
    layer = CacheLayer(
        name,
        "window" if window else "tokens",
        heads=spec.num_kv_heads,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        dtype=_DTYPE_NAMES[spec.dtype],
        window=window,
    )
    return EntryLayer(layer, group, spec.block_size, split, blocks)


_writers: dict[str, Any] = {}


def _write_by_kernel(isa: str) -> Any:
    # One function per kernel, as what it does is remembered by it.
    if isa not in _writers:

        def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, memory: torch.Tensor) -> None:
            from vllm import _custom_ops

            count, heads, tokens, width = memory.shape
            key_half, value_half = memory.view(count, heads, 2 * tokens, width // 2).chunk(2, dim=2)
            _custom_ops.cpu_attn_reshape_and_cache(keys, values, key_half, value_half, slots, isa)

        _writers[isa] = write
    return _writers[isa]


def _state_leaf(name: str, group: int, spec: MambaSpec, module: Any) -> StateLayer:
    tensors = tuple(module.kv_cache)
    known = (MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.GDN_ATTN)
    if spec.mamba_type not in known or len(tensors) != 2 or any(one.dtype not in _DTYPE_NAMES for one in tensors):
        raise UnsupportedError(
            f"{_where(name)}: Tandem does not know the order of {spec.mamba_type.name} states of shapes "
            f"{[tuple(one.shape[1:]) for one in tensors]}, so prompts of this model cannot be handed off."
        )
    convolution, recurrent = tensors
    turned = (is_conv_state_dim_first(), False)
    if spec.mamba_type == MambaAttentionBackendEnum.GDN_ATTN and current_platform.is_cpu():
        # Declared [heads, values, keys], but vLLM's CPU kernels keep [heads, keys, values] in that memory.
        count, heads, value_dim, key_dim = recurrent.shape
        strides = (recurrent.stride(0), recurrent.stride(1), value_dim, 1)
        recurrent = recurrent.as_strided((count, heads, key_dim, value_dim), strides, recurrent.storage_offset())
        turned = (turned[0], True)
    states = []
    for number, (tensor, turn) in enumerate(zip((convolution, recurrent), turned, strict=True)):
        shape = tuple(tensor[0].mT.shape) if turn else tuple(tensor.shape[1:])
        states.append(CacheState(str(number), (1, *shape), _DTYPE_NAMES[tensor.dtype]))
    layer = CacheLayer(name, "state", states=tuple(states))
    return StateLayer(layer, group, spec.block_size, (convolution, recurrent), turned)


def _place(layer: CacheLayer) -> tuple[int, bool]:
    """Where in the model a layer is. Of two in one decoder layer the recurrent one comes first, as in mlx-lm."""
    numbers = [int(part) for part in layer.name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnsupportedError(f"{_where(layer.name)}: it is not known where in the model this layer is.")
    return numbers[0], layer.kind != "state"


def _where(name: str) -> str:
    return f"vLLM {vllm.__version__} on {current_platform.device_name or current_platform.device_type}, layer {name}"
