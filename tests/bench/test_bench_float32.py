"""mlx-lm's copy of a model: the numbers that Tandem computes with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.float32_copy import copy_as_float32, is_float32
from tandem.engines.mlx import blas

blas.load()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.utils import load_model, quantize_model, save_config, save_model  # noqa: E402

from tandem.engines.base import EngineOptions  # noqa: E402
from tandem.engines.mlx.load import load  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}


def model_folder(path: Path, dtype: mx.Dtype, quantised: bool = False) -> Path:
    """A random llama."""
    mx.random.seed(7)
    model: nn.Module = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(dtype)
    config = dict(CONFIG)
    if quantised:
        model, config = quantize_model(model, config, 32, 4)
    path.mkdir()
    save_model(path, model)
    save_config(config, path / "config.json")
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@pytest.mark.parametrize(
    ("dtype", "quantised", "expected"),
    [(mx.float32, False, True), (mx.bfloat16, False, False), (mx.float16, False, False), (mx.float32, True, False)],
)
def test_what_needs_a_copy(tmp_path: Path, dtype: mx.Dtype, quantised: bool, expected: bool) -> None:
    assert is_float32(model_folder(tmp_path / "model", dtype, quantised)) is expected


@pytest.mark.skipif(sys.platform != "linux", reason="the copy is for CPUs, where Tandem computes in float32")
@pytest.mark.parametrize("quantised", [False, True])
def test_the_copy_has_the_weights_that_tandem_computes_with(tmp_path: Path, quantised: bool) -> None:
    source = model_folder(tmp_path / "model", mx.bfloat16, quantised)
    target = tmp_path / "copy"
    copy_as_float32(source, target)
    assert is_float32(target)
    assert (target / "tokenizer_config.json").read_text() == '{"model_max_length": 64}'
    assert (target / "chat_template.jinja").exists()
    assert "quantization" not in json.loads((target / "config.json").read_text())
    copy, _ = load_model(target)
    options = EngineOptions(engine="mlx", model_id="tiny", path=str(source), dtype="float32")
    ours = dict(tree_flatten(load(options, lambda progress: None).model.parameters()))
    theirs = dict(tree_flatten(copy.parameters()))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert array.dtype == mx.float32
        assert mx.array_equal(array, ours[name]), name
