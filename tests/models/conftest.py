"""Shared by the tests of models: a home of their own, the packaged model, small models in both layouts."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.engines.mlx import blas
from tandem.models.packaged import INSTALL_HINT, packaged_gguf
from tandem.models.store import LocalModel, ModelStore

blas.load()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> ModelStore:
    return ModelStore(Settings(home=home))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    path = packaged_gguf()
    if path is None:
        pytest.skip(f"the packaged model is not installed: {INSTALL_HINT}")
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """The packaged model, converted once for the whole run."""
    return ModelStore(Settings(home=tmp_path_factory.mktemp("home"))).obtain("demo")
