"""Keep PyTorch out of processes that run MLX.

transformers, which mlx-lm reads tokenizers with, imports PyTorch wherever it is installed: 2.8 s and 266 MB more for
each runner (measured with torch 2.13.0 on two cores), of which MLX uses nothing.
"""

from __future__ import annotations

import sys


def without_torch() -> None:
    """From now on this process has no PyTorch to import. Only for processes that never run another engine.

    Python's own way: a name that is None in `sys.modules` cannot be imported, and nobody finds it.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
