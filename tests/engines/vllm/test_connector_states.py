"""The connector on models with recurrent layers: one state for the whole past, read where a step ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.drive import Reference

from . import recurrent
from .support import (
    Kept,
    Vllm,
    check,
    loads_what_mlx_computed,
    loads_what_vllm_computed,
    mlx_cache,
    mlx_states,
    prompt_of,
    source_of_mlx,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("clean")]

STARTS: dict[str, dict[str, Any]] = {
    "kept-in-place": {"enable_prefix_caching": False},
    # vLLM 0.32 on a CPU cannot keep a state from the middle of a step: no step is longer than a block.
    "kept-by-block": {"enable_prefix_caching": True, "chunk": 32},
}


@pytest.fixture(scope="module", params=[pytest.param("mamba2", marks=pytest.mark.long), "granite"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    return getattr(recurrent, kind)(tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module", params=["kept-in-place", pytest.param("kept-by-block", marks=pytest.mark.long)])
def vllm(start_vllm: Callable[..., Vllm], folder: Path, request: pytest.FixtureRequest) -> Vllm:
    return start_vllm(folder, **STARTS[request.param])


def test_layers_are_described(vllm: Vllm, reference: Reference, kind: str) -> None:
    layers = vllm.registry.layers()
    expected = ["state"] * 3 if kind == "mamba2" else ["state", "tokens"] * 2
    assert [one.kind for one in layers] == expected
    found = mlx_states(mlx_cache(reference.model, prompt_of(5))[0])
    assert [state.shape for state in layers[0].states] == [array.shape for array in found]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 31, 32, 33, 64, 65, 96, 200])
def test_cold(vllm: Vllm, reference: Reference, length: int) -> None:
    prompt, kept = prompt_of(length), Kept()
    vllm.run([prompt], taps=[kept], tokens=3)
    check(kept, reference, prompt)
    # States after each step, and none after tokens of the answer.
    assert {tokens for _, _, tokens in kept.states} == {tokens for tokens, _ in kept.steps}


def test_several_at_once(vllm: Vllm, reference: Reference) -> None:
    base = prompt_of(150)
    prompts = [prompt_of(17, 1), base, base[:100] + prompt_of(90, 2), base + prompt_of(33, 3), prompt_of(240, 4)]
    taps = [Kept() for _ in prompts]
    vllm.run(prompts, taps=taps, tokens=5)
    for prompt, kept in zip(prompts, taps, strict=True):
        check(kept, reference, prompt)


def test_warm(vllm: Vllm, reference: Reference) -> None:
    prompt, kept = prompt_of(250), Kept()
    vllm.run([prompt[:200]])
    vllm.run([prompt], taps=[kept])
    check(kept, reference, prompt)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 64, 96, 100, 199])
def test_load_of_what_mlx_computed(vllm: Vllm, reference: Reference, length: int) -> None:
    prompt = prompt_of(200)
    expected = loads_what_mlx_computed(vllm, reference, prompt, length)
    # With what was loaded as a prefix, or without.
    assert vllm.run([prompt], tokens=24) == expected


def test_load_of_what_vllm_computed(vllm: Vllm) -> None:
    loads_what_vllm_computed(vllm, prompt_of(200))


def test_bad_state_is_computed(vllm: Vllm, reference: Reference) -> None:
    prompt = prompt_of(100)
    expected = vllm.run([prompt], tokens=24)
    vllm.forget()
    source = source_of_mlx(mlx_cache(reference.model, prompt[:99]), 99)
    source._states[0, 1] = source._states[0, 1][:, :2]
    assert vllm.run([prompt], sources=[source], tokens=24) == expected
    assert source.used == []
    assert len(source.refusals) == 1
