"""Loading a model folder into vLLM."""

from __future__ import annotations

import json
import secrets
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from vllm import LLMEngine
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from tandem.engines.base import EngineOptions, LoadProgress
from tandem.engines.folder import context_length, generation_defaults
from tandem.engines.vllm.memory import bytes_per_token, plan
from tandem.engines.vllm.peer_work import MOST_AT_ONCE
from tandem.engines.vllm.progress import Meter, reporting
from tandem.engines.vllm.repetition import Repetition
from tandem.engines.vllm.support import dtype_for, keeps_prefixes, refuse
from tandem.engines.vllm.weights import LOAD_FORMAT
from tandem.errors import CorruptModelError, ModelError, UnsupportedModelError

CPU_PREFILL_CHUNK = 512
GPU_PREFILL_CHUNK = 2048
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in vLLM.

    Attributes:
        config: the folder's `config.json`.
        context_length: prompt plus answer.
        chunk: prompt tokens per step at most.
        weight_bytes: of the weights in their dtype; kernels may keep them packed otherwise.
        defaults: sampling values from `generation_config.json`.
    """

    engine: LLMEngine
    config: dict[str, Any]
    context_length: int
    chunk: int
    weight_bytes: int
    defaults: dict[str, Any]

    @property
    def architecture(self) -> str:
        """The `model_type`, e.g. `llama`."""
        return str(self.config.get("model_type", "unknown"))

    @property
    def dtype(self) -> str:
        """Of the weights, e.g. `float32`."""
        return str(self.engine.model_config.dtype).removeprefix("torch.")


def on_accelerator() -> bool:
    """Whether vLLM computes on a GPU."""
    return not current_platform.is_cpu()


def usual_chunk() -> int:
    """Prompt tokens per step while no answer runs."""
    return GPU_PREFILL_CHUNK if on_accelerator() else CPU_PREFILL_CHUNK


def read_config(options: EngineOptions) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        CorruptModelError: it is missing or no JSON, or there are no weights beside it.
    """
    folder = options.folder
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError as error:
        raise CorruptModelError(f"{folder} is not a complete model folder: {error}") from error
    except ValueError as error:
        raise CorruptModelError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not weight_files(folder):
        raise CorruptModelError(f"{folder} is not a complete model folder: it has no *.safetensors files.")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path, config: dict[str, Any], itemsize: int) -> int:
    """Memory of the weights, elements of `itemsize` bytes unless they are quantised."""
    size = sum(path.stat().st_size for path in weight_files(folder))
    return size if config.get("quantization_config") else size * itemsize // ITEM_SIZES.get(_stored_dtype(config), 2)


def _stored_dtype(config: dict[str, Any]) -> str:
    text = config.get("text_config") or config
    return str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")


def engine_args(options: EngineOptions, *, kv_transfer: Any = None) -> EngineArgs:
    """What vLLM is started with.

    Args:
        kv_transfer: a `KVTransferConfig`, if prompts are computed for others or taken from them.

    Raises:
        ModelError: the folder cannot be loaded; the message names what is in the way.
    """
    config = read_config(options)
    accelerator = on_accelerator()
    known = list(QUANTIZATION_METHODS)
    here = [name for name in known if name in current_platform.supported_quantization]
    refuse(
        config,
        options.model_id,
        accelerator=accelerator,
        architectures=ModelRegistry.get_supported_archs(),
        quantisations=here if current_platform.supported_quantization else known,
    )
    if options.kv_bits and not (options.kv_bits == 8 and accelerator):
        raise UnsupportedModelError(
            f"vLLM keeps no cache of {options.kv_bits} bits here: 8 on a GPU is what it has. Set TANDEM_KV_BITS=0."
        )
    dtype = dtype_for(config, options.dtype, options.model_id, accelerator=accelerator)
    itemsize = ITEM_SIZES.get(_stored_dtype(config) if dtype == "auto" else dtype, 2)
    cache = plan(
        bytes_per_token(config, 1 if options.kv_bits else itemsize),
        context_length(config, options.context_length),
        options.max_batch,
        _free_memory(),
        weight_bytes(options.folder, config, itemsize),
        accelerator=accelerator,
        granted=options.cache_bytes,
    )
    # Peers' prompts have places of their own: they must not wait for answers to end.
    sequences = options.max_batch + (MOST_AT_ONCE if kv_transfer is not None else 0)
    return EngineArgs(
        model=options.path,
        served_model_name=options.model_id,
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        dtype=dtype,
        seed=secrets.randbits(31),
        # One more than the context: see `environment`. LongRoPE chooses its factors by this number.
        max_model_len=cache.context_length + (0 if _uses_long_rope(config) else 1),
        max_num_seqs=sequences,
        max_num_batched_tokens=max(options.prefill_chunk or usual_chunk(), sequences),
        enable_chunked_prefill=True,
        enable_prefix_caching=(
            False if options.prefix_cache_bytes == 0 else keeps_prefixes(config, accelerator=accelerator)
        ),
        kv_cache_memory_bytes=cache.bytes,
        kv_cache_dtype="fp8" if options.kv_bits == 8 else "auto",
        enforce_eager=not accelerator,
        async_scheduling=False,
        disable_log_stats=True,
        max_logprobs=-1,
        logits_processors=[Repetition],
        kv_transfer_config=kv_transfer,
        # Only text goes in: what would read pictures is not loaded.
        language_model_only="vision_config" in config,
    )


def load(options: EngineOptions, report: Callable[[LoadProgress], None], *, kv_transfer: Any = None) -> LoadedModel:
    """Start vLLM on `options.path`.

    Raises:
        UnsupportedModelError: vLLM cannot run this model here.
        CorruptModelError: files are missing or do not fit together.
        ModelError: vLLM failed for another reason, which the message gives.
    """
    arguments = engine_args(options, kv_transfer=kv_transfer)
    config = read_config(options)
    layers = int((config.get("text_config") or config).get("num_hidden_layers") or 1)
    try:
        with reporting(Meter(layers, report)):
            engine = LLMEngine.from_engine_args(arguments)
    except Exception as error:
        cleanup_dist_env_and_memory()
        raise _refusal(error, options) from error
    return LoadedModel(
        engine=engine,
        config=config,
        context_length=engine.model_config.max_model_len - (0 if _uses_long_rope(config) else 1),
        chunk=int(arguments.max_num_batched_tokens or 0),
        weight_bytes=weight_bytes(options.folder, config, engine.model_config.dtype.itemsize),
        defaults=generation_defaults(options.folder) | options.sampling_defaults,
    )


def _refusal(error: Exception, options: EngineOptions) -> ModelError:
    """vLLM's words in one of our errors."""
    reason = str(error) or f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"
    if isinstance(error, NotImplementedError):
        return UnsupportedModelError(f"vLLM cannot run {options.model_id} here: {reason}")
    if isinstance(error, OSError | KeyError | SafetensorError) or "not initialized from checkpoint" in reason:
        return CorruptModelError(
            f"The weights in {options.path} cannot be read, or do not fit its config.json: {reason}"
        )
    return ModelError(f"vLLM cannot load {options.model_id}: {reason}")


def _uses_long_rope(config: dict[str, Any]) -> bool:
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return (scaling.get("rope_type") or scaling.get("type")) in ("longrope", "su")


def _free_memory() -> int:
    """Bytes on the device that vLLM computes on."""
    if on_accelerator():
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
