"""`tandem models`: tables for people, JSON for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from .conftest import Run

DEMO = "SmolLM2-135M-Instruct"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The smallest thing that is a model folder."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": numpy.zeros((16, 8), numpy.float32)}, folder / "model.safetensors")
    return folder


def listed(tandem: Run, *flags: str) -> dict[str, dict[str, object]]:
    return {model["id"]: model for model in json.loads(tandem("models", "list", "--json", *flags).stdout)["models"]}


def test_the_packaged_model_is_listed(tandem: Run) -> None:
    model = listed(tandem)[DEMO]
    assert model["source"] == "packaged"
    assert model["state"] == "converts at first use"
    assert "demo" in model["aliases"]  # type: ignore[operator]
    table = tandem("models", "list").stdout
    assert table.split()[:2] == ["MODEL", "SIZE"]
    assert DEMO in table


def test_known_models_are_listed_on_request(tandem: Run) -> None:
    everything = listed(tandem, "--all")
    assert listed(tandem).keys() <= everything.keys()
    assert all(model["state"] in ("not here", "ready", "converts at first use") for model in everything.values())


def test_show(tandem: Run) -> None:
    shown = json.loads(tandem("models", "show", "demo", "--json").stdout)
    assert shown["id"] == DEMO
    assert shown["card"]["n_layers"] == 30
    text = tandem("models", "show", "demo").stdout
    assert DEMO in text
    assert "8192 tokens" in text


def test_import_show_remove(tandem: Run, folder: Path, home: Path) -> None:
    imported = tandem("models", "import", str(folder), "--name", "mine", "--json")
    assert imported.returncode == 0, imported.stderr
    model = json.loads(imported.stdout)
    assert model["id"] == "mine"
    assert Path(model["path"]).is_relative_to(home)
    assert (Path(model["path"]) / "model.safetensors").is_file()
    assert listed(tandem)["mine"]["state"] == "ready"
    again = tandem("models", "import", str(folder), "--name", "mine")
    assert again.returncode == 1
    assert "already" in again.stderr
    removed = tandem("models", "rm", "mine", "--json")
    assert json.loads(removed.stdout)["freed_bytes"] > 0
    assert "mine" not in listed(tandem)
    assert not Path(model["path"]).exists()


def test_import_of_nothing(tandem: Run, tmp_path: Path) -> None:
    done = tandem("models", "import", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "nowhere" in done.stderr


def test_the_packaged_model_is_not_ours_to_remove(tandem: Run) -> None:
    done = tandem("models", "rm", "demo", "--yes")
    assert done.returncode == 1
    assert "pip uninstall" in done.stderr


def test_pull_explains_a_hub_that_cannot_be_reached(tandem: Run) -> None:
    done = tandem("models", "pull", "someone/something", HF_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "HF_ENDPOINT" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_pull_respects_offline_mode(tandem: Run) -> None:
    done = tandem("models", "pull", "someone/something", TANDEM_OFFLINE="1")
    assert done.returncode == 1
    assert "offline" in done.stderr
