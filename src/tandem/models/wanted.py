"""Which files of a model's folder are the model: what is fetched from a hub, and what one node sends another."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

WANTED = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja", "LICENSE*")
"""Patterns of the top-level files that a model needs, or is distributed under."""
WANTED_FOLDERS = ("additional_chat_templates/*.jinja",)


def is_wanted(path: str, all_paths: Sequence[str]) -> bool:
    """Whether the file at `path`, relative to the model's folder, belongs to it. Nothing outside the folder does.

    Args:
        all_paths: of all files beside it.
    """
    parts = path.split("/")
    if "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        return False
    if len(parts) > 1:
        return any(fnmatchcase(path, pattern) for pattern in WANTED_FOLDERS)
    # Some repositories hold the same weights once more in their makers' own layout.
    if path.startswith("consolidated") and any(fnmatchcase(other, "model*.safetensors") for other in all_paths):
        return False
    return any(fnmatchcase(path, pattern) for pattern in WANTED)
