"""Which models vLLM loads, with which options; and what it says of those that it does not."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tandem.engines.base import EngineOptions
from tandem.engines.registry import build_engine
from tandem.errors import CorruptModelError, ModelError, UnsupportedModelError
from tests.engines import tiny
from tests.engines.conftest import VLLM
from tests.engines.drive import Reference, assert_same, greedy, run

pytestmark = [*VLLM, pytest.mark.timeout(600)]


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Makes engines, one at a time, and checks that nothing is left in them."""
    made: list[Any] = []

    def end() -> None:
        while made:
            engine = made.pop()
            try:
                engine.check_idle()
            finally:
                engine.close()

    def begin(folder: Path, **options: Any) -> Any:
        end()
        made.append(build_engine(EngineOptions(engine="vllm", model_id="test", path=str(folder), **options)))
        made[-1].load(lambda progress: None)
        made[-1].warm_up()
        return made[-1]

    yield begin
    end()


def words(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, tiny.VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("kind", ["gemma3", "mamba2"])
def test_other_kinds_of_cache(kind: str, start: Callable[..., Any], vllm_folder: Callable[[str], Path]) -> None:
    """Windows that have wrapped, and recurrent states; several at once, cold and warm."""
    engine = start(vllm_folder(kind), prefill_chunk=128)
    reference = Reference(vllm_folder(kind))
    prompts = [words(seed, length) for seed, length in enumerate((1, 23, 25, 200, 390))]
    for _ in ("cold", "warm"):
        for prompt, answer in zip(prompts, run(engine, *(greedy(prompt, 30) for prompt in prompts)), strict=True):
            assert_same(answer.tokens, reference.generate(prompt, 30), (kind, len(prompt)))


def test_a_cache_too_small_for_all(start: Callable[..., Any], vllm_folder: Callable[[str], Path]) -> None:
    """vLLM puts sequences aside and computes them again; nobody's text or progress shows it."""
    folder = vllm_folder("llama")
    # Twelve blocks of 128 tokens, for 1536 bytes each; ten sequences of up to 300 tokens need thirty.
    engine = start(folder, context_length=700, max_batch=10, cache_bytes=12 * 128 * 1536, prefill_chunk=64)
    put_aside = 0
    scheduler = engine._inside._scheduler
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal put_aside
        put_aside += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counted
    reference = Reference(folder)
    prompts = [words(seed, 100 + 5 * seed) for seed in range(10)]
    answers = run(engine, *(greedy(prompt, 150) for prompt in prompts))
    assert put_aside > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer.tokens, reference.generate(prompt, 150), len(prompt))
        done = [event.processed_tokens for event in answer.progress]
        assert done == sorted(set(done))


def test_no_prefix_cache(start: Callable[..., Any], vllm_folder: Callable[[str], Path]) -> None:
    engine = start(vllm_folder("llama"), prefix_cache_bytes=0)
    for _ in range(2):
        (answer,) = run(engine, greedy(words(1, 300), 3))
        assert answer.accepted.cached_tokens == 0
    assert engine.load_now().prefix_cache_bytes == 0


def test_a_set_dtype(start: Callable[..., Any], vllm_folder: Callable[[str], Path]) -> None:
    engine = start(vllm_folder("llama"), dtype="bfloat16")
    assert engine._loaded.dtype == "bfloat16"
    (answer,) = run(engine, greedy(words(1, 40), 6))
    assert len(answer.tokens) == 6


def test_little_memory_shortens_the_context(start: Callable[..., Any], vllm_folder: Callable[[str], Path]) -> None:
    engine = start(vllm_folder("llama"), max_batch=1, cache_bytes=1536 * (1000 + 256))
    assert engine._loaded.context_length == 1000
    (answer,) = run(engine, greedy(words(1, 900), 100))
    assert len(answer.tokens) == 100


# ------------------------------------------------------------------------------------------------------------- refusals


def refusal(folder: Path, **options: Any) -> ModelError:
    engine = build_engine(EngineOptions(engine="vllm", model_id="the-model", path=str(folder), **options))
    with pytest.raises(ModelError) as raised:
        engine.load(lambda progress: None)
    engine.close()
    return raised.value


def changed(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_mlx_quantisation_is_refused(vllm_folder: Callable[[str], Path], tmp_path: Path) -> None:
    error = refusal(changed(vllm_folder("llama"), tmp_path / "a", quantization={"bits": 4, "group_size": 64}))
    assert isinstance(error, UnsupportedModelError)
    assert "MLX's format (4 bits)" in error.message


def test_unknown_quantisations_and_architectures(vllm_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = vllm_folder("llama")
    error = refusal(changed(folder, tmp_path / "a", quantization_config={"quant_method": "aqlm"}))
    assert isinstance(error, UnsupportedModelError)
    assert "aqlm" in error.message
    error = refusal(changed(folder, tmp_path / "b", architectures=["LamaForSpitting"]))
    assert isinstance(error, UnsupportedModelError)
    assert "LamaForSpitting" in error.message


def test_heads_without_a_kernel(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    error = refusal(changed(tiny_folder("llama"), tmp_path / "a", architectures=["LlamaForCausalLM"]))
    assert isinstance(error, UnsupportedModelError)
    assert "heads of 16" in error.message


def test_broken_folders(vllm_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = vllm_folder("llama")
    assert isinstance(refusal(tmp_path / "nowhere"), CorruptModelError)
    no_weights = changed(folder, tmp_path / "a")
    (no_weights / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(no_weights).message
    short = changed(folder, tmp_path / "b")
    content = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert isinstance(refusal(short), CorruptModelError)
    missing = changed(folder, tmp_path / "c")
    weights = mx.load(str(missing / "model.safetensors"))
    del weights["model.layers.1.mlp.down_proj.weight"]
    mx.save_safetensors(str(missing / "model.safetensors"), weights, metadata={"format": "pt"})
    assert isinstance(refusal(missing), CorruptModelError)


def test_a_failed_load_does_no_harm(
    start: Callable[..., Any], vllm_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    refusal(changed(vllm_folder("llama"), tmp_path / "a", num_hidden_layers=5))
    engine = start(vllm_folder("llama"))
    (answer,) = run(engine, greedy(words(1, 40), 3))
    assert len(answer.tokens) == 3


def test_options_that_vllm_does_not_know(vllm_folder: Callable[[str], Path]) -> None:
    assert "TANDEM_DTYPE" in refusal(vllm_folder("llama"), dtype="int3").message
    assert "TANDEM_KV_BITS" in refusal(vllm_folder("llama"), kv_bits=4).message
    assert "no useful context" in refusal(vllm_folder("llama"), cache_bytes=1 << 18).message
