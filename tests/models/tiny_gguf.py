"""Tiny random models, written once as a Hugging Face folder and once as a GGUF file.

The GGUF side is written with the `gguf` package and follows llama.cpp's conventions from their own definition (how a
rotation pairs its dimensions, what a norm's weight is), not by inverting our converter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KEY_HEADS, HEAD_DIM, VOCABULARY = 64, 96, 3, 4, 2, 16, 288
WINDOW, PATTERN = 8, 3

Array = npt.NDArray[np.float32]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_level_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a byte-level tokenizer with 288 tokens."""
    alphabet = byte_alphabet()
    merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "Ġ w",
        "o r",
        "Ġw or",
        "l d",
        "Ġwor ld",
        "i n",
        "t h",
        "th e",
        "Ġ t",
        "a n",
    ]
    tokens = [alphabet[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in merges]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    special = ["<|bos|>", "<|im_end|>", "<|pad|>"]
    tokens += special + [f"<|reserved_{index}|>" for index in range(VOCABULARY - len(tokens) - len(special))]
    types += [gguf.TokenType.CONTROL] * (VOCABULARY - len(types))
    return tokens, merges, [int(kind) for kind in types]


def weights(architecture: str, seed: int = 0) -> dict[str, Array]:
    """Random weights under Hugging Face's names, untied."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return random.normal(0, 0.3 / np.sqrt(shape[-1]) * 4, shape).astype(np.float32)

    def norm(size: int) -> Array:
        # Gemma's norms multiply by one plus the weight.
        around = 0.0 if architecture == "gemma3" else 1.0
        return (around + random.normal(0, 0.1, size)).astype(np.float32)

    result = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KEY_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KEY_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in shapes.items():
            result[f"{prefix}.{name}.weight"] = matrix(*shape)
            if architecture == "qwen2" and name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
                result[f"{prefix}.{name}.bias"] = matrix(shape[0])
        names = ["input_layernorm", "post_attention_layernorm"]
        if architecture == "gemma3":
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in names:
            result[f"{prefix}.{name}.weight"] = norm(HIDDEN)
        if architecture in ("qwen3", "gemma3"):
            for name in ("q_norm", "k_norm"):
                result[f"{prefix}.self_attn.{name}.weight"] = norm(HEAD_DIM)
    return result


def config(architecture: str) -> dict[str, Any]:
    """The original model's config."""
    value: dict[str, Any] = {
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
    }
    if architecture == "gemma3":
        value |= {
            "sliding_window": WINDOW,
            "sliding_window_pattern": PATTERN,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": HEAD_DIM,
        }
    return value


def write_folder(folder: Path, architecture: str, tensors: dict[str, Array]) -> Path:
    """The original, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(architecture)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, Array],
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    pre: str = "gpt-2",
) -> Path:
    """The same model as a GGUF file; matrices in `quantization`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    if architecture == "gemma3":
        writer.add_sliding_window(WINDOW)
        writer.add_key_value(f"{architecture}.attention.sliding_window_pattern", PATTERN, gguf.GGUFValueType.UINT32)
    tokens, merges, types = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|pad|>"))
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    change(writer)
    kind = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(kind, LAYERS)
    for name, tensor in tensors.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = pair_rotations(tensor, HEADS if "q_proj" in name else KEY_HEADS)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.ndim == 1 or quantization == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, tensor)
        else:
            writer.add_tensor(target, gguf.quants.quantize(tensor, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pair_rotations(tensor: Array, heads: int) -> Array:
    """Rows as llama.cpp's llama wants them: it rotates dimensions 2i and 2i+1 together, Hugging Face i and i+d/2."""
    size = tensor.shape[0] // heads
    order = [
        head * size + index + half * size // 2 for head in range(heads) for index in range(size // 2) for half in (0, 1)
    ]
    return tensor[order]
