"""What the files of a model folder say beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import CorruptModelError

DEFAULT_CONTEXT_LENGTH = 8192


def context_length(config: dict[str, Any], limit: int = 0) -> int:
    """Tokens of prompt plus answer by `config.json`, at most `limit` unless that is 0."""
    text = config.get("text_config", {})
    own = DEFAULT_CONTEXT_LENGTH
    for name in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
        value = config.get(name, text.get(name))
        if isinstance(value, int) and value > 0:
            own = value
            break
    return min(own, limit) if limit else own


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling values that the model's makers recommend, if they say so.

    Raises:
        CorruptModelError: the file is not JSON.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptModelError(f"{path} is not JSON: {error}") from error
    if content.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: content[name] for name in names if isinstance(content.get(name), int | float)}
