from __future__ import annotations

from tandem.engines.mlx import blas

blas.load()  # before anything imports mlx

from collections.abc import Callable, Iterator  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from . import tiny  # noqa: E402
from .drive import Reference, make_engine  # noqa: E402


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, built once."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda kind: tiny.build(kind, root / kind))


VLLM = [pytest.mark.vllm, pytest.mark.slow]
"""Marks of tests that need vLLM itself."""


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model in the form that vLLM's CPU build takes, built once."""
    root = tmp_path_factory.mktemp("vllm")
    return cache(lambda kind: tiny.build_for_vllm(kind, root / kind))


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    """A tiny model as mlx-lm loads it."""
    loaded: dict[str, Reference] = {}

    def reference(kind: str) -> Reference:
        if kind not in loaded:
            loaded[kind] = Reference(tiny_folder(kind))
        return loaded[kind]

    return reference


@pytest.fixture
def tiny_engine(tiny_folder: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Makes engines on tiny models, and checks when the test ends that nothing is left in them."""
    made: list[Any] = []

    def make(kind: str = "llama", **options: Any) -> Any:
        made.append(make_engine(tiny_folder(kind), **{"prefix_cache_bytes": 64 << 20} | options))
        return made[-1]

    yield make
    for engine in made:
        if not engine.has_work:
            engine.check_idle()
        engine.close()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The packaged model, converted."""
    from tandem.config import settings
    from tandem.models.store import ModelStore

    return ModelStore(settings()).obtain("demo").path
