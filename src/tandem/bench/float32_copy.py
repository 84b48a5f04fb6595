"""A model folder for mlx-lm's server with the weights that Tandem computes with.

On a CPU, Tandem turns weights into float32, dequantising them; mlx-lm takes them as they are stored, and is many times
slower with 16-bit or quantised ones. Comparing the two is only fair with the same numbers on both sides.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

from tandem.engines.mlx import blas

COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")


def is_float32(folder: Path) -> bool:
    """Whether every weight in `folder` is stored as float32 already."""
    if "quantization" in _config(folder):
        return False
    return all(_dtypes(path) <= {"F32"} for path in folder.glob("*.safetensors"))


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _dtypes(path: Path) -> set[str]:
    """From the header of the safetensors format: its length as 8 bytes, little-endian, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def copy_as_float32(source: Path, target: Path) -> None:
    """Fill the new folder `target` with the model in `source`, as float32."""
    blas.load()
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model, load_model, save_config, save_model

    model, config = load_model(source, lazy=True)
    if "quantization" in config:
        dequantize_model(model)
        config.pop("quantization")
        config.pop("quantization_config", None)
    model.set_dtype(mx.float32)
    target.mkdir(parents=True)
    for pattern in COPIED:
        for file in source.glob(pattern):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, target / file.name)
    save_model(target, model)
    save_config(config, target / "config.json")


if __name__ == "__main__":
    copy_as_float32(Path(sys.argv[1]), Path(sys.argv[2]))
