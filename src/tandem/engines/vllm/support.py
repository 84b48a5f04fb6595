"""What vLLM cannot run, told by name before anything is loaded. Imports nothing of vLLM's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tandem.errors import ModelError, UnsupportedModelError

DTYPES = ("float32", "bfloat16", "float16")

GATED_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types with gated delta nets, whose CPU kernel computes in bfloat16 alone (vLLM 0.32)."""

CPU_REFUSED = {
    "lfm2": "its rotary positions come out wrong there",
    "lfm2_moe": "its rotary positions come out wrong there",
    "olmo_hybrid": "its recurrent layers need Triton",
}
"""Model types that vLLM 0.32 does not compute rightly, or at all, on a CPU, and why."""

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that vLLM 0.32's CPU attention has kernels for."""


RECURRENT_KEYS = ("mamba_", "ssm_", "state_size", "linear_num_", "linear_conv_", "lru_")
"""What the settings of recurrent layers begin with in a `config.json`."""


def has_recurrent_layers(config: dict[str, Any]) -> bool:
    """Whether some layers keep a state instead of every token's entries."""
    text = config.get("text_config") or config
    return any(key.startswith(RECURRENT_KEYS) for key, value in text.items() if value)


def keeps_prefixes(config: dict[str, Any], *, accelerator: bool) -> bool | None:
    """Whether vLLM's prefix cache is on; None leaves it to vLLM.

    The CPU kernel of Mamba2 cannot hand out a state from the middle of a step, for which the prefix cache of recurrent
    layers asks: vLLM 0.32 ends in an IndexError there, and every request with it.
    """
    return False if has_recurrent_layers(config) and not accelerator else None


def refuse(
    config: dict[str, Any],
    model_id: str,
    *,
    accelerator: bool,
    architectures: Collection[str],
    quantisations: Collection[str],
) -> None:
    """Check a model against what vLLM can do here.

    Args:
        config: the folder's `config.json`.
        architectures: class names that vLLM knows.
        quantisations: methods that vLLM knows on this device.

    Raises:
        UnsupportedModelError: the message names what is in the way.
    """
    text = config.get("text_config") or config
    if "quantization" in config:
        bits = config["quantization"].get("bits", "some")
        raise UnsupportedModelError(
            f"{model_id} is quantised in MLX's format ({bits} bits), which vLLM cannot load. Take the model's original "
            "weights, or a version in AWQ, GPTQ, FP8 or compressed-tensors."
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None and method not in quantisations:
        where = "" if accelerator else " on a CPU"
        raise UnsupportedModelError(
            f"{model_id} is quantised with {method}, which vLLM cannot load{where}. It loads "
            f"{', '.join(sorted(quantisations)) or 'no quantisation'}."
        )
    named = config.get("architectures") or []
    if not any(name in architectures for name in named):
        raise UnsupportedModelError(
            f"vLLM knows no {' or '.join(named) or 'architecture of this model'} ({model_id}). Run it with another "
            "engine, or a newer vLLM."
        )
    if not accelerator:
        _refuse_on_cpu(text, model_id)


def _refuse_on_cpu(text: dict[str, Any], model_id: str) -> None:
    kind = str(text.get("model_type"))
    if kind in CPU_REFUSED:
        raise UnsupportedModelError(f"vLLM cannot run {kind} models on a CPU: {CPU_REFUSED[kind]} ({model_id}).")
    heads = text.get("num_attention_heads")
    dim = text.get("head_dim") or (text["hidden_size"] // heads if heads and "hidden_size" in text else None)
    if dim and not text.get("kv_lora_rank") and kind not in ("mamba", "mamba2") and dim not in CPU_HEAD_DIMS:
        raise UnsupportedModelError(
            f"vLLM has no CPU attention for heads of {dim} ({model_id}): it has "
            f"{', '.join(str(one) for one in CPU_HEAD_DIMS)}."
        )


def dtype_for(config: dict[str, Any], wanted: str, model_id: str, *, accelerator: bool) -> str:
    """The dtype to load a model in: as set, else the model's own on a GPU and float32 on a CPU.

    Raises:
        ModelError: there is no such dtype.
        UnsupportedModelError: vLLM cannot compute this model in it.
    """
    if wanted not in ("auto", *DTYPES):
        raise ModelError(f"'{wanted}' is no dtype for weights. Set TANDEM_DTYPE to auto, {', '.join(DTYPES)}.")
    text = config.get("text_config") or config
    if not accelerator and text.get("model_type") in GATED_DELTA:
        if wanted not in ("auto", "bfloat16"):
            raise UnsupportedModelError(
                f"vLLM computes {text['model_type']} models on a CPU in bfloat16 only, not in {wanted} ({model_id}). "
                "Set TANDEM_DTYPE to auto or bfloat16."
            )
        return "bfloat16"
    if wanted == "auto":
        return "auto" if accelerator else "float32"
    return wanted
