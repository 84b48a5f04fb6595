"""The connector on a real model in float32, against what our MLX engine's model has in its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.drive import Reference

from .support import Kept, Vllm, check, mlx_cache, prompt_of, source_of_mlx, source_of_tap

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.real_model,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("clean"),
]

VOCABULARY = 40000


@pytest.fixture(scope="module")
def vllm(start_vllm: Callable[..., Vllm], smollm2_folder: Path) -> Vllm:
    return start_vllm(smollm2_folder, memory=256 << 20, chunk=128, block_size=128)


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> Reference:
    return Reference(smollm2_folder, fast=True)


def test_cold_and_warm(vllm: Vllm, reference: Reference) -> None:
    prompt, cold, warm = prompt_of(300, vocabulary=VOCABULARY), Kept(), Kept()
    vllm.run([prompt], taps=[cold])
    vllm.run([prompt], taps=[warm])
    check(cold, reference, prompt)
    check(warm, reference, prompt)
    assert [step[0] for step in cold.steps] == [128, 256, 300]
    assert warm.steps == [(300, 256)]


def test_several_at_once(vllm: Vllm, reference: Reference) -> None:
    base = prompt_of(150, vocabulary=VOCABULARY)
    prompts = [
        prompt_of(17, 1, VOCABULARY),
        base,
        base[:130] + prompt_of(20, 2, VOCABULARY),
        base + prompt_of(33, 3, VOCABULARY),
        prompt_of(140, 4, VOCABULARY),
    ]
    taps = [Kept() for _ in prompts]
    vllm.run(prompts, taps=taps, tokens=3)
    for prompt, kept in zip(prompts, taps, strict=True):
        check(kept, reference, prompt)


def test_loads(vllm: Vllm, reference: Reference) -> None:
    prompt, kept = prompt_of(250, 5, VOCABULARY), Kept()
    expected = vllm.run([prompt], taps=[kept], tokens=32)
    for source in (
        source_of_mlx(mlx_cache(reference.model, prompt[:249]), 249),
        source_of_mlx(mlx_cache(reference.model, prompt[:100]), 100),
        source_of_tap(kept, 250),
    ):
        vllm.forget()
        assert vllm.run([prompt], sources=[source], tokens=32) == expected
        assert source.used == [(0, min(source.length, 249))]
