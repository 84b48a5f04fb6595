"""Make tests/models/golden/pre_tokenizers.json: how llama.cpp splits text by each `tokenizer.ggml.pre`.

    python scripts/make_golden_pre_tokenizers.py SMOLLM2.gguf NODE_FOLDER

Gives SmolLM2's vocabulary to llama.cpp (`make_golden_llama_cpp.mjs` in NODE_FOLDER) under other pre-tokenizers' names,
in files without weights. Models whose tokenizer composes Unicode first get composed texts, as llama.cpp leaves that
out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import gguf

from tandem.models.gguf.reader import GgufFile

NAMES = ("gpt-2", "smollm", "starcoder", "refact", "command-r", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken")
COMPOSED = ("qwen2", "deepseek-r1-qwen")


def main(model: Path, node_folder: Path) -> None:
    golden_folder = Path(__file__).parent.parent / "tests" / "models" / "golden"
    texts = json.loads((golden_folder / "texts.json").read_text())
    golden: dict[str, object] = {}
    with GgufFile(model) as file, tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path, out, inputs = (Path(folder) / part for part in ("vocabulary.gguf", "ids.json", "texts.json"))
            inputs.write_text(
                json.dumps([unicodedata.normalize("NFC", text) if name in COMPOSED else text for text in texts])
            )
            write_vocabulary(path, file, name)
            script = Path(__file__).parent / "make_golden_llama_cpp.mjs"
            subprocess.run(["node", script.absolute(), path, inputs, out], cwd=node_folder, check=True)
            result = json.loads(out.read_text())
            golden["reader"] = result["reader"]
            golden[name] = result["ids"]
    (golden_folder / "pre_tokenizers.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def write_vocabulary(path: Path, file: GgufFile, pre: str) -> None:
    """A GGUF file with the vocabulary of `file` and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(file.metadata["tokenizer.ggml.tokens"])
    writer.add_token_merges(file.metadata["tokenizer.ggml.merges"])
    writer.add_token_types(file.metadata["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
