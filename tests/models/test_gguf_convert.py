"""Converting GGUF files of every architecture and quantisation, against the models they were written from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
import tiny_gguf as tiny
from mlx_lm.utils import load_model, load_tokenizer
from safetensors.numpy import load_file

from tandem.errors import CorruptModelError, UnsupportedModelError
from tandem.models.folder import check_model_folder
from tandem.models.gguf import weights
from tandem.models.gguf.architectures import plan_tensors, read_config
from tandem.models.gguf.convert import convert_gguf
from tandem.models.gguf.describe import gguf_card
from tandem.models.gguf.reader import GgufFile
from tandem.models.gguf.rope import llama3_divisors
from tandem.models.progress import Progress

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
PROMPT = [(index * 37) % 250 for index in range(24)]  # longer than the sliding window


def logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array([PROMPT]))[0])


def convert(path: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(path, folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_original(tmp_path: Path, architecture: str) -> None:
    tensors = tiny.weights(architecture)
    original = tiny.write_folder(tmp_path / "original", architecture, tensors)
    converted = convert(tiny.write_gguf(tmp_path / "m.gguf", architecture, tensors), tmp_path / "converted")
    check_model_folder(converted)
    for name, tensor in load_file(converted / "model.safetensors").items():
        np.testing.assert_allclose(tensor, tensors[name], atol=1e-6, err_msg=name)
    np.testing.assert_allclose(logits(converted), logits(original), atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_says_what_the_original_says(tmp_path: Path, architecture: str) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", architecture, tiny.weights(architecture))
    config = json.loads((convert(path, tmp_path / "converted") / "config.json").read_text())
    original = tiny.config(architecture)
    assert {key: config.get(key) for key in original} == original


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_writable_quantisation_is_read(tmp_path: Path, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    tensors = tiny.weights("llama")
    converted = convert(tiny.write_gguf(tmp_path / "m.gguf", "llama", tensors, kind), tmp_path / "converted")
    stored = mx.load(str(converted / "model.safetensors"))
    assert isinstance(stored, dict)
    for name, tensor in tensors.items():
        expected = tensor if tensor.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        np.testing.assert_array_equal(np.array(stored[name].astype(mx.float32)), expected, err_msg=name)
    dtype = {"F16": mx.float16, "BF16": mx.bfloat16}.get(quantization, mx.float32)
    assert stored["lm_head.weight"].dtype == dtype


@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_k_quants_are_dequantised_in_parts_as_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 60, (7, 2 * size), dtype=np.uint8)  # small bytes: no NaN scales
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(weights, "ROWS_AT_A_TIME", 3 * 2 * block)
    with GgufFile(tmp_path / "m.gguf") as file:
        weights.check_readable(file)
        parts = list(weights.dequantize(file, file.tensors["a"]))
    assert [len(part) for part in parts] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(parts), gguf.quants.dequantize(raw, kind))


def test_large_models_are_stored_as_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.models.gguf.architectures.EXACT_UP_TO", 0)
    tensors = tiny.weights("llama")
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tensors, gguf.GGMLQuantizationType.Q8_0)
    converted = convert(path, tmp_path / "converted")
    stored = load_file(converted / "model.safetensors")
    assert stored["lm_head.weight"].dtype == np.float16
    assert stored["model.norm.weight"].dtype == np.float32
    assert json.loads((converted / "config.json").read_text())["dtype"] == "float16"
    np.testing.assert_allclose(stored["lm_head.weight"], tensors["lm_head.weight"], atol=0.01)


def test_what_float16_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.models.gguf.architectures.EXACT_UP_TO", 0)
    tensors = tiny.weights("llama")
    tensors["lm_head.weight"][0, 0] = 1e6
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tensors, gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(UnsupportedModelError, match="float16"):
        convert(path, tmp_path / "converted")


def test_infinite_weights_are_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.weights("llama"), gguf.GGMLQuantizationType.Q8_0)
    with GgufFile(path) as file:
        offset = file.tensors["output.weight"].offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 2] = np.float16(np.inf).tobytes()  # the first block's scale
    path.write_bytes(data)
    with pytest.raises(CorruptModelError, match=r"output.weight.*infinities"):
        convert(path, tmp_path / "converted")


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    tensors = tiny.weights("qwen3")
    del tensors["lm_head.weight"]
    converted = convert(tiny.write_gguf(tmp_path / "m.gguf", "qwen3", tensors), tmp_path / "converted")
    assert json.loads((converted / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(converted / "model.safetensors")
    assert logits(converted).shape == (len(PROMPT), tiny.VOCABULARY)


def test_tokenizer_template_and_end_tokens_arrive(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "m.gguf", "llama", tiny.weights("llama"), change=lambda w: w.add_add_bos_token(True)
    )
    converted = convert(path, tmp_path / "converted")
    tokens, _, _ = tiny.byte_level_vocabulary()
    tokenizer = load_tokenizer(converted)
    assert [tokens[token] for token in tokenizer.encode("hello world")] == ["<|bos|>", "hello", "Ġworld"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokens.index("<|im_end|>")]
    assert generation["bos_token_id"] == tokens.index("<|bos|>")
    assert tokenizer.pad_token == "<|pad|>"


def test_named_chat_templates_become_files(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    path = tiny.write_gguf(
        tmp_path / "m.gguf", "llama", tiny.weights("llama"), change=lambda w: w.add_chat_template(templates)
    )
    converted = convert(path, tmp_path / "converted")
    assert (converted / "chat_template.jinja").read_text() == "plain"
    assert (converted / "additional_chat_templates" / "tool_use.jinja").read_text() == "with tools"


def test_llama3_frequencies_become_rope_scaling(tmp_path: Path) -> None:
    divisors = llama3_divisors(tiny.HEAD_DIM, 5000.0, 32.0).astype(np.float32)
    path = tiny.write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny.weights("llama"),
        change=lambda w: w.add_tensor("rope_freqs.weight", divisors),
    )
    scaling = json.loads((convert(path, tmp_path / "converted") / "config.json").read_text())["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # mlx-lm divides the same frequencies by the same numbers.
    from mlx_lm.models.rope_utils import Llama3RoPE

    rope = Llama3RoPE(dims=tiny.HEAD_DIM, base=5000.0, scaling_config=scaling)
    wavelengths = 5000.0 ** (np.arange(0, tiny.HEAD_DIM, 2) / tiny.HEAD_DIM)
    np.testing.assert_allclose(np.array(rope._freqs), wavelengths * divisors, rtol=1e-5)


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, tiny.HEAD_DIM // 2, dtype=np.float32)
    path = tiny.write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tiny.weights("llama"),
        change=lambda w: w.add_tensor("rope_freqs.weight", divisors),
    )
    with pytest.raises(UnsupportedModelError, match="RoPE frequencies"):
        convert(path, tmp_path / "converted")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (gguf.RopeScalingType.LINEAR, {"rope_type": "linear", "factor": 8.0}),
        (gguf.RopeScalingType.YARN, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
    ],
)
def test_rope_scaling_keys_are_read(tmp_path: Path, kind: gguf.RopeScalingType, expected: dict[str, object]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    path = tiny.write_gguf(tmp_path / "m.gguf", "qwen2", tiny.weights("qwen2"), change=change)
    with GgufFile(path) as file:
        assert read_config(file)["rope_scaling"] == expected


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'mamba2'.*gemma3, llama, qwen2, qwen3"):
        convert(path, tmp_path / "converted")


def test_an_unreadable_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny.weights("llama")
    path = tiny.write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tensors,
        change=lambda w: w.add_tensor(
            "extra", np.zeros((1, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS
        ),
    )
    with pytest.raises(UnsupportedModelError, match=r"IQ2_XXS.*Q4_0, Q4_1"):
        convert(path, tmp_path / "converted")


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.weights("llama"), change=lambda w: w.add_expert_count(8))
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        convert(path, tmp_path / "converted")


def test_a_part_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "m.gguf", "llama", tiny.weights("llama"), change=lambda w: w.add_uint16("split.count", 3)
    )
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        convert(path, tmp_path / "converted")


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.weights("llama"), pre="klingon")
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*llama-bpe"):
        convert(path, tmp_path / "converted")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "m.gguf",
        "qwen3",
        tiny.weights("qwen3"),
        change=lambda w: w.add_tensor("blk.0.odd.weight", np.zeros(4, np.float32)),
    )
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.odd\.weight"):
        convert(path, tmp_path / "converted")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny.weights("qwen3")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    path = tiny.write_gguf(tmp_path / "m.gguf", "qwen3", tensors)
    with pytest.raises(CorruptModelError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight"):
        convert(path, tmp_path / "converted")


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    tensors = tiny.weights("llama")
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tensors)
    seen: list[Progress] = []
    (tmp_path / "converted").mkdir()
    convert_gguf(path, tmp_path / "converted", seen.append)
    assert seen == [Progress("convert", count, len(tensors), "tensors") for count in range(1, len(tensors) + 1)]


def test_the_card_of_a_file_fits_its_conversion(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "qwen3", tiny.weights("qwen3"), gguf.GGMLQuantizationType.Q8_0)
    card = gguf_card("mine", path)
    with GgufFile(path) as file:
        planned = sum(target.stored_size for target in plan_tensors(file, read_config(file)))
    stored = load_file(convert(path, tmp_path / "converted") / "model.safetensors")
    assert card.storage_size == planned == sum(tensor.nbytes for tensor in stored.values())
    assert (card.n_layers, card.hidden_size, card.num_key_value_heads) == (tiny.LAYERS, tiny.HIDDEN, tiny.KEY_HEADS)
    assert card.supports_tensor
    assert card.context_length == 256
