"""Our conversions against what llama.cpp and transformers make of the same file (see scripts/make_golden_gguf.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gemma3 import gemma3_gguf
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from tandem.models.gguf.convert import convert_gguf
from tandem.models.store import LocalModel

pytestmark = pytest.mark.real_model

GOLDEN = Path(__file__).parent / "golden"
TEXTS: list[str] = json.loads((GOLDEN / "texts.json").read_text())


def golden(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return value


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A converted folder and its golden values."""
    if request.param == "smollm2":
        model: LocalModel = request.getfixturevalue("smollm2")
        return model.path, golden("smollm2")
    path = gemma3_gguf()
    folder = tmp_path_factory.mktemp("gemma3")
    convert_gguf(path, folder)
    return folder, golden("gemma3-270m")


def test_token_ids_are_those_of_llama_cpp(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = converted
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert len(TEXTS) >= 60
    assert dict(zip(TEXTS, ids, strict=True)) == dict(zip(TEXTS, expected["ids"], strict=True))


def test_special_tokens_are_added_as_transformers_does(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = converted
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Hello").ids == expected["special_tokens_added"]


def test_decoding_gives_the_text_back(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = converted
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, ids in zip(TEXTS, expected["ids"], strict=True):
        if "\u2581" in text and "gemma" in expected["file"]:
            continue  # SentencePiece writes a space as this character, so it cannot be told from one
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_mlx_lm_loads_the_tokenizer_with_the_same_ids(converted: tuple[Path, dict[str, Any]]) -> None:
    from mlx_lm.utils import load_tokenizer

    folder, expected = converted
    tokenizer = load_tokenizer(folder)
    for text, ids in zip(TEXTS, expected["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode("Hello") == expected["special_tokens_added"]


def test_weights_are_those_of_transformers(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = converted
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert set(expected["weights"]) - set(weights) <= {"lm_head.weight"}  # tied: written once
    assert set(weights) <= set(expected["weights"])
    for name, weight in weights.items():
        values = np.array(weight.astype(mx.float32))
        reference = expected["weights"][name]
        assert list(values.shape) == reference["shape"], name
        flat = values.ravel()
        positions = [position for position, _ in reference["samples"]]
        samples = np.array([value for _, value in reference["samples"]], dtype=np.float32)
        # Both compute in float32, in another order of operations.
        np.testing.assert_allclose(flat[positions], samples, rtol=1e-6, atol=1e-7, err_msg=name)
        norm = float(np.linalg.norm(flat.astype(np.float64)))
        assert norm == pytest.approx(reference["norm"], rel=1e-6), name


def test_logits_and_greedy_tokens_are_those_of_transformers(converted: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = converted
    model, config = load_model(folder)
    model.set_dtype(mx.float32)
    for case in expected["prompts"]:
        ids, greedy = case["prompt_ids"], case["greedy"]
        tokens = mx.array([ids + greedy[:-1]])
        if config["model_type"] == "gemma3_text":
            # mlx-lm rounds Gemma's embedding scale to bfloat16, transformers does not; the reference is the exact one.
            exact = config["hidden_size"] ** 0.5
            rounded = mx.array(exact, mx.bfloat16).item()
            embedded = model.model.embed_tokens(tokens) * (exact / rounded)
            logits = np.array(model(tokens, input_embeddings=embedded)[0, len(ids) - 1 :])
        else:
            logits = np.array(model(tokens)[0, len(ids) - 1 :])
        for token, value in case["logits"]:
            assert logits[0, token] == pytest.approx(value, abs=1e-3), case["prompt"]
        assert logits.argmax(axis=-1).tolist() == greedy, case["prompt"]
