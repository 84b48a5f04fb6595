"""RoPE scaling: from GGUF's keys and its `rope_freqs` tensor to `rope_scaling` in a config."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import UnsupportedModelError
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.weights import dequantize

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of every Llama 3.1, 3.2 and 3.3; the file holds only the divisors that they lead to."""


def rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """The config's `rope_scaling`, or None where positions are not scaled.

    Raises:
        UnsupportedModelError: scaled in a way that the config cannot express.
    """
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, config)
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.metadata.text(f"{prefix}.type", "none")
    factor = file.metadata.number(f"{prefix}.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.metadata.size(f"{prefix}.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(
        f"{file.path.name} scales positions by {kind!r}; none, linear, yarn and llama3 are read."
    )


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    divisors = np.concatenate(list(dequantize(file, file.tensors["rope_freqs.weight"]))).ravel().astype(np.float64)
    factor = round(float(divisors.max()), 4)
    expected = llama3_divisors(config["head_dim"], config["rope_theta"], factor)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{file.path.name} holds RoPE frequencies other than those of Llama 3.1 to 3.3.")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def llama3_divisors(head_dim: int, theta: float, factor: float) -> npt.NDArray[np.float64]:
    """What each of the head_dim/2 frequencies is divided by, from Meta's Llama 3.1 reference."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    original = LLAMA3["original_max_position_embeddings"]
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    scaled: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return scaled
