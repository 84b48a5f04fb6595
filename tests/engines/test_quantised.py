"""Caches in 4 and 8 bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tandem.errors import ConfigError, UnsupportedError

from . import tiny
from .drive import Reference, assert_same, greedy, make_engine, run

WIDE = {"head_dim": 64}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models whose heads are wide enough to be quantised."""
    root = tmp_path_factory.mktemp("wide")
    built: dict[str, Path] = {}

    def folder(kind: str, **changes: Any) -> Path:
        name = kind + "".join(f"-{value}" for value in changes.values())
        if name not in built:
            built[name] = tiny.build(kind, root / name, **(WIDE | changes))
        return built[name]

    return folder


def words(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


def quantised_cache(reference: Reference, group_size: int, bits: int) -> list[Any]:
    """mlx-lm's cache, quantised from the first token on."""
    return [
        leaf.to_quantized(group_size, bits) if type(leaf).__name__ == "KVCache" else leaf
        for leaf in make_prompt_cache(reference.model)
    ]


@pytest.mark.parametrize(("kind", "bits"), [("llama", 4), ("llama", 8), ("gemma3", 8), ("qwen3_next", 4)])
def test_greedy_answers(kind: str, bits: int, wide_folder: Callable[..., Path]) -> None:
    """Alone and several at once; cold, and after prefix hits."""
    folder = wide_folder(kind)
    reference = Reference(folder)
    engine = make_engine(folder, kv_bits=bits, prefix_cache_bytes=64 << 20)
    lengths = [1, 2, 64, 65, 257]

    def expect(prompt: list[int], count: int) -> Any:
        cache = quantised_cache(reference, 64, bits)
        return reference.generate(prompt, count, prompt_cache=cache, prefill_step_size=256)

    ties = 0
    prompts = [words(index, length) for index, length in enumerate(lengths)]
    for prompt in prompts:
        (answer,) = run(engine, greedy(prompt, 6))
        ties += assert_same(answer.tokens, expect(prompt, 6), (kind, bits, len(prompt)))
    turns = [[*prompt, *expect(prompt, 6).tokens, *words(99, 20)] for prompt in prompts[2:]]
    answers = run(engine, *(greedy(turn, 6) for turn in turns))
    for turn, answer in zip(turns, answers, strict=True):
        ties += assert_same(answer.tokens, expect(turn, 6), (kind, bits, len(turn)))
    assert sum(answer.accepted.cached_tokens > 0 for answer in answers) == len(turns)
    assert ties <= 2
    engine.check_idle()


def test_what_is_written_is_mlx_lms(wide_folder: Callable[..., Path]) -> None:
    """mlx-lm's own `kv_bits` quantises after the first chunk; the entries it writes are the same, bit for bit."""
    folder = wide_folder("llama")
    reference = Reference(folder)
    prompt = words(5, 40)
    theirs = make_prompt_cache(reference.model)
    reference.generate(prompt, 1, prompt_cache=theirs, kv_bits=8, kv_group_size=64, quantized_kv_start=0)
    engine = make_engine(folder, kv_bits=8, prefix_cache_bytes=64 << 20)
    run(engine, greedy(prompt, 1))
    hit = engine._prefix.find(prompt[:39])
    assert hit.length == 39
    # The first layer's input does not depend on attention.
    for ours, other in zip(hit.cache[0].keys, theirs[0].keys, strict=True):
        assert mx.array_equal(ours[..., :39, :], other[..., :39, :])


def test_a_smaller_group_where_it_must_be(wide_folder: Callable[..., Path]) -> None:
    folder = wide_folder("llama", head_dim=32)
    reference = Reference(folder)
    engine = make_engine(folder, kv_bits=8)
    prompt = words(1, 70)
    (answer,) = run(engine, greedy(prompt, 6))
    expected = reference.generate(prompt, 6, prompt_cache=quantised_cache(reference, 32, 8))
    assert_same(answer.tokens, expected)


def test_entries_are_smaller(wide_folder: Callable[..., Path]) -> None:
    folder = wide_folder("llama")
    full, eight, four = (make_engine(folder, kv_bits=bits) for bits in (0, 8, 4))
    sizes = [engine._memory.needed(1000) for engine in (full, eight, four)]
    # float32 entries; 64 of them share a scale and an offset of four bytes each.
    assert sizes[1] / sizes[0] == pytest.approx((8 + 1) / 32)
    assert sizes[2] / sizes[0] == pytest.approx((4 + 1) / 32)


@pytest.mark.parametrize(
    ("kind", "words_of_it"),
    [
        ("gpt_oss", "sinks"),
        ("mamba2", "does not grow"),
        ("deepseek_v3", "rows of 8, 24"),
        ("deepseek_v32", "rows of 8, 16, 24"),
    ],
)
def test_caches_that_cannot_be_quantised(kind: str, words_of_it: str, wide_folder: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedError, match=words_of_it) as raised:
        make_engine(wide_folder(kind), kv_bits=8)
    assert "TANDEM_KV_BITS=0" in raised.value.message


def test_latent_attention_is_refused_whatever_its_width(wide_folder: Callable[..., Path]) -> None:
    folder = wide_folder("deepseek_v3", kv_lora_rank=64, qk_rope_head_dim=32)
    with pytest.raises(UnsupportedError, match="cannot read a quantised cache"):
        make_engine(folder, kv_bits=8)


def test_unknown_bits(wide_folder: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="4 or 8"):
        make_engine(wide_folder("llama"), kv_bits=5)
