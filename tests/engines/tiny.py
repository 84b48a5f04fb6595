"""Tiny models with random weights, one for each kind of cache, written to a folder in Hugging Face layout.

The weights are scaled so that greedy answers wander through the vocabulary: a model that repeats one token would hide
almost any fault.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 384
WINDOW = 24
CONTEXT = 4096
BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while seven wizards make toxic brew.",
    "def step(self, limit): return [self.tokens[index] for index in range(limit)]",
    "When a prompt begins like another, what was computed for the first serves the second as well.",
    "äöü ñ 你好 こんにちは 🙂 numbers 0123456789 and signs ()[]{}<>!?",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        **_ATTENTION,
        "model_type": "llama",
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        **_COMMON,
        **_ATTENTION,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        **_COMMON,
        **_ATTENTION,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_COMMON,
        **_ATTENTION,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "full_attention_interval": 2,
    },
    "mamba2": {
        **_COMMON,
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "num_heads": 4,
        "head_dim": 24,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
    },
    "deepseek_v3": {**_COMMON, **_LATENT, "model_type": "deepseek_v3"},
    "deepseek_v32": {
        **_COMMON,
        **_LATENT,
        "model_type": "deepseek_v32",
        "index_head_dim": 16,
        "index_n_heads": 4,
        "index_topk": 32,
    },
}
KINDS = ("llama", "gemma3", "gpt_oss", "qwen3_next", "mamba2", "deepseek_v3")
"""The six kinds of the greedy-equality tests. `deepseek_v32`, whose layers have two caches each, comes on top."""
ALL_KINDS = (*KINDS, "deepseek_v32")
STATEFUL = frozenset({"qwen3_next", "mamba2"})
"""Kinds with recurrent layers, whose cache cannot be cut at any token."""


def build(kind: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write the tiny model `kind`.

    Args:
        changes: further entries of its `config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[kind] | changes
    (folder / "config.json").write_text(json.dumps(config))
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    weights = _random_weights(model, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(folder)
    return folder


FOR_VLLM: dict[str, dict[str, Any]] = {
    # Its CPU attention has no kernels for heads of 16, and it goes by the name of the class.
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 32},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "head_dim": 32},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"], "intermediate_size": 96, "n_groups": 1},
}
"""Changes to the configs with which vLLM's CPU build runs these kinds."""


def build_for_vllm(kind: str, folder: Path, **changes: Any) -> Path:
    """Write the tiny model `kind` so that vLLM reads it, and mlx-lm the same weights."""
    build(kind, folder, **FOR_VLLM[kind] | changes)
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    for name, value in weights.items():
        if name.endswith("conv1d.weight"):
            # As torch has them: channels, one, kernel.
            weights[name] = mx.contiguous(value.swapaxes(1, 2))
    mx.save_safetensors(path, weights, metadata={"format": "pt"})
    return folder


def quantise(source: Path, folder: Path) -> Path:
    """Write the model in `source` with weights in 4 bits."""
    shutil.copytree(source, folder)
    model, config = load_model(folder)
    nn.quantize(model, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def halve(source: Path, folder: Path) -> Path:
    """Write the model in `source` with weights in 16 bits."""
    shutil.copytree(source, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    half = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), half, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with a few merges, `<bos>`, `<eos>` and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _random_weights(model: nn.Module, seed: int) -> dict[str, mx.array]:
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        key, draw = mx.random.split(key)
        weights[name] = _weight(name, value, lambda draw=draw, value=value: mx.random.normal(value.shape, key=draw))
    mx.eval(weights)
    return weights


def _weight(name: str, value: mx.array, normal: Callable[[], mx.array]) -> mx.array:
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("A_log", "D", "dt_bias") or "norm" in name or name.endswith("embeddings.weight"):
        return value.astype(mx.float32) + 0.1 * normal()
    if "embed_tokens" in name:
        return 0.5 * normal()
    if leaf == "sinks":
        return normal()
    if leaf == "bias" or value.ndim == 1:
        return 0.1 * normal()
    if "conv1d" in name:
        return 0.5 * normal()
    return normal() * (1.6 / value.shape[-1] ** 0.5)
