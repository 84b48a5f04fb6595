"""Short hashes by which two machines find out that they mean the same model.

Both are of the meaning, not of the files' bytes: formatting and the order of keys do not matter.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.errors import CorruptModelError
from tandem.models.folder import read_json

LAYOUT_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "rope_local_base_freq",
    "rope_scaling",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "kv_lora_rank",
    "qk_rope_head_dim",
)
"""Config entries that decide what the cache holds; weights of another quantisation share all of them."""


def tokenizer_hash(folder: Path) -> str:
    """64 hexadecimal digits that are equal where every text becomes the same token ids.

    Covers what `tokenizer.json` encodes with: vocabulary, merges, normaliser, pre-tokeniser, added tokens and the
    tokens put around a text. Its decoder and padding do not matter. Without that file: the bytes of `tokenizer.model`
    or `tiktoken.model`.

    Raises:
        CorruptModelError: no tokenizer, or one that cannot be read.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        content = read_json(path)
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
        return _digest({part: content.get(part) for part in parts})
    for name in ("tokenizer.model", "tiktoken.model"):
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    raise CorruptModelError(f"{folder} has no tokenizer to compare. Fetch the model again.")


def layout_fields(folder: Path) -> dict[str, Any]:
    """The config entries that decide what the cache holds, for telling two differing ones apart.

    Configs of one model differ in how they say it (nested or flat, defaults written or not); those differences are
    evened out.

    Raises:
        CorruptModelError: the config cannot be read.
    """
    config = read_json(folder / "config.json")
    config = config | config.get("text_config", {})
    config |= {key: value for key, value in _flat_rope(config).items() if config.get(key) is None}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("head_dim") is None and heads and hidden:
        config["head_dim"] = hidden // heads
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    config["rope_scaling"] = _scaling(config.get("rope_scaling"))
    layers, pattern = config.get("num_hidden_layers"), config.get("sliding_window_pattern")
    if config.get("layer_types") is None and layers and pattern:
        config["layer_types"] = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ]
    if set(config.get("layer_types") or ()) == {"full_attention"} or config.get("use_sliding_window") is False:
        config["layer_types"] = config["sliding_window"] = None
    return {key: config[key] for key in LAYOUT_KEYS if config.get(key) is not None}


def _flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 nests under `rope_parameters`, as flat entries."""
    nested = config.get("rope_parameters")
    if not isinstance(nested, dict):
        return {}
    full = nested.get("full_attention", nested)
    flat = {"rope_theta": full.get("rope_theta"), "rope_scaling": full}
    if "sliding_attention" in nested:
        flat["rope_local_base_freq"] = nested["sliding_attention"].get("rope_theta")
    return flat


def _scaling(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("rope_type", value.get("type", "default"))
    if kind == "default":
        return None
    return {key: entry for key, entry in value.items() if key not in ("type", "rope_theta")} | {"rope_type": kind}


def config_fingerprint(folder: Path) -> str:
    """64 hexadecimal digits of `layout_fields`.

    Raises:
        CorruptModelError: the config cannot be read.
    """
    return _digest(layout_fields(folder))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
