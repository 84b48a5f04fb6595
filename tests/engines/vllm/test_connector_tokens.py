"""The connector on a model whose layers keep all tokens: what it hands over is what mlx-lm computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.drive import Reference

from .support import (
    Computed,
    Kept,
    Vllm,
    check,
    loads_what_mlx_computed,
    mlx_cache,
    prompt_of,
    source_of_mlx,
    source_of_tap,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("clean")]

BLOCK = 32


@pytest.fixture(scope="module")
def folder(vllm_folder: Callable[[str], Path]) -> Path:
    return vllm_folder("llama")


@pytest.fixture(scope="module")
def vllm(start_vllm: Callable[..., Vllm], folder: Path) -> Vllm:
    return start_vllm(folder)


def test_layers_are_described(vllm: Vllm) -> None:
    layers = vllm.registry.layers()
    assert [(one.kind, one.heads, one.key_dim, one.value_dim, one.dtype) for one in layers] == [
        ("tokens", 2, 32, 32, "float32")
    ] * 3


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300])
def test_cold(vllm: Vllm, reference: Reference, length: int) -> None:
    prompt, kept = prompt_of(length), Kept()
    vllm.run([prompt], taps=[kept])
    check(kept, reference, prompt)
    assert kept.steps[-1] == (length, 0)
    assert len(kept.steps) == -(-length // 64)


def test_from_a_token_on(vllm: Vllm, reference: Reference) -> None:
    prompt, kept = prompt_of(200), Kept()
    vllm.run([prompt], taps=[kept], starts=[75])
    check(kept, reference, prompt, start=75)
    assert kept.first(0) == 75


def test_answer_is_not_handed_over(vllm: Vllm, reference: Reference) -> None:
    prompt, kept = prompt_of(100), Kept()
    vllm.run([prompt], taps=[kept], tokens=40)
    check(kept, reference, prompt)
    assert kept.spans[0, 0].count == 100


@pytest.mark.parametrize("start", [0, 50, 96, 150])
def test_warm(vllm: Vllm, reference: Reference, start: int) -> None:
    prompt, kept = prompt_of(200), Kept()
    vllm.run([prompt[:130]])
    vllm.run([prompt], taps=[kept], starts=[start])
    check(kept, reference, prompt, start=start)
    assert kept.steps[-1] == (200, 128)


def test_several_at_once_with_shared_prefixes(vllm: Vllm, reference: Reference) -> None:
    base = prompt_of(150)
    prompts = [
        prompt_of(17, 1),
        base,
        base[:100] + prompt_of(90, 2),
        base + prompt_of(33, 3),
        prompt_of(240, 4),
    ]
    taps = [Kept() for _ in prompts]
    vllm.run(prompts, taps=taps, tokens=5)
    for prompt, kept in zip(prompts, taps, strict=True):
        check(kept, reference, prompt)


def test_two_that_begin_in_the_same_step(vllm: Vllm, reference: Reference) -> None:
    base = prompt_of(40)
    prompts = [base[:36], base[:38]]
    taps = [Kept(), Kept()]
    vllm.run(prompts, taps=taps)
    for prompt, kept in zip(prompts, taps, strict=True):
        check(kept, reference, prompt)


def test_a_tap_that_raises_ends_alone(vllm: Vllm, reference: Reference) -> None:
    class Broken(Kept):
        def entries(self, layer: int, part: int, start: int, array: Any) -> None:
            raise RuntimeError("on purpose")

    broken, kept, prompts = Broken(), Kept(), [prompt_of(70, 1), prompt_of(80, 2)]
    answers = vllm.run(prompts, taps=[broken, kept], tokens=4)
    check(kept, reference, prompts[1])
    assert broken.steps == []
    vllm.forget()
    assert answers == vllm.run(prompts, tokens=4)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100, 199])
def test_load_of_what_mlx_computed(vllm: Vllm, reference: Reference, length: int) -> None:
    prompt = prompt_of(200)
    expected = loads_what_mlx_computed(vllm, reference, prompt, length)
    # And what was loaded is a prefix of the next prompt like any other.
    kept = Kept()
    assert vllm.run([prompt], taps=[kept], tokens=24) == expected
    check(kept, reference, prompt)


def test_load_of_what_vllm_computed(vllm: Vllm) -> None:
    prompt, kept = prompt_of(180), Kept()
    expected = vllm.run([prompt], taps=[kept], tokens=24)
    vllm.forget()
    source = source_of_tap(kept, 180)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    # One token has to be computed to have something to go on with.
    assert source.used == [(0, 179)]


def test_load_behind_a_cached_prefix(vllm: Vllm, reference: Reference) -> None:
    prompt = prompt_of(200)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    vllm.run([prompt[:100]])
    whole = source_of_mlx(mlx_cache(reference.model, prompt[:199]), 199)
    source = Computed(199, {n: (k[:, 96:], v[:, 96:]) for n, (k, v) in whole._entries.items()}, start=96)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == [(96, 199)]


def test_load_that_does_not_go_on_from_what_is_there(vllm: Vllm, reference: Reference) -> None:
    prompt = prompt_of(200)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    whole = source_of_mlx(mlx_cache(reference.model, prompt[:199]), 199)
    source = Computed(199, {n: (k[:, 96:], v[:, 96:]) for n, (k, v) in whole._entries.items()}, start=96)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == []
    assert "begin at token 96" in source.refusals[0]


@pytest.mark.parametrize("fault", ["missing", "shape", "dtype"])
def test_bad_source_is_computed(vllm: Vllm, reference: Reference, fault: str) -> None:
    prompt = prompt_of(120)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    source = source_of_mlx(mlx_cache(reference.model, prompt[:119]), 119)
    keys, values = source._entries[2]
    if fault == "missing":
        source._entries[2] = (keys[:, 5:], values[:, 5:])
    elif fault == "shape":
        source._entries[2] = (keys[:1], values)
    else:
        source._entries[2] = (keys, values.astype(np.float16))
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == []
    assert len(source.refusals) == 1


def test_loads_and_computing_in_one_step(vllm: Vllm, reference: Reference) -> None:
    prompts = [prompt_of(60, 1), prompt_of(90, 2), prompt_of(50, 3)]
    expected = [vllm.run([prompt], tokens=24)[0] for prompt in prompts]
    vllm.forget()
    sources: list[Any] = [source_of_mlx(mlx_cache(reference.model, one[:-1]), len(one) - 1) for one in prompts]
    sources[1], kept = None, Kept()
    assert vllm.run(prompts, sources=sources, taps=[None, kept], tokens=24) == expected
    check(kept, reference, prompts[1])
    assert sources[0].used == [(0, 59)]
    assert sources[2].used == [(0, 49)]


def test_preemption(start_vllm: Callable[..., Vllm], folder: Path, reference: Reference) -> None:
    # Room for some 12 blocks: three requests of 3 to 4 blocks each that grow do not fit.
    small = start_vllm(folder, memory=13 * BLOCK * 2 * 64 * 4 * 3, max_model_len=256, num_gpu_blocks_override=12)
    prompts = [prompt_of(90, seed) for seed in range(3)]
    taps = [Kept() for _ in prompts]
    answers = small.run(prompts, taps=taps, tokens=80)
    for prompt, kept in zip(prompts, taps, strict=True):
        check(kept, reference, prompt)
    assert small.preemptions > 0
    small.forget()
    assert answers == [small.run([prompt], tokens=80)[0] for prompt in prompts]


def test_bfloat16_comes_as_it_is_in_the_cache(start_vllm: Callable[..., Vllm], folder: Path) -> None:
    """In 16 bits the kernels of some CPUs keep tiles. What is loaded is only right if attention finds it there."""
    half = start_vllm(folder, dtype="bfloat16")
    assert half.registry.layers()[0].dtype == "bfloat16"
    prompt, kept, again = prompt_of(200), Kept(), Kept()
    expected = half.run([prompt], taps=[kept])
    score = [one for (one,) in half.scores.values()]
    half.forget()
    source = source_of_tap(kept, 200)
    assert half.run([prompt], sources=[source], taps=[again]) == expected
    assert source.used == [(0, 199)]
    # The last token was computed alone this time, so that its last bits may differ.
    assert [one for (one,) in half.scores.values()] == pytest.approx(score, abs=0.1)
    for layer in range(3):
        for part in range(2):
            assert np.array_equal(again.whole(layer, part, 0, 199), kept.whole(layer, part, 0, 199))
