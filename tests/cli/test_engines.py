"""`tandem engines`, and `--engine` of other commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tandem.engines.installed import COMPLETE, environment_of

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
