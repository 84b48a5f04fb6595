"""`tandem bench pd` from end to end: real nodes with the simulated engine, whose speeds are set; once a real model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tandem.bench.pd.sides import call
from tandem.bench.processes import HOST
from tandem.bench.servers import tandem_server
from tandem.models.packaged import packaged_gguf

from .ending import ends_with_its_children

COMMAND = [sys.executable, "-m", "tandem.cli", "bench", "pd"]
FAST, SLOW = 4000, 1000
"""Prompt tokens per second."""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return kept | {"TANDEM_HOME": str(folder / "home"), "TMPDIR": str(folder), "COLUMNS": "200"}


def run(folder: Path, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert list(folder.glob("tandem-bench-*")) == [], "the scratch folder is gone"
    return done


def speeds(prefill: int, decode: int) -> list[str]:
    return [f"--prefill=sim:prefill_tps={prefill}", f"--decode=sim:prefill_tps={decode},decode_tps=200"]


def test_a_faster_prefill_side_as_json(tmp_path: Path) -> None:
    picture = tmp_path / "ttft.svg"
    lengths = ["--prompt-tokens=600,1200", "--output-tokens=4,40", "--rounds=2", "--seed=5"]
    done = run(tmp_path, *speeds(FAST, SLOW), *lengths, "--json", "--check", f"--plot={picture}")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    rows = result["cases"]
    assert [(row["prompt_tokens"], row["output_tokens"]) for row in rows] == [
        (600, 4),
        (600, 40),
        (1200, 4),
        (1200, 40),
    ]
    for row in rows:
        assert (row["prefill"], row["codec"], row["not_compared"]) == ("remote", "raw", [])
        assert row["texts_equal"] is True
        assert row["remote_tokens"] == 2 * (row["prompt_tokens"] - 1)
        assert [one["local_tokens"] for one in row["handoffs"]] == [1, 1]
        # Four layers of two heads, keys and values of 64 float32 numbers.
        assert row["bytes"]["median"] == (row["prompt_tokens"] - 1) * 4 * 2 * 2 * 64 * 4
        # The simulated device is busy for exactly as long as it is told to be; what comes on top is the machine's.
        alone, together = row["decode_alone"]["ttft_seconds"], row["disaggregated"]["ttft_seconds"]
        assert alone["low"] >= row["prompt_tokens"] / SLOW
        assert together["low"] >= (row["prompt_tokens"] - 1) / FAST
        assert row["prefill_alone"]["ttft_seconds"]["low"] >= row["prompt_tokens"] / FAST
        assert row["ttft_speedup_vs_decode_alone"]["rounds"] == pytest.approx(
            [upper / lower for upper, lower in zip(alone["rounds"], together["rounds"], strict=True)]
        )
        writing = (row["output_tokens"] - 1) / 200
        assert row["disaggregated"]["total_seconds"]["low"] >= (row["prompt_tokens"] - 1) / FAST + writing
        assert row["decode_alone"]["total_seconds"]["low"] >= row["prompt_tokens"] / SLOW + writing
    # Four times as fast, less what a hand-off costs on a machine that others use.
    assert 1.2 < result["ttft_speedup_vs_decode_alone"] < 4.1
    assert result["ttft_speedup_vs_prefill_alone"] < 1.5
    assert result["remote_token_share"] == pytest.approx((599 + 1199) / 1800)
    assert result["bounds"] == {"remote_token_share": {"kind": "at_least", "value": 0.99}}
    assert result["passed"] == {"remote_token_share": True}
    assert result["plan"]["seed"] == 5
    assert result["environment"]["cores"] == os.cpu_count()
    assert len(ElementTree.parse(picture).getroot().findall(".//{*}circle")) == 4 * 3 * 2


def test_a_prompt_that_stayed_at_home_is_no_speedup(tmp_path: Path) -> None:
    """The prefill side is the slower one, so the decision rule says no, and the bench says why."""
    done = run(tmp_path, *speeds(SLOW, FAST), "--prompt-tokens=600", "--output-tokens=4", "--rounds=1", "--check")
    assert done.returncode == 1, done.stderr
    assert "no speedup of 600 + 4: disaggregated: the prompt was read local. This node is predicted" in done.stdout
    assert "not compared" in done.stdout
    assert "missed" in done.stdout
    assert "0.0%" in done.stdout


async def _beside_running_nodes(folder: Path) -> dict[str, Any]:
    # Both have a prefix cache, which the bench must not profit by.
    profile = "decode_tps=200,prefix_hits=true"
    reader = tandem_server(
        f"sim:prefill_tps={FAST},{profile}", folder, name="reader", environment={"TANDEM_KV_PORT": "0"}
    )
    writer = tandem_server(
        f"sim:prefill_tps={SLOW},{profile}", folder, name="writer", environment={"TANDEM_KV_PORT": "-1"}
    )
    async with reader.process, writer.process:
        (instance,) = (await call(HOST, writer.process.port, "GET", "/health"))["instances"]
        path = f"/instance/{instance['instance_id']}/prefill_peers"
        await call(HOST, writer.process.port, "PUT", path, {"prefill_peers": ["127.0.0.1:9"]})
        file = folder / "pd.toml"
        file.write_text(
            f'[prefill]\nengine = "sim"\naddress = "{HOST}:{reader.process.port}"\n'
            f'[decode]\nengine = "sim"\naddress = "{HOST}:{writer.process.port}"\n'
            "[[cases]]\npp = 600\ntg = 4\n",
            encoding="utf-8",
        )
        done = await asyncio.to_thread(run, folder, f"--config={file}", "--rounds=2", "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        after = await call(HOST, writer.process.port, "GET", path)
        assert after == {"prefill_peers": ["127.0.0.1:9"]}, "as it was"
        assert await asyncio.to_thread(_complaint, folder, file, reader.process.port, writer.process.port)
    return result


def _complaint(folder: Path, file: Path, reader: int, writer: int) -> bool:
    """A prefill node without a KV port is refused with what to do."""
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(str(reader), str(writer)), encoding="utf-8")
    done = run(folder, f"--config={file}", "--json")
    return done.returncode == 1 and "opens no KV port" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_running_nodes(tmp_path: Path) -> None:
    result = asyncio.run(_beside_running_nodes(tmp_path))
    (row,) = result["cases"]
    assert (row["prefill"], row["texts_equal"], row["not_compared"]) == ("remote", True, [])
    # Nothing came from a cache.
    assert row["decode_alone"]["ttft_seconds"]["low"] >= 600 / SLOW
    assert row["disaggregated"]["ttft_seconds"]["low"] >= 599 / FAST
    assert row["prefill_alone"]["ttft_seconds"]["low"] >= 600 / FAST


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long), (signal.SIGINT, 130)]
)
def test_its_nodes_end_with_it(tmp_path: Path, number: signal.Signals, status: int) -> None:
    command = [*COMMAND, *speeds(100, 100), "--prompt-tokens=4000", "--warm-up=0"]
    # Two nodes with a runner each.
    ends_with_its_children(command, environment(tmp_path), number, status, least=4)


@pytest.mark.parametrize("arguments", [["--prefill=llama"], ["--rounds=0"], ["--prompt-tokens=x"], ["--config=none"]])
def test_wrong_plans(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("reader", ["mlx", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_real_model(tmp_path: Path, reader: str) -> None:
    """Which arrangement is sooner is this machine's business; that all texts are equal is ours."""
    if packaged_gguf() is None:
        pytest.skip("the packaged model is not installed")
    # Before the first round the peer is untried, so it is asked for sure.
    arguments = [f"--prefill={reader}", "--prompt-tokens=300", "--output-tokens=8", "--rounds=1", "--warm-up=0"]
    done = run(tmp_path, *arguments, "--json", timeout=580)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    (row,) = result["cases"]
    assert row["texts_equal"] is True
    assert (row["prefill"], row["remote_tokens"]) == ("remote", 299)
    assert row["bytes"]["median"] == 299 * 30 * 2 * 3 * 64 * 4
    assert result["ttft_speedup_vs_decode_alone"] > 0
    assert result["passed"] == {"remote_token_share": True}
    assert (result["plan"]["prefill"]["engine"], result["plan"]["decode"]["engine"]) == (reader, "mlx")
