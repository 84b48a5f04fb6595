"""Keys and values in vLLM's blocks: how one block is laid out in memory, and copying tokens out of and into blocks.

Everything works on plain tensors of any device, so that the layouts of a GPU can be tested on a CPU.

Layouts known, of vLLM 0.32:

- GPUs: `[blocks, heads, tokens, key dim + value dim]`, a row being a key and its value.
- GPUs, older versions: keys and values apart, `[2, blocks, tokens, heads, dim]` or `[blocks, 2, tokens, heads, dim]`.
- CPU: the tensor has the GPU's shape, but within a block and head the kernels pack elements as suits the processor's
  instructions. That order is learnt by asking the kernel: counted numbers are written through it and looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

import torch

from tandem.errors import UnsupportedError

Write: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes (keys, values), each `[tokens, heads, dim]`, at slots `[tokens]` into a cache `[blocks, heads, tokens, dims]`,
which is the last argument."""

_DIGIT_BITS = 7
"""Every number below 128 is exact in all element types that a cache has."""


class Blocks(Protocol):
    """The blocks of one layer, as the kernels divide them.

    Attributes:
        tokens: tokens in a block.
        count: how many blocks there are.
    """

    tokens: int
    count: int

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values in some blocks, each `[heads, tokens of these blocks, dim]`."""

    def scatter(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write tokens. `blocks` and `offsets` say where each goes; `keys` and `values` are `[heads, tokens, dim]`."""


class ViewedBlocks:
    """Blocks whose keys and values are strided views `[blocks, heads, tokens, dim]` of the cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys = keys
        self._values = values
        self.count, self.tokens = keys.shape[0], keys.shape[2]

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _joined(self._keys[blocks]), _joined(self._values[blocks])

    def scatter(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        device = self._keys.device
        blocks, offsets = blocks.to(device), offsets.to(device)
        self._keys[blocks, :, offsets] = keys.to(device).transpose(0, 1)
        self._values[blocks, :, offsets] = values.to(device).transpose(0, 1)


class PermutedBlocks:
    """Blocks in whose `[blocks, heads, elements]` the elements of keys and values are in any order.

    Args:
        keys, values: `[tokens, dim]`, where each element is among a block's and head's elements.
    """

    def __init__(self, elements: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._elements = elements
        self._keys = keys
        self._values = values
        self.count, self.tokens = elements.shape[0], keys.shape[0]

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._elements[blocks]
        keys, values = (
            found.index_select(2, order.flatten()).unflatten(2, order.shape) for order in (self._keys, self._values)
        )
        return _joined(keys), _joined(values)

    def scatter(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        heads = torch.arange(self._elements.shape[1], device=self._elements.device)[None, :, None]
        for order, entries in ((self._keys, keys), (self._values, values)):
            self._elements[blocks[:, None, None], heads, order[offsets][:, None]] = entries.transpose(0, 1)


def _joined(blocks: torch.Tensor) -> torch.Tensor:
    """`[blocks, heads, tokens, dim]` as `[heads, blocks * tokens, dim]`."""
    return blocks.transpose(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])


@dataclass(frozen=True)
class BlockShape:
    """What a layer's block must hold. `where` names version, platform and layer, for refusals."""

    heads: int
    key_dim: int
    value_dim: int
    where: str


def gpu_blocks(tensor: torch.Tensor, shape: BlockShape) -> Blocks:
    """The blocks of a layer on a GPU.

    Raises:
        UnsupportedError: the tensor's shape is none that is known.
    """
    heads, key_dim, value_dim = shape.heads, shape.key_dim, shape.value_dim
    found = tuple(tensor.shape)
    if len(found) == 4 and found[1] == heads and found[3] == key_dim + value_dim:
        return ViewedBlocks(tensor[..., :key_dim], tensor[..., key_dim:])
    if len(found) == 5 and found[3:] == (heads, key_dim) and key_dim == value_dim:
        if found[0] == 2 != found[1]:
            return ViewedBlocks(tensor[0].transpose(1, 2), tensor[1].transpose(1, 2))
        if found[1] == 2 != found[0]:
            return ViewedBlocks(tensor[:, 0].transpose(1, 2), tensor[:, 1].transpose(1, 2))
    raise _unknown(tensor, shape)


def cpu_blocks(tensor: torch.Tensor, shape: BlockShape, isa: str, write: Write) -> Blocks:
    """The blocks of a layer on a CPU.

    Args:
        isa: which of vLLM's CPU kernels the layer uses.
        write: calls that kernel.

    Raises:
        UnsupportedError: the tensor's shape, or what the kernel does, is none that is known.
    """
    if tensor.dim() != 4 or shape.key_dim != shape.value_dim:
        raise _unknown(tensor, shape)
    count, heads, tokens, width = tensor.shape
    if heads != shape.heads or width != shape.key_dim + shape.value_dim or tensor.stride()[2:] != (width, 1):
        raise _unknown(tensor, shape)
    order = _learnt_order(isa, tensor.dtype, tokens, shape.key_dim, write)
    if order is None:
        raise _unknown(tensor, shape, f", kernel {isa!r}, does not keep every element at a place of its own")
    elements = tensor.view(count, heads, tokens * width)
    views = [_strided(elements, part) for part in order]
    if views[0] is not None and views[1] is not None:
        return ViewedBlocks(views[0], views[1])
    return PermutedBlocks(elements, *order)


@cache
def _learnt_order(
    isa: str, dtype: torch.dtype, tokens: int, dim: int, write: Write
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where the kernel puts each element `[tokens, dim]` of keys and of values; None if that is no permutation."""
    # A second block and head, to see that it leaves others alone, and treats heads alike.
    written = torch.arange(2 * tokens * dim).view(2, tokens, dim)
    slots = torch.arange(tokens) + tokens
    content = torch.zeros(2, 2, tokens * 2 * dim, dtype=torch.int64)
    for shift in range(0, int(written.max()).bit_length(), _DIGIT_BITS):
        digits = ((written >> shift) & ((1 << _DIGIT_BITS) - 1)).to(dtype)
        keys, values = (part[:, None].expand(tokens, 2, dim).contiguous() for part in digits)
        memory = torch.zeros(2, 2, tokens, 2 * dim, dtype=dtype)
        write(keys, values, slots, memory)
        content += memory.view_as(content).to(torch.int64) << shift
    found = content[1, 0]
    if content[0].any() or not torch.equal(found, content[1, 1]):
        return None
    if not torch.equal(found.sort().values, written.flatten()):
        return None
    places = found.argsort().view_as(written)
    return places[0], places[1]


def _strided(elements: torch.Tensor, order: torch.Tensor) -> torch.Tensor | None:
    """`[blocks, heads, tokens, dim]` as a view, if the order is one of constant strides."""
    first = int(order[0, 0])
    by_token, by_dim = int(order[1, 0]) - first, int(order[0, 1]) - first
    tokens, dim = order.shape
    regular = first + by_token * torch.arange(tokens)[:, None] + by_dim * torch.arange(dim)[None]
    if not torch.equal(order, regular):
        return None
    return elements.as_strided(
        (*elements.shape[:2], tokens, dim),
        (*elements.stride()[:2], by_token, by_dim),
        elements.storage_offset() + first,
    )


def _unknown(tensor: torch.Tensor, shape: BlockShape, why: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"{shape.where}: a cache of shape {tuple(tensor.shape)}, {tensor.dtype}{why}, is none of the layouts that "
        f"Tandem knows for {shape.heads} heads of {shape.key_dim} + {shape.value_dim}. The model can be served, but "
        "its prompts cannot be handed off."
    )
