"""The command with a prefill runner of its own, its options, and `tandem kv inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import tiny

from tandem.cluster.bus.secret import keep_secret, new_secret
from tandem.verify.side import Address

from .conftest import Command

SECRET = "a secret that only this test knows"
QUICK = ("--quick", "--tokens", "4")


def test_its_own_runner(
    tandem: Command, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In another process, under a cluster secret; it is gone afterwards. Own prompts come first."""
    monkeypatch.setenv("TANDEM_CLUSTER_SECRET", SECRET)
    file = tmp_path / "prompt.txt"
    file.write_text("And this is one from a file.", encoding="utf-8")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    arguments = ("--prompt", "Why is the sky blue?", "--prompt-file", str(file), "--length", "50")
    ran = tandem("verify", str(tiny_folder("gemma3")), *QUICK, *arguments, "--json")
    assert ran.status == 0, ran.err
    report = ran.report
    names = [case["name"] for case in report["cases"]]
    assert names[0].startswith("your prompt 1, ")
    assert names[1].startswith("your prompt 2, ")
    assert names[2] == "cold, 50 tokens"
    assert report["cases"][2]["handoff"]["bytes"] > 0
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_for_people(tandem: Command, tiny_folder: Callable[[str], Path]) -> None:
    ran = tandem("verify", str(tiny_folder("llama")), *QUICK)
    assert ran.status == 0, ran.err
    assert "PASSED: 9 cases" in ran.out
    assert "warm server 293" in ran.out
    assert "comparing llama" in ran.err


def test_a_quantised_cache(tandem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed entries, scales and biases travel as they are; rounding moves an entry by a step at most."""
    monkeypatch.setenv("TANDEM_KV_BITS", "8")
    folder = tiny.build("llama", tmp_path / "wide", head_dim=64)
    ran = tandem("verify", str(folder), *QUICK, "--length", "300", "--json")
    assert ran.status == 0, ran.err
    cold, *warm = ran.report["cases"]
    assert cold["exact"]
    assert [part["part"] for part in cold["layers"][0]["parts"]][:3] == ["keys.packed", "keys.scales", "keys.biases"]
    packed = [part for case in warm for layer in case["layers"] for part in layer["parts"] if "packed" in part["part"]]
    assert all(part["max_abs"] <= 1 for part in packed)


def test_a_machine_that_joined_a_cluster(
    tandem: Command,
    tiny_folder: Callable[[str], Path],
    start_runner: Callable[..., Address],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The secret is in the data folder, where `tandem cluster join` left it, or typed in another way."""
    folder, words = tiny_folder("llama"), new_secret()
    host, port = start_runner(folder, cluster_secret=words)
    arguments = ("verify", str(folder), "--peer", f"{host}:{port}", *QUICK, "--length", "65")
    keep_secret(tmp_path / "home", words)
    monkeypatch.delenv("TANDEM_CLUSTER_SECRET", raising=False)
    ran = tandem(*arguments)
    assert ran.status == 0, ran.err
    own = tandem("verify", str(folder), *QUICK, "--length", "65")
    assert own.status == 0, own.err
    keep_secret(tmp_path / "home", SECRET)
    assert tandem(*arguments).status == 1
    monkeypatch.setenv("TANDEM_CLUSTER_SECRET", words.upper().replace(" ", "-"))
    assert tandem(*arguments).status == 0


def test_an_open_cluster(tandem: Command, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a secret only --open lets anybody speak to another machine. This one is nobody's (RFC 5737)."""
    arguments = ("verify", str(tiny_folder("llama")), "--peer", "192.0.2.1:9", *QUICK, "--length", "65")
    refused = tandem(*arguments)
    assert refused.status == 1
    assert "secret" in refused.err
    monkeypatch.setenv("TANDEM_CLUSTER_OPEN", "true")
    tried = tandem(*arguments)
    assert tried.status == 1
    assert "192.0.2.1:9 cannot be reached" in tried.err


def test_a_node_with_another_secret(
    tandem: Command,
    tiny_folder: Callable[[str], Path],
    start_runner: Callable[..., Address],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_folder("llama")
    host, port = start_runner(folder, cluster_secret=SECRET)
    arguments = ("verify", str(folder), "--peer", f"{host}:{port}", *QUICK, "--length", "65", "--json")
    monkeypatch.setenv("TANDEM_CLUSTER_SECRET", SECRET)
    assert tandem(*arguments).status == 0
    monkeypatch.setenv("TANDEM_CLUSTER_SECRET", SECRET[::-1])
    refused = tandem(*arguments)
    assert refused.status == 1
    assert refused.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--peer", "nowhere"), "HOST:PORT"),
        (("--length", "100000"), "do not fit the context"),
        (("--prompt", ""), "empty prompt"),
    ],
)
def test_wrong_wishes(
    tandem: Command, tiny_folder: Callable[[str], Path], arguments: tuple[str, ...], message: str
) -> None:
    ran = tandem("verify", str(tiny_folder("llama")), *arguments)
    assert ran.status == 1
    assert message in ran.err
    assert ran.out == ""


def test_a_simulated_model_has_no_cache(tandem: Command) -> None:
    for arguments in (("verify", "sim"), ("kv", "inspect", "sim")):
        ran = tandem(*arguments)
        assert ran.status == 1
        assert "no cache" in ran.err


# ------------------------------------------------------------------------------------------------------------ inspect


def inspected(tandem: Command, folder: Path) -> dict[str, Any]:
    ran = tandem("kv", "inspect", str(folder), "--json")
    assert ran.status == 0, ran.err
    value: dict[str, Any] = json.loads(ran.out)
    return value


def test_inspect_windows(tandem: Command, tiny_folder: Callable[[str], Path]) -> None:
    shown = inspected(tandem, tiny_folder("gemma3"))
    row = 2 * 2 * 16 * 4  # keys and values, heads, numbers, bytes
    assert [(group["kind"], group["layers"], group.get("window")) for group in shown["groups"]] == [
        ("window", [0, 2], 24),
        ("tokens", [1, 3], None),
    ]
    assert shown["bytes_per_token"] == 2 * row
    assert shown["window_bytes"] == 2 * 24 * row
    assert [volume["bytes"] for volume in shown["volumes"]] == [
        2 * row * tokens + 2 * 24 * row for tokens in (1024, 8192, 32768)
    ]
    first = shown["volumes"][0]
    assert first["seconds"]["1 GbE"] == pytest.approx(first["bytes"] / shown["links"]["1 GbE"])


def test_inspect_states(tandem: Command, tiny_folder: Callable[[str], Path]) -> None:
    shown = inspected(tandem, tiny_folder("qwen3_next"))
    state, tokens = shown["groups"]
    assert (state["kind"], state["layers"]) == ("state", [0, 2])
    assert [one["shape"] for one in state["states"]] == [[1, 3, 192], [1, 4, 16, 32]]
    assert shown["state_bytes"] == 2 * 4 * (3 * 192 + 4 * 16 * 32)
    assert (tokens["kind"], tokens["layers"]) == ("tokens", [1, 3])


def test_inspect_for_people(
    tandem: Command, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("gemma3")
    ran = tandem("kv", "inspect", str(folder))
    assert ran.status == 0
    assert "window of 24" in ran.out
    assert "2x16 float32" in ran.out
    assert inspected(tandem, folder)["fingerprint"] in ran.out
