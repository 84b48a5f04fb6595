"""Tests that drive vLLM in this process. Those are skipped where it cannot be imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.drive import Reference

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def start_vllm() -> Iterator[Callable[..., Any]]:
    """Starts vLLM on a model; one at a time."""
    from .support import Vllm

    running: list[Vllm] = []

    def start(folder: Path, **options: Any) -> Vllm:
        while running:
            running.pop().close()
        running.append(Vllm(folder, **options))
        return running[-1]

    yield start
    while running:
        running.pop().close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """The model in a module's `folder`, as mlx-lm loads it."""
    return Reference(folder)


@pytest.fixture
def clean(vllm: Any) -> Iterator[None]:
    """Around a test of the connector: vLLM knows nothing before, and keeps nothing of a request after."""
    vllm.forget()
    yield
    assert vllm.registry.empty
    assert not vllm.engine.has_unfinished_requests()
    assert vllm.scheduler.connector._ledger.empty
