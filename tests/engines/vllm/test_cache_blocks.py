"""Layouts of a block: those of GPUs on tensors of the processor, and orders as a CPU kernel could have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not importable here: run these tests with vLLM's interpreter")

from tandem.engines.vllm.cache_blocks import (  # noqa: E402
    Blocks,
    BlockShape,
    PermutedBlocks,
    ViewedBlocks,
    cpu_blocks,
    gpu_blocks,
)
from tandem.errors import UnsupportedError  # noqa: E402

COUNT, HEADS, TOKENS, DIM = 6, 3, 32, 16
SHAPE = BlockShape(HEADS, DIM, DIM, "vLLM 0.32.0 on CPU, layer model.layers.0.attn")


def straight(keys, values, slots, memory) -> None:
    """As a GPU's kernel writes: rows of a key and its value."""
    memory[slots // TOKENS, :, slots % TOKENS] = torch.cat([keys, values], -1)


def turned(keys, values, slots, memory) -> None:
    """Keys as [dim, tokens], then values as [tokens, dim]."""
    elements = memory.view(memory.shape[0], HEADS if memory.shape[1] == HEADS else 2, -1)
    half = elements.shape[2] // 2
    key_half = elements[..., :half].unflatten(-1, (DIM, TOKENS))
    value_half = elements[..., half:].unflatten(-1, (TOKENS, DIM))
    key_half[slots // TOKENS, :, :, slots % TOKENS] = keys
    value_half[slots // TOKENS, :, slots % TOKENS] = values


def tiled(keys, values, slots, memory) -> None:
    """Pairs of a key's elements side by side for all tokens, pairs of tokens side by side for values."""
    elements = memory.view(memory.shape[0], memory.shape[1], -1)
    half = elements.shape[2] // 2
    for row, slot in enumerate(slots.tolist()):
        block, token = divmod(slot, TOKENS)
        for dim in range(DIM):
            elements[block, :, (dim // 2) * 2 * TOKENS + 2 * token + dim % 2] = keys[row, :, dim]
            elements[block, :, half + (token // 2) * 2 * DIM + 2 * dim + token % 2] = values[row, :, dim]


def losing(keys, values, slots, memory) -> None:
    """Keeps no values."""
    straight(keys, torch.zeros_like(values), slots, memory)


def entries(seed: int, tokens: int):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, HEADS, DIM, generator=generator)
    return keys, torch.randn(tokens, HEADS, DIM, generator=generator)


def check(blocks: Blocks, write: Callable[..., None]) -> None:
    """That what a kernel wrote is read, and what is written is read, and nothing else changes."""
    slots = torch.tensor([4 * TOKENS + token for token in range(TOKENS)] + [TOKENS + token for token in range(TOKENS)])
    keys, values = entries(0, 2 * TOKENS)
    write(keys, values, slots)
    found = blocks.gather(torch.tensor([4, 1]))
    assert torch.equal(found[0], keys.transpose(0, 1))
    assert torch.equal(found[1], values.transpose(0, 1))
    new_keys, new_values = entries(1, 5)
    numbers, offsets = torch.tensor([4, 4, 4, 1, 1]), torch.tensor([29, 30, 31, 0, 1])
    blocks.scatter(numbers, offsets, new_keys.transpose(0, 1), new_values.transpose(0, 1))
    keys[29:34], values[29:34] = new_keys, new_values
    found = blocks.gather(torch.tensor([4, 1]))
    assert torch.equal(found[0], keys.transpose(0, 1))
    assert torch.equal(found[1], values.transpose(0, 1))
    assert not any(part.any() for part in blocks.gather(torch.tensor([0, 2, 3, 5])))


@pytest.mark.parametrize("order", ["heads-first", "tokens-first"])
def test_rows(order: str) -> None:
    if order == "heads-first":
        tensor = torch.zeros(COUNT, HEADS, TOKENS, 2 * DIM)
    else:
        tensor = torch.zeros(COUNT, TOKENS, HEADS, 2 * DIM).transpose(1, 2)
    check(gpu_blocks(tensor, SHAPE), lambda *written: straight(*written, tensor))


@pytest.mark.parametrize("shape", [(2, COUNT, TOKENS, HEADS, DIM), (COUNT, 2, TOKENS, HEADS, DIM)])
def test_keys_and_values_apart(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    keys, values = (tensor[0], tensor[1]) if shape[0] == 2 else (tensor[:, 0], tensor[:, 1])

    def write(new_keys, new_values, slots) -> None:
        keys[slots // TOKENS, slots % TOKENS] = new_keys
        values[slots // TOKENS, slots % TOKENS] = new_values

    check(gpu_blocks(tensor, SHAPE), write)


def test_values_of_another_size() -> None:
    tensor = torch.randn(COUNT, HEADS, TOKENS, 24)
    keys, values = gpu_blocks(tensor, BlockShape(HEADS, 16, 8, "")).gather(torch.tensor([3]))
    assert torch.equal(keys, tensor[3, ..., :16])
    assert torch.equal(values, tensor[3, ..., 16:])


@pytest.mark.parametrize(
    "shape",
    [
        (COUNT, HEADS, TOKENS, DIM),
        (COUNT, TOKENS, HEADS, 2 * DIM),
        (2, 2, TOKENS, HEADS, DIM),
        (COUNT, HEADS, TOKENS * 2 * DIM),
    ],
)
def test_unknown_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.32\.0 on CPU, layer model\.layers\.0\.attn") as refusal:
        gpu_blocks(torch.zeros(shape), SHAPE)
    assert str(shape) in refusal.value.message


@pytest.mark.parametrize(("write", "kind"), [(straight, ViewedBlocks), (turned, ViewedBlocks), (tiled, PermutedBlocks)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_order_is_learnt(write: Callable[..., None], kind: type, dtype: str) -> None:
    tensor = torch.zeros(COUNT, HEADS, TOKENS, 2 * DIM, dtype=torch.float32)
    # What is learnt holds for an element type; the check's numbers need all of float32's bits.
    cpu_blocks(tensor.to(getattr(torch, dtype)), SHAPE, "vec", write)
    blocks = cpu_blocks(tensor, SHAPE, "vec", write)
    assert isinstance(blocks, kind)
    check(blocks, lambda *written: write(*written, tensor))


def test_padded_pages() -> None:
    memory = torch.zeros(COUNT, HEADS * TOKENS * 2 * DIM + 100)
    tensor = memory[:, : HEADS * TOKENS * 2 * DIM].unflatten(1, (HEADS, TOKENS, 2 * DIM))
    check(cpu_blocks(tensor, SHAPE, "vec", turned), lambda *written: turned(*written, tensor))


def test_kernel_that_loses_something_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="kernel 'odd'"):
        cpu_blocks(torch.zeros(COUNT, HEADS, TOKENS, 2 * DIM), SHAPE, "odd", losing)
