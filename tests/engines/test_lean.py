"""MLX runners do without PyTorch, even where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEADLINE = 120.0
SCRIPT = """
import importlib.util, sys
from tandem.engines.mlx import lean
lean.without_torch()
assert importlib.util.find_spec("torch") is None
import transformers
assert not transformers.utils.is_torch_available()
from tandem.engines.mlx.engine import MlxEngine
print(sys.modules["torch"])
"""


def test_transformers_does_not_find_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('PyTorch was imported')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=DEADLINE, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
