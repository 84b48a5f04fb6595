from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_models import CHATML, byte_level_model

from tandem.errors import CorruptModelError, ModelError
from tandem.models.text import TextModel


def test_what_a_folder_says(tmp_path: Path) -> None:
    model = byte_level_model(tmp_path, tokens=["<think>", "</think>"], vocabulary_size=512)
    assert (model.vocabulary_size, model.token_count) == (512, 260)
    assert model.eos_ids == {model.token_id("<|im_end|>")}
    assert model.thinking is not None
    assert (model.thinking.start, model.thinking.end) == ("<think>", "</think>")
    assert model.capabilities == ("text", "chat", "tools", "thinking")
    # Reasoning markers are ordinary tokens: their text is shown where nobody looks for them.
    assert model.token_id("<think>") not in model.special_ids
    assert model.token_id("<|im_start|>") in model.special_ids


def test_generation_config_names_further_ends(tmp_path: Path) -> None:
    byte_level_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = TextModel.load(tmp_path)
    assert model.eos_ids == {7, 9, model.token_id("<|im_end|>")}


def test_configuration_of_a_multimodal_model(tmp_path: Path) -> None:
    byte_level_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 400, "eos_token_id": 3}}))
    model = TextModel.load(tmp_path)
    assert model.vocabulary_size == 400
    assert 3 in model.eos_ids


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    byte_level_model(tmp_path)
    (tmp_path / name).write_text("{broken")
    with pytest.raises(CorruptModelError, match="again"):
        TextModel.load(tmp_path)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CorruptModelError, match=str(tmp_path)):
        TextModel.load(tmp_path)


def test_code_from_a_repository_is_not_run(tmp_path: Path) -> None:
    byte_level_model(tmp_path)
    marker = tmp_path / "was_run"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    for name in ("tokenizer_config.json", "config.json"):
        config = json.loads((tmp_path / name).read_text())
        config |= {"auto_map": {"AutoTokenizer": ["code.Evil", "code.Evil"]}, "tokenizer_class": "Evil"}
        (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        TextModel.load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if enable_thinking is defined %}{% endif %}", True),
        ("{%- if thinking %}{% endif %}", True),
        ("{% if not thinking|default(true) %}{% endif %}", True),
        ("{% if message.thinking %}{% endif %}", False),
        ("{% if message['thinking'] %}{% endif %}", False),
        ("you are thinking", False),
    ],
)
def test_whether_reasoning_can_be_switched(tmp_path: Path, template: str, expected: bool) -> None:
    model = byte_level_model(tmp_path, tokens=["<think>", "</think>"], template=CHATML + template)
    assert ("thinking_toggle" in model.capabilities) is expected
