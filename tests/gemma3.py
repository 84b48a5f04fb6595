"""Where Gemma 3 270M is, for the tests that need a real model with sliding windows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "TANDEM_TEST_GEMMA3_GGUF"
DEFAULT = Path.home() / ".cache" / "tandem" / "tests" / "gemma-3-270m-q4_k_m.gguf"
"""Where `scripts/fetch_gemma3.py` puts it."""


def gemma3_gguf() -> Path:
    """The GGUF file; skips the test where there is none."""
    path = Path(os.environ.get(VARIABLE) or DEFAULT)
    if not path.is_file():
        pytest.skip(f"{path} is not here: run scripts/fetch_gemma3.py, or set {VARIABLE}")
    return path
