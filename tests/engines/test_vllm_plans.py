"""What the vLLM engine decides before vLLM is there: memory, refusals, process variables, progress."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.engines.base import LoadProgress
from tandem.engines.vllm import environment
from tandem.engines.vllm.memory import BLOCK_TOKENS, bytes_per_token, plan
from tandem.engines.vllm.progress import Meter, missing_siblings, reporting, seen
from tandem.engines.vllm.support import dtype_for, keeps_prefixes, refuse
from tandem.errors import ModelError, UnsupportedModelError

GIB = 1 << 30
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


def check(config: dict[str, Any], *, accelerator: bool = True) -> None:
    refuse(
        config,
        "the-model",
        accelerator=accelerator,
        architectures={"LlamaForCausalLM", "Lfm2ForCausalLM", "MambaForCausalLM"},
        quantisations={"awq", "fp8"} if accelerator else {"awq"},
    )


def test_bytes_of_a_token() -> None:
    assert bytes_per_token(LLAMA, 2) == 32 * 2 * 8 * 128 * 2
    assert bytes_per_token({"text_config": LLAMA | {"head_dim": 64}}, 1) == 32 * 2 * 8 * 64
    assert bytes_per_token({"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2) == 3 * 576 * 2


@pytest.mark.parametrize("accelerator", [True, False])
def test_no_more_memory_than_is_needed(accelerator: bool) -> None:
    found = plan(1000, 4096, 8, 400 * GIB, GIB, accelerator=accelerator)
    others = 4096 if accelerator else 2048
    assert found == (1000 * (4096 + 7 * others + 9 * BLOCK_TOKENS), 4096)


def test_less_than_wanted_is_taken_in_full_but_never_all() -> None:
    found = plan(1 << 17, 8192, 8, 16 * GIB, 8 * GIB, accelerator=True)
    assert found.bytes == int(16 * GIB * 0.85) - 8 * GIB
    assert found.context_length == 8192
    small = plan(1 << 17, 131072, 2, 16 * GIB, 8 * GIB, accelerator=True)
    assert small.bytes == found.bytes
    assert small.context_length == found.bytes // (1 << 17) - 2 * BLOCK_TOKENS
    assert plan(1 << 17, 131072, 2, 16 * GIB, 4 * GIB, accelerator=False).bytes == 4 * GIB


def test_what_was_granted_is_what_is_taken() -> None:
    assert plan(1000, 4096, 8, 400 * GIB, GIB, accelerator=True, granted=GIB).bytes == GIB
    with pytest.raises(ModelError, match="no useful context"):
        plan(1 << 20, 4096, 8, 400 * GIB, GIB, accelerator=True, granted=1 << 28)


def test_refusals_name_what_is_in_the_way() -> None:
    check(LLAMA)
    check(LLAMA, accelerator=False)
    check(LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UnsupportedModelError, match=r"fp8, which vLLM cannot load on a CPU.*It loads awq"):
        check(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, accelerator=False)
    with pytest.raises(UnsupportedModelError, match=r"MLX's format \(4 bits\)"):
        check(LLAMA | {"quantization": {"bits": 4, "group_size": 64}})
    with pytest.raises(UnsupportedModelError, match="NewForCausalLM"):
        check(LLAMA | {"architectures": ["NewForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="architecture of this model"):
        check({"model_type": "llama"})
    with pytest.raises(UnsupportedModelError, match="heads of 48"):
        check(LLAMA | {"head_dim": 48}, accelerator=False)
    check({"architectures": ["MambaForCausalLM"], "model_type": "mamba2", "head_dim": 24}, accelerator=False)
    lfm2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
    check(lfm2)
    with pytest.raises(UnsupportedModelError, match="lfm2"):
        check(lfm2, accelerator=False)


def test_dtypes() -> None:
    assert dtype_for(LLAMA, "auto", "m", accelerator=True) == "auto"
    assert dtype_for(LLAMA, "auto", "m", accelerator=False) == "float32"
    assert dtype_for(LLAMA, "float16", "m", accelerator=False) == "float16"
    hybrid = {"model_type": "qwen3_next"}
    assert dtype_for(hybrid, "auto", "m", accelerator=False) == "bfloat16"
    assert dtype_for(hybrid, "float16", "m", accelerator=True) == "float16"
    with pytest.raises(UnsupportedModelError, match="qwen3_next"):
        dtype_for(hybrid, "float32", "m", accelerator=False)
    with pytest.raises(ModelError, match="TANDEM_DTYPE"):
        dtype_for(LLAMA, "int3", "m", accelerator=True)


def test_what_a_person_set_stays() -> None:
    found = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    environment.prepare(found)
    assert found["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (0, 0, 0, 0)])
def test_every_layer_is_reported_once(order: tuple[int, ...]) -> None:
    told: list[LoadProgress] = []
    with reporting(Meter(4, told.append)):
        for layer in order:
            seen("model.embed_tokens.weight")
            for name in ("self_attn.q_proj", "mlp.up_proj"):
                seen(f"model.layers.{layer}.{name}.weight")
        assert len(told) == len(set(order)) - 1
    assert told == [LoadProgress(done, 4) for done in (1, 2, 3, 4)]
    seen("model.layers.0.mlp.up_proj.weight")
    assert len(told) == 4


def test_what_is_missing_in_one_layer_only() -> None:
    wanted = ["model.norm.scale", *(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("a", "made_up"))]
    assert missing_siblings(wanted, {"model.layers.0.a", "model.layers.1.a"}) == []
    assert missing_siblings(wanted, {"model.layers.0.a"}) == ["model.layers.1.a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "granitemoehybrid", "mamba_d_state": 128},
        {"model_type": "mamba2", "state_size": 128},
        {"model_type": "qwen3_next", "linear_num_key_heads": 16},
    ],
    ids=lambda changes: changes["model_type"],
)
def test_recurrent_models_keep_no_prefixes_on_a_cpu(changes: dict[str, Any]) -> None:
    assert keeps_prefixes(LLAMA | changes, accelerator=False) is False
    assert keeps_prefixes({"text_config": LLAMA | changes}, accelerator=False) is False
    assert keeps_prefixes(LLAMA | changes, accelerator=True) is None


def test_other_models_keep_prefixes_as_vllm_likes() -> None:
    assert keeps_prefixes(LLAMA, accelerator=False) is None
