"""What each GGUF architecture is called, and looks like, in a Hugging Face checkpoint.

Key and tensor names: the GGUF specification and llama.cpp's `gguf-py` constants. The config carries `rope_theta`,
`rope_local_base_freq`, `sliding_window_pattern` and `rope_scaling` flat, as mlx-lm reads them; transformers and vLLM
accept that as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import CorruptModelError, UnsupportedModelError
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.rope import rope_scaling
from tandem.models.gguf.weights import EXACT_UP_TO, Target, Transform


@dataclass(frozen=True)
class Architecture:
    """How one architecture is converted.

    Attributes:
        class_name, model_type: Hugging Face's names for it.
        norms: GGUF's names of a layer's norms, to ours.
        extra_config: adds the entries only this architecture has.
        rope_rows_paired: the file keeps q and k in llama.cpp's order, where the two halves of a rotation are adjacent.
        norm_offset: added to every norm weight.
    """

    class_name: str
    model_type: str
    norms: dict[str, str]
    extra_config: Callable[[GgufFile, dict[str, Any]], dict[str, Any]] = lambda file, config: {}
    rope_rows_paired: bool = False
    norm_offset: float = 0.0
    matrices: dict[str, str] = field(
        default_factory=lambda: {
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }
    )


TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA3_27B_LAYERS = 62


def _llama_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in file.tensors
    return {"hidden_act": "silu", "attention_bias": bias, "mlp_bias": False, "rope_traditional": False}


def _qwen2_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _qwen3_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False}


def _gemma3_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    # The file does not carry the attention scale. All sizes take the head's width, but for the 27B.
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    pattern = file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        raise UnsupportedModelError(
            f"{file.path.name}: a sliding-window pattern per layer is not supported for gemma3."
        )
    layers = config["num_hidden_layers"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.metadata.size("gemma3.attention.sliding_window", 512),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ],
        "rope_local_base_freq": _decimal(file.metadata.number("gemma3.rope.freq_base_swa", 10_000.0)),
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", TWO_NORMS, _llama_config, rope_rows_paired=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", TWO_NORMS, _qwen2_config),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**TWO_NORMS, **HEAD_NORMS}, _qwen3_config),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            **HEAD_NORMS,
        },
        _gemma3_config,
        norm_offset=-1.0,
    ),
}


def architecture_of(file: GgufFile) -> Architecture:
    """How to convert `file`.

    Raises:
        UnsupportedModelError: its architecture is not one of ours.
    """
    name = file.architecture
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path.name} is one of {file.metadata['split.count']} parts. Join them with llama.cpp's "
            "`llama-gguf-split --merge` first."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {name!r}; GGUF files of {', '.join(sorted(ARCHITECTURES))} can be "
            "converted. Take this model as a Hugging Face folder or hub repository instead."
        )
    if file.metadata.get(f"{name}.expert_count", 0):
        raise UnsupportedModelError(
            f"{file.path.name} is a mixture of experts, which is not converted from GGUF. "
            "Take this model as a Hugging Face folder or hub repository instead."
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict[str, Any]:
    """`config.json` without the tokenizer's entries."""
    architecture = architecture_of(file)
    prefix = file.architecture
    heads, key_heads = _heads(file, prefix)
    hidden = file.metadata.size(f"{prefix}.embedding_length")
    layers = file.metadata.size(f"{prefix}.block_count")
    if layers > len(file.tensors):
        raise CorruptModelError(f"{file.path} claims {layers} layers and holds {len(file.tensors)} tensors.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModelError(f"{file.path} has no token embedding.")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": file.metadata.size(f"{prefix}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": file.metadata.size(f"{prefix}.attention.key_length", hidden // heads),
        "rms_norm_eps": _decimal(file.metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": file.metadata.size(f"{prefix}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _decimal(file.metadata.number(f"{prefix}.rope.freq_base", _default_theta(prefix))),
        "dtype": "float32" if _is_small(file) else "bfloat16" if prefix == "gemma3" else "float16",
    }
    if prefix == "qwen2" and config["head_dim"] != hidden // heads:
        raise UnsupportedModelError(f"{file.path.name}: qwen2 with heads of another width than hidden/heads.")
    rotated = file.metadata.size(f"{prefix}.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise UnsupportedModelError(
            f"{file.path.name} rotates only {rotated} of {config['head_dim']} dimensions a head."
        )
    scaling = rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | architecture.extra_config(file, config)


def plan_tensors(file: GgufFile, config: dict[str, Any]) -> list[Target]:
    """Which checkpoint tensor comes from which tensor of the file, in the file's order.

    Raises:
        CorruptModelError: a tensor that the architecture needs is missing.
        UnsupportedModelError: the file holds a tensor that we have no place for.
    """
    architecture = architecture_of(file)
    shapes = _matrix_shapes(config)
    targets = []
    for name, info in file.tensors.items():
        if name == "rope_freqs.weight":
            continue  # read into rope_scaling
        target = _target_name(architecture, name)
        if target is None:
            raise UnsupportedModelError(
                f"{file.path.name}: no place is known for tensor {name!r} in architecture {file.architecture!r}."
            )
        reorder: Transform | None = None
        if architecture.rope_rows_paired and (match := re.search(r"\.attn_([qk])\.", name)):
            heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            reorder = _unpair_rows(heads)
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
        expected = shapes.get(target.rpartition(".layers.")[2].partition(".")[2] if ".layers." in target else target)
        if expected is not None and info.shape != expected:
            raise CorruptModelError(f"{file.path}: tensor {name!r} is {info.shape}, not {expected}.")
        targets.append(Target(target, info, reorder, offset, _is_small(file)))
    needed = {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(config["num_hidden_layers"])
        for part in (*architecture.matrices.values(), *architecture.norms.values())
    }
    missing = sorted(needed - {target.name for target in targets})
    if missing:
        raise CorruptModelError(f"{file.path} lacks the tensors for {', '.join(missing[:5])}. Fetch it again.")
    return targets


def _target_name(architecture: Architecture, name: str) -> str | None:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    part = (architecture.matrices | architecture.norms).get(match[2])
    return f"model.layers.{match[1]}.{part}.{match[3]}" if part else None


def _matrix_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices, by the end of their name: within a layer, or whole."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _unpair_rows(heads: int) -> Transform:
    """Rows of each head from (0, d/2, 1, d/2+1, ...) to (0, 1, ..., d/2, d/2+1, ...)."""

    def reorder(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        half = values.shape[0] // heads // 2
        return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    return reorder


def _is_small(file: GgufFile) -> bool:
    return sum(math.prod(info.shape) for info in file.tensors.values()) <= EXACT_UP_TO


def _heads(file: GgufFile, prefix: str) -> tuple[int, int]:
    keys = (f"{prefix}.attention.head_count", f"{prefix}.attention.head_count_kv")
    if any(isinstance(file.metadata.get(key), list) for key in keys):
        raise UnsupportedModelError(f"{file.path.name} has another number of heads in each layer.")
    heads = file.metadata.size(keys[0])
    key_heads = file.metadata.size(keys[1], heads)
    if heads % key_heads:
        raise CorruptModelError(f"{file.path}: {heads} query heads cannot share {key_heads} key heads.")
    return heads, key_heads


def _default_theta(prefix: str) -> float:
    return 1_000_000.0 if prefix == "gemma3" else 10_000.0


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05 where the file says 9.99999974e-06."""
    return float(str(np.float32(value)))
