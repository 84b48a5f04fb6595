"""The connector on a model with sliding windows, whose blocks vLLM gives to other tokens while the prompt runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import tiny
from tests.engines.drive import Reference

from .support import (
    Computed,
    Kept,
    Vllm,
    check,
    loads_what_mlx_computed,
    loads_what_vllm_computed,
    mlx_cache,
    prompt_of,
    source_of_mlx,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("clean")]

CHANGES = {"hidden_size": 64, **tiny.FOR_VLLM["gemma3"]}
"""mlx-lm rounds the factor of the embeddings, the root of this size, to bfloat16: 8 stays 8."""


WINDOWS = [pytest.param(24, marks=pytest.mark.long, id="in-a-block"), pytest.param(80, id="over-blocks")]


@pytest.fixture(scope="module", params=WINDOWS)
def window(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, window: int) -> Path:
    return tiny.build("gemma3", tmp_path_factory.mktemp("gemma3"), sliding_window=window, **CHANGES)


@pytest.fixture(scope="module")
def vllm(start_vllm: Callable[..., Vllm], folder: Path) -> Vllm:
    return start_vllm(folder)


def test_layers_are_described(vllm: Vllm, window: int) -> None:
    assert [(one.kind, one.window) for one in vllm.registry.layers()] == [("window", window), ("tokens", 0)] * 2
    assert len(vllm.scheduler.kv_cache_config.kv_cache_groups) > 1


@pytest.mark.parametrize("length", [10, 24, 25, 79, 80, 81, 300])
def test_cold(vllm: Vllm, reference: Reference, length: int) -> None:
    prompt, kept = prompt_of(length), Kept()
    vllm.run([prompt], taps=[kept], tokens=3)
    check(kept, reference, prompt)
    # Of a prompt that is computed here, not even the windows lack anything.
    assert all(spans.covers(0, length) for spans in kept.spans.values())


@pytest.mark.parametrize("length", [129, 160, 200, 300])
def test_warm(vllm: Vllm, reference: Reference, window: int, length: int) -> None:
    prompt, kept = prompt_of(length), Kept()
    vllm.run([prompt[:200]])
    vllm.run([prompt], taps=[kept])
    check(kept, reference, prompt)
    assert kept.steps[-1] == (length, min(length - 1, 192) // 32 * 32)
    assert kept.first(1) == 0
    assert kept.first(0) > 0


def test_several_at_once(vllm: Vllm, reference: Reference) -> None:
    base = prompt_of(150)
    prompts = [prompt_of(17, 1), base, base[:100] + prompt_of(90, 2), base + prompt_of(33, 3), prompt_of(240, 4)]
    taps = [Kept() for _ in prompts]
    vllm.run(prompts, taps=taps, tokens=5)
    for prompt, kept in zip(prompts, taps, strict=True):
        check(kept, reference, prompt)


@pytest.mark.parametrize("length", [10, 23, 24, 25, 80, 81, 96, 299])
def test_load_of_what_mlx_computed(vllm: Vllm, reference: Reference, length: int) -> None:
    prompt = prompt_of(300)
    expected = loads_what_mlx_computed(vllm, reference, prompt, length)
    assert vllm.run([prompt], tokens=24) == expected


def test_load_of_what_vllm_computed(vllm: Vllm) -> None:
    loads_what_vllm_computed(vllm, prompt_of(300))


def test_load_behind_a_cached_prefix(vllm: Vllm, reference: Reference) -> None:
    prompt = prompt_of(300)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    vllm.run([prompt[:290]])
    whole = source_of_mlx(mlx_cache(reference.model, prompt[:299]), 299)
    # 288 tokens are there, which is less than a window before the end.
    source = Computed(299, {n: (k[:, -11:], v[:, -11:]) for n, (k, v) in whole._entries.items()}, start=288)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == [(288, 299)]


def test_window_that_lacks_a_token_is_computed(vllm: Vllm, reference: Reference, window: int) -> None:
    prompt = prompt_of(300)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    source = source_of_mlx(mlx_cache(reference.model, prompt[:299]), 299)
    keys, values = source._entries[0]
    source._entries[0] = (keys[:, 2 - window :], values[:, 2 - window :])
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == []
    assert len(source.refusals) == 1


def test_source_of_more_than_the_prompt_is_not_cut(vllm: Vllm, reference: Reference) -> None:
    prompt = prompt_of(100)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    source = source_of_mlx(mlx_cache(reference.model, prompt), 100)
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == []
    assert len(source.refusals) == 1
