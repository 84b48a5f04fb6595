"""Model folders that are whole, of any size, and computed by nobody."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

WEIGHTS = "model.safetensors"


def model_files(size: int, seed: int = 0) -> dict[str, bytes]:
    """The files of a model whose weights take `size` bytes."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return {
        "config.json": json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}).encode(),
        "tokenizer.json": b'{"model": {}}',
        WEIGHTS: struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(size),
    }


def write_model(folder: Path, size: int = 1 << 20, seed: int = 0) -> dict[str, bytes]:
    """Write such a model into `folder`."""
    files = model_files(size, seed)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files
