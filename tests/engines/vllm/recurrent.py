"""Tiny recurrent models in the form that both mlx-lm and vLLM's CPU build load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.engines import tiny

GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    # vLLM makes pages of attention and of states equally large: with these they are so with blocks of 32 tokens.
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": tiny.CONTEXT,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.18,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "position_embedding_type": "rope",
    "rope_theta": 10000.0,
    # vLLM has no such limit for this model.
    "time_step_limit": [0.0, 1e9],
    "tie_word_embeddings": False,
    "bos_token_id": tiny.BOS,
    "eos_token_id": tiny.EOS,
    "torch_dtype": "float32",
}


def mamba2(folder: Path) -> Path:
    """Recurrent layers only. vLLM norms by group where mlx-lm norms all at once: so there is one group."""
    return _as_published(tiny.build("mamba2", folder, **tiny.FOR_VLLM["mamba2"]))


def granite(folder: Path) -> Path:
    """Recurrent layers and attention in turn."""
    tiny.CONFIGS.setdefault("granite", GRANITE)
    return _as_published(tiny.build("granite", folder))


def _as_published(folder: Path) -> Path:
    """Give the weights the names and shapes that published models have; mlx-lm turns them round as it loads them."""
    path = str(folder / "model.safetensors")
    weights = dict(mx.load(path))
    for name in [name for name in weights if name.endswith("conv1d.weight")]:
        weights[name] = mx.contiguous(weights[name].moveaxis(1, 2))
    for name in [name for name in weights if name.endswith(".mlp.gate_proj.weight")]:
        own, shared = name.removesuffix("gate_proj.weight"), name.replace(".mlp.gate_proj", ".shared_mlp.input_linear")
        weights[shared] = mx.concatenate([weights.pop(name), weights.pop(f"{own}up_proj.weight")])
        weights[shared.replace("input", "output")] = weights.pop(f"{own}down_proj.weight")
    mx.eval(weights)
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})
    return folder
