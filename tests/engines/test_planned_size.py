"""What placement plans for a model's weights is what this machine's engine takes as it loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem.engines.mlx.load import on_accelerator
from tandem.models.folder import derive_card
from tandem.placement.memory import footprint

from . import tiny
from .drive import make_engine


@pytest.mark.parametrize(
    ("change", "quantisation", "most"),
    [(None, "float32", 1.1), (tiny.halve, "", 1.1), (tiny.quantise, "4bit", 1.8)],
    ids=["float32", "bfloat16", "4 bits"],
)
def test_weights(change: Callable[[Path, Path], Path] | None, quantisation: str, most: float, tmp_path: Path) -> None:
    """A CPU computes in float32, whatever the files hold."""
    folder = tiny.build("llama", tmp_path / "whole", hidden_size=64)
    if change is not None:
        folder = change(folder, tmp_path / "changed")
    card = derive_card("tiny", folder)
    assert card.quantization == quantisation
    engine = make_engine(folder)
    taken = engine._loaded.weight_bytes
    engine.close()
    backend = "MlxMetal" if on_accelerator() else "MlxCpu"
    planned = footprint(card, backend, 0, free=psutil.virtual_memory().available).weights
    assert taken <= planned <= most * taken
