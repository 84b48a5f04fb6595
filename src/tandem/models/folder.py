"""Folders in Hugging Face layout: recognise one, measure it, and describe it by a card of its own."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from tandem.errors import CorruptModelError
from tandem.models.cards import Capability, ModelCard
from tandem.models.progress import Progress, ProgressCallback
from tandem.models.quantisation import quantisation_of

SHARDABLE = frozenset(
    {
        "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "gpt_oss", "kimi_k2", "llama", "minimax",
        "minimax_m2", "ministral3", "mistral",
        "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "step3p5",
    }
)  # fmt: skip
"""Model types whose mlx-lm model can be split across machines tensor by tensor."""


def is_model_folder(path: Path) -> bool:
    """Whether `path` looks like a model: a config, and weights beside it."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def folder_size(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CorruptModelError: missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptModelError(f"{path} cannot be read: {error}. Fetch the model again.") from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path} does not hold a JSON object. Fetch the model again.")
    return value


def check_model_folder(path: Path) -> None:
    """Make sure that `path` is a whole model.

    Raises:
        CorruptModelError: says what is missing or cut short.
    """
    read_json(path / "config.json")
    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
    ):
        raise CorruptModelError(f"{path} has no tokenizer (tokenizer.json or tokenizer.model). Fetch the model again.")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise CorruptModelError(f"{path} has no *.safetensors weights.")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(named - {file.name for file in weights})
        if missing:
            raise CorruptModelError(f"{path} lacks {', '.join(missing[:3])}, which its index names. Fetch it again.")
    for file in weights:
        _check_safetensors(file)


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CorruptModelError(f"{path} is cut short. Fetch the model again.")
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptModelError(f"{path} is not a safetensors file: {error}. Fetch the model again.") from error
    if 8 + length + end != size:
        raise CorruptModelError(
            f"{path} should have {8 + length + end:,} bytes and has {size:,}. Fetch the model again."
        )


def copy_folder(source: Path, target: Path, progress: ProgressCallback) -> None:
    """Copy every file of `source` into the existing folder `target`."""
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        done += file.stat().st_size
        progress(Progress("copy", done, total, "bytes"))


def derive_card(model_id: str, path: Path) -> ModelCard:
    """A card from the folder's own config, for models without one.

    Raises:
        CorruptModelError: the config lacks what a card needs.
    """
    config = read_json(path / "config.json")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    template = path / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else ""
    if not chat and (path / "tokenizer_config.json").is_file():
        chat = str(read_json(path / "tokenizer_config.json").get("chat_template") or "")
    return card_from_config(model_id, config, size, chat)


def card_from_config(model_id: str, config: dict[str, Any], size: int, chat_template: str) -> ModelCard:
    """A card from a `config.json`, the weights' bytes and the chat template.

    Raises:
        CorruptModelError: the config lacks what a card needs.
    """
    text = config | config.get("text_config", {})
    quantization = quantisation_of(config)
    wide = (text.get("dtype") or text.get("torch_dtype")) == "float32"
    capabilities: list[Capability] = ["text"]
    if "<think>" in chat_template or "enable_thinking" in chat_template or "<|channel|>" in chat_template:
        capabilities.append("thinking")
    if "enable_thinking" in chat_template:
        capabilities.append("thinking_toggle")
    if "tools" in chat_template:
        capabilities.append("tools")
    layers, hidden = text.get("num_hidden_layers"), text.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise CorruptModelError(f"The config of {model_id} names no num_hidden_layers or hidden_size.")
    model_type = str(config.get("model_type", ""))
    return ModelCard(
        model_id=model_id,
        storage_size=max(size, 1),
        n_layers=layers,
        hidden_size=hidden,
        supports_tensor=model_type in SHARDABLE,
        num_key_value_heads=text.get("num_key_value_heads"),
        family=model_type,
        quantization=quantization or ("float32" if wide else ""),
        capabilities=tuple(capabilities),
        context_length=int(text.get("max_position_embeddings") or 0),
    )
