"""Make tests/models/golden/*.json: what two independent readers make of a GGUF file.

    python3 -m venv golden
    golden/bin/pip install torch transformers gguf
    golden/bin/pip install --no-deps accelerate
    golden/bin/python scripts/make_golden_gguf.py MODEL.gguf LLAMA_CPP_IDS.json OUT.json

LLAMA_CPP_IDS.json comes from `make_golden_llama_cpp.mjs`; llama.cpp defines the format, so its token ids are the
reference. Weights, logits (float32) and greedy tokens come from transformers' own GGUF loader, and so do the token ids
with special tokens added. Where transformers splits a text otherwise than llama.cpp, the golden file says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland ist",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)
NEW_TOKENS = 20
SAMPLES = 4


def main(model_path: Path, llama_cpp_path: Path, out_path: Path) -> None:
    here = Path(__file__).parent.parent / "tests" / "models" / "golden"
    texts = json.loads((here / "texts.json").read_text())
    llama_cpp = json.loads(llama_cpp_path.read_text())
    folder, name = str(model_path.parent), model_path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    golden = {
        "file": name,
        "readers": [llama_cpp["reader"], f"transformers {transformers.__version__}"],
        "ids": llama_cpp["ids"],
        "transformers_differs": {
            str(index): ids
            for index, text in enumerate(texts)
            if (ids := tokenizer.encode(text, add_special_tokens=False)) != llama_cpp["ids"][index]
        },
        "special_tokens_added": tokenizer.encode("Hello", add_special_tokens=True),
        "weights": {key: describe(value) for key, value in sorted(model.state_dict().items())},
        "prompts": [answer(model, tokenizer, prompt) for prompt in PROMPTS],
    }
    out_path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def describe(weight: torch.Tensor) -> dict[str, Any]:
    """Shape, Euclidean norm and a few elements, by their position in row order."""
    flat = weight.float().flatten()
    positions = [(index * 2654435761) % flat.numel() for index in range(1, SAMPLES + 1)]
    return {
        "shape": list(weight.shape),
        "norm": float(flat.double().norm()),
        "samples": [[position, float(flat[position])] for position in positions],
    }


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    """Greedy tokens, and the first step's highest logits and some others."""
    ids = tokenizer.encode(prompt, return_tensors="pt")
    logits = model(ids).logits[0, -1]
    top = torch.topk(logits, 8).indices.tolist()
    spread = [(index * 2654435761) % logits.numel() for index in range(1, 9)]
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return {
        "prompt": prompt,
        "prompt_ids": ids[0].tolist(),
        "logits": [[token, float(logits[token])] for token in [*top, *spread]],
        "greedy": tokens[0, ids.shape[1] :].tolist(),
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
