"""`tandem bench cluster` from end to end with a handful of nodes: real nodes, a real kill, seconds. No bound of time is
judged: a busy machine makes any number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.bench.cluster.plan import BOUNDS, ClusterPlan
from tandem.errors import ConfigError

SMALL = [
    "--nodes=5",
    "--per-process=2",
    "--killed=1",
    "--killed-idle=1",
    "--instances=2",
    "--idle-seconds=1",
    "--traffic-seconds=1",
    "--kill-seconds=3",
]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    added = {"TANDEM_HOME": str(folder / "home"), "TMPDIR": str(folder), "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "bench", "cluster", *arguments],
        env=kept | added,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert list(folder.glob("tandem-bench-*")) == [], "the scratch folder is gone"
    return done


def left_over(folder: Path) -> list[list[str]]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(str(folder) in part for part in command):
            found.append(command)
    return found


@pytest.mark.slow
def test_five_nodes_as_json(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result["bounds"]) == set(result["passed"]) == set(BOUNDS)
    for name, passed in result["passed"].items():
        bound = result["bounds"][name]
        met = result[name] >= bound["value"] if bound["kind"] == "at_least" else result[name] <= bound["value"]
        assert passed is met
    for name in ("form_seconds", "kill_noticed_seconds", "placement_ms", "requests_per_second", "form_seconds_3"):
        assert result[name] > 0, name
    assert result["idle_cpu_percent"] >= 0
    assert set(result["small"]) == {"tcp", "quic"}

    assert result["large"]["nodes"] == 5
    assert result["placing"]["nodes"] == 4, "one was killed before"
    assert result["placing"]["previews"] > 0
    traffic = result["traffic"]
    assert traffic["answered"] > 0
    assert traffic["tokens"] == traffic["answered"] * result["plan"]["tokens"]
    assert result["request_errors"] == 0, traffic["errors"]

    kill = result["kill"]
    assert (kill["nodes"], kill["instances"], kill["of_instances"]) == (1, 1, 2)
    assert kill["traffic"]["answered"] > 0
    assert kill["answered_after"] > 0
    assert result["never_ended"] == 0
    assert result["errors_before_a_token"] == 0, kill["traffic"]["errors"]
    assert "secret" not in result["plan"]
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--nodes=5"], ["--streams=0"], ["--nodes=20", "--instances=30"]])
def test_wrong_plans(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_of_a_plan() -> None:
    assert ClusterPlan().processes == [1] * 12 + [5] * 7 + [3]
    small = ClusterPlan(nodes=4, killed=1, killed_idle=1, instances=3, per_process=5)
    small.check()
    assert small.processes == [1, 1, 2]
    assert small.killed_instances == 1
    with pytest.raises(ConfigError, match="too few"):
        ClusterPlan(nodes=12).check()
