"""What a loaded model's cache entries depend on, for the handshake with another node.

Read off the model's folder and the layout alone, so that every engine that loads the folder says the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from tandem.kv.fingerprint import Fingerprint
from tandem.kv.layout import Layout
from tandem.models.fingerprint import layout_fields, tokenizer_hash
from tandem.models.folder import read_json

SAMPLE_BYTES = 1 << 16
SAMPLE_EVERY = 1 << 24


def fingerprint_of(layout: Layout, folder: Path) -> Fingerprint:
    """The identity of the model in `folder`.

    Args:
        layout: of its cache, as loaded.

    Raises:
        CorruptModelError: tokenizer or config cannot be read.
    """
    fields = layout_fields(folder)
    rope = {key: value for key, value in fields.items() if "rope" in key or "rotary" in key}
    # Of the files: a CPU widens the weights as it loads them, and they are what their files hold all the same.
    stored = read_json(folder / "config.json")
    quantisation = stored.get("quantization") or stored.get("quantization_config")
    return Fingerprint.of(
        layout,
        architecture=str(stored.get("model_type", "unknown")),
        tokenizer=tokenizer_hash(folder),
        rope=json.dumps(rope, sort_keys=True),
        quantisation=_describe(quantisation),
        weights=weights_digest(folder),
    )


def _describe(quantisation: object) -> str:
    if not isinstance(quantisation, dict):
        return "none"
    bits, group, mode, method = (quantisation.get(key) for key in ("bits", "group_size", "mode", "quant_method"))
    kind = mode if mode and mode != "affine" else method
    if bits is None:
        return str(kind or "quantised")[:200]
    return f"{bits}-bit, groups of {group}" + (f", {kind}"[:200] if kind else "")


def weights_digest(folder: Path) -> str:
    """32 hexadecimal digits over the weight files.

    Every file's size, header and end, and 64 KiB of every 16 MiB between them: reading a hundred gigabytes to start a
    server is no option, and other weights differ everywhere.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("model*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for offset in (*range(0, size, SAMPLE_EVERY), max(0, size - SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
