"""Convert a GGUF file to a folder in Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tandem.errors import CorruptModelError
from tandem.models.gguf.architectures import plan_tensors, read_config
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.tokenizer import write_tokenizer
from tandem.models.gguf.weights import check_readable, write_safetensors
from tandem.models.progress import Progress, ProgressCallback, ignore_progress

CONVERTER_VERSION = 2
"""Raised whenever the same file would be converted to something else: older conversions are then made anew."""
SAMPLE = 1 << 20


def convert_gguf(path: Path, folder: Path, progress: ProgressCallback = ignore_progress) -> None:
    """Fill the empty `folder` with what the GGUF file `path` holds.

    Writes `config.json`, `generation_config.json`, the tokenizer's files and `model.safetensors`.

    Raises:
        UnsupportedModelError: architecture, quantisation or tokenizer that we do not read.
        CorruptModelError: the file contradicts itself or is cut short.
    """
    with GgufFile(path) as file:
        config = read_config(file)
        check_readable(file)
        targets = plan_tensors(file, config)
        vocabulary = write_tokenizer(file, folder)
        if len(vocabulary.tokens) > config["vocab_size"]:
            raise CorruptModelError(f"{path} has more tokens than rows of its embedding.")
        ends: list[int] = list(vocabulary.end_ids)
        tokens = {"bos_token_id": vocabulary.bos_id, "eos_token_id": ends or None, "pad_token_id": vocabulary.pad_id}
        present = {key: value for key, value in tokens.items() if value is not None}
        write_json(folder / "config.json", config | present)
        write_json(folder / "generation_config.json", present)
        write_safetensors(
            folder / "model.safetensors",
            file,
            targets,
            lambda count: progress(Progress("convert", count, len(targets), "tensors")),
        )


def conversion_key(path: Path) -> str:
    """Names one state of a GGUF file and one version of the converter: 16 hexadecimal digits.

    From size, modification time and the first and last megabyte: a changed file gets another key, without reading
    gigabytes at every start.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {status.st_size} {status.st_mtime_ns} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE))
        file.seek(max(0, status.st_size - SAMPLE))
        digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
