"""How a model's weights are quantised, and in whose format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.models.cards import ModelCard

MLX_NAMES = re.compile(r"\d+(\.\d+)?bit(-.+)?|q\d+(-.+)?|(mx|nv)fp\d+-.+")
"""What MLX's quantisations are called in cards: `4bit`, `8bit`, `4bit-DWQ`, `MXFP4-Q8`. Those of others have their
method in front: `gptq-4bit`, `awq-4bit`, `fp8`, `mxfp4`."""
PLAIN = frozenset(("", "none", "bf16", "bfloat16", "f16", "fp16", "float16", "f32", "fp32", "float32"))


def quantisation_of(config: Mapping[str, Any]) -> str:
    """What a card calls the quantisation that a `config.json` describes; empty for none."""
    plain = config.get("quantization")
    other = config.get("quantization_config")
    # MLX writes the same under both names, and never a method of somebody else.
    chosen = other if isinstance(other, dict) and other.get("quant_method") else plain or other
    if not isinstance(chosen, dict):
        return ""
    bits, method = chosen.get("bits"), chosen.get("quant_method")
    if not method or method == "mlx":
        return f"{bits}bit" if bits else ""
    return f"{method}-{bits}bit" if bits else str(method)


def in_mlx_format(card: ModelCard) -> bool:
    """Whether only MLX can load the weights."""
    name = card.quantization.lower()
    if MLX_NAMES.fullmatch(name):
        return True
    return card.model_id.lower().startswith("mlx-community/") and name not in PLAIN
