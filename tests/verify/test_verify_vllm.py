"""`tandem verify --engine vllm`: prompts that vLLM processes, and MLX answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import tiny

from .conftest import Command

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    # mlx-lm rounds the scale of Gemma's embeddings to bfloat16: the root of 64 is what it is.
    "gemma3": {"hidden_size": 64},
    "mamba2": {},
}


KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gemma3", "mamba2"))]


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_every_kind(tandem: Command, tmp_path: Path, kind: str) -> None:
    folder = tiny.build_for_vllm(kind, tmp_path / kind, **CHANGES[kind])
    done = tandem("verify", str(folder), "--engine=vllm", "--quick", "--tokens=8", "--json")
    report = json.loads(done.out)
    assert done.status == 0, report["first_divergence"]
    assert report["passed"] is True
    assert report["first_divergence"] is None
    assert report["peer"] == "a runner of its own (vllm)"
    assert not any(case["exact"] for case in report["cases"])
    assert sum(case["handoff"]["bytes"] for case in report["cases"]) > 0


@pytest.mark.real_model
@pytest.mark.long
def test_the_packaged_model(tandem: Command) -> None:
    done = tandem("verify", "demo", "--engine=vllm", "--quick", "--tokens=8", "--json")
    report = json.loads(done.out)
    assert done.status == 0, report["first_divergence"]
    assert report["passed"] is True
    assert len(report["cases"]) >= 8
