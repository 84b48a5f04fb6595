"""Fingerprints: equal where they must be, different where anything that matters differs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf as tiny

from tandem.errors import CorruptModelError
from tandem.models.fingerprint import config_fingerprint, layout_fields, tokenizer_hash
from tandem.models.gguf.convert import convert_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tiny.write_gguf(tmp_path / "m.gguf", "gemma3", tiny.weights("gemma3"))
    converted = tmp_path / "converted"
    converted.mkdir()
    convert_gguf(path, converted)
    return converted


def rewrite(folder: Path, name: str, change: Any) -> None:
    value = json.loads((folder / name).read_text())
    changed = change(copy.deepcopy(value))
    (folder / name).write_text(json.dumps(changed, indent=7, sort_keys=True))


def test_formatting_and_the_decoder_do_not_matter(folder: Path) -> None:
    before = tokenizer_hash(folder)
    assert len(before) == 64
    rewrite(folder, "tokenizer.json", lambda value: value | {"decoder": None, "padding": None, "truncation": None})
    assert tokenizer_hash(folder) == before


def with_vocabulary_swapped(value: dict[str, Any]) -> dict[str, Any]:
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return value


def with_merge_dropped(value: dict[str, Any]) -> dict[str, Any]:
    value["model"]["merges"].pop()
    return value


@pytest.mark.parametrize(
    "change",
    [
        with_vocabulary_swapped,
        with_merge_dropped,
        lambda value: value | {"normalizer": {"type": "NFC"}},
        lambda value: value | {"pre_tokenizer": None},
        lambda value: value | {"added_tokens": value["added_tokens"][1:]},
    ],
)
def test_whatever_changes_token_ids_changes_the_hash(folder: Path, change: Any) -> None:
    before = tokenizer_hash(folder)
    rewrite(folder, "tokenizer.json", change)
    assert tokenizer_hash(folder) != before


def test_other_tokenizer_files_are_hashed_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"one")
    one = tokenizer_hash(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"two")
    assert tokenizer_hash(tmp_path) != one


def test_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="no tokenizer"):
        tokenizer_hash(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 4),
        ("num_key_value_heads", 1),
        ("head_dim", 8),
        ("rope_theta", 1e6),
        ("sliding_window", 16),
        ("model_type", "llama"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_what_shapes_the_cache_changes_the_fingerprint(folder: Path, key: str, value: Any) -> None:
    before, fields = config_fingerprint(folder), layout_fields(folder)
    rewrite(folder, "config.json", lambda config: config | {key: value})
    assert config_fingerprint(folder) != before
    assert {name for name in fields | layout_fields(folder) if fields.get(name) != layout_fields(folder).get(name)} == {
        key
    }


def test_quantisation_and_formatting_do_not_change_it(folder: Path) -> None:
    before = config_fingerprint(folder)
    rewrite(folder, "config.json", lambda config: config | {"dtype": "bfloat16", "quantization": {"bits": 4}})
    assert config_fingerprint(folder) == before


FLAT = {"model_type": "x", "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 64, "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FLAT, {"model_type": "x", "text_config": FLAT}),
        (FLAT, {**FLAT, "rope_theta": None, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}),
        (FLAT, {**FLAT, "head_dim": 16, "num_key_value_heads": 4, "rope_scaling": None}),
        (FLAT, {**FLAT, "rope_scaling": {"type": "default"}, "sliding_window": 4096, "use_sliding_window": False}),
        (FLAT, {**FLAT, "sliding_window": 4096, "layer_types": ["full_attention"] * 6}),
        (
            {**FLAT, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {**FLAT, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {**FLAT, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3, "sliding_window": 8},
            {
                **FLAT,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
            },
        ),
    ],
    ids=["nested", "rope", "defaults", "unused", "full", "scaling", "gemma"],
)
def test_configs_that_say_the_same_in_other_words_are_equal(tmp_path: Path, one: Any, other: Any) -> None:
    hashes = set()
    for name, config in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        hashes.add(config_fingerprint(tmp_path / name))
    assert len(hashes) == 1, (layout_fields(tmp_path / "one"), layout_fields(tmp_path / "other"))
