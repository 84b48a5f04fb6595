"""The command itself, with the simulated engine only: real servers, seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .ending import ends_with_its_children

SERVE = [sys.executable, "-m", "tandem.cli", "bench", "serve", "--skip-mlx-lm"]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return kept | {"TANDEM_HOME": str(folder / "home"), "TMPDIR": str(folder), "COLUMNS": "200"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*SERVE, *arguments], env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )
    assert list(folder.glob("tandem-bench-*")) == [], "the scratch folder is gone"
    return done


def test_simulated_streams_as_json(tmp_path: Path) -> None:
    done = run(tmp_path, "--sim-streams=8", "--sim-tokens=40", "--sim-tps=400", "--sim-rounds=2", "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    sim = result["sim"]
    assert 0 < result["server_cpu_ms_per_token"] == sim["server_cpu_ms_per_token"]["median"]
    assert (sim["streams"], sim["tokens"]) == (8, 40)
    for name in ("server_cpu_ms_per_token", "runner_cpu_ms_per_token", "tokens_per_second", "events_per_token"):
        assert len(sim[name]["rounds"]) == 2, name
    # The simulated engine keeps its pace: no more comes out than it was told to make.
    assert 0 < sim["tokens_per_second"]["high"] <= sim["offered_tokens_per_second"] == 3200
    assert sim["events_per_token"]["high"] <= 1
    assert list(result["passed"]) == list(result["bounds"]) == ["server_cpu_ms_per_token"]
    assert result["throughput"] == []
    assert result["environment"]["versions"]["tandem"]


def test_simulated_streams_as_a_table(tmp_path: Path) -> None:
    # No server sends a token for a hundredth of a microsecond, and 1 stream of 2 tokens has all of a request's cost.
    done = run(tmp_path, "--sim-streams=1", "--sim-tokens=2", "--sim-tps=50", "--sim-rounds=1", "--check")
    assert "server CPU ms a token" in done.stdout
    assert "≤ 0.15" in done.stdout
    assert ("missed" in done.stdout) == (done.returncode == 1), done.stderr
    assert "load average" in done.stdout


@pytest.mark.parametrize("arguments", [["--streams=x"], ["--rounds=0"], ["--sim-tokens=1"]])
def test_wrong_plans(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_its_servers_end_with_it(tmp_path: Path, number: signal.Signals, status: int) -> None:
    arguments = ["--sim-streams=2", "--sim-tokens=100000", "--sim-tps=20", "--sim-rounds=1"]
    # A server and its runner.
    ends_with_its_children([*SERVE, *arguments], environment(tmp_path), number, status, least=2)
