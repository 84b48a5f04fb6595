"""A broken prefill side makes `tandem verify` fail, and say where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import tiny

from .conftest import Command
from .tampering import LAYER, TOKEN

QUICK = ("--quick", "--tokens", "4", "--seed", "3")


@pytest.mark.parametrize(
    ("kind", "fault", "divergence"),
    [
        ("llama", "last bit", {"case": "cold, 256 tokens", "layer": LAYER, "part": "values", "token": TOKEN}),
        ("llama", "not a number", {"case": "cold, 256 tokens", "layer": LAYER, "part": "values", "token": TOKEN}),
        ("deepseek_v32", "entry", {"case": "cold, 256 tokens", "layer": LAYER, "part": "values", "token": TOKEN}),
        ("llama", "shifted", {"case": "cold, 3 tokens", "layer": LAYER, "part": "keys", "token": 0}),
        ("llama", "other prompt", {"case": "cold, 256 tokens", "layer": 0, "part": "keys", "token": TOKEN}),
        ("mamba2", "state", {"case": "cold, 2 tokens", "layer": LAYER, "token": 1}),
    ],
)
def test_wrong_entries_are_found(
    tandem: Command,
    tampering: Callable[[Path, str], str],
    tiny_folder: Callable[[str], Path],
    kind: str,
    fault: str,
    divergence: dict[str, object],
) -> None:
    ran = tandem("verify", str(tiny_folder(kind)), "--peer", tampering(tiny_folder(kind), fault), *QUICK, "--json")
    assert ran.status == 1
    report = ran.report
    assert report["passed"] is False
    first = report["first_divergence"]
    assert first["where"] == "cache"
    assert {name: first[name] for name in divergence} == divergence
    failed = [case for case in report["cases"] if not case["passed"]]
    assert failed[0]["name"] == first["case"]
    assert all(case["reason"] for case in failed)


def test_a_wrong_entry_is_found_in_warm_cases(
    tandem: Command, tampering: Callable[[Path, str], str], tiny_folder: Callable[[str], Path]
) -> None:
    """Where chunks differ, rounding is allowed for; half a unit in one entry is none."""
    folder = tiny_folder("llama")
    ran = tandem("verify", str(folder), "--peer", tampering(folder, "entry"), *QUICK, "--json")
    cases = {case["name"]: case for case in ran.report["cases"]}
    warm = cases["warm server 293"]
    assert not warm["exact"]
    assert not warm["passed"]
    assert warm["first_divergence"] | {"layer": LAYER, "part": "values", "token": TOKEN} == warm["first_divergence"]
    # The wrong token is one that this client holds itself.
    assert cases["warm client 293"]["passed"]


def test_people_are_told_where(
    tandem: Command, tampering: Callable[[Path, str], str], tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder("llama")
    ran = tandem("verify", str(folder), "--peer", tampering(folder, "entry"), "--length", "100", "--quick")
    assert ran.status == 1
    assert f"First: cold, 100 tokens, layer {LAYER}, values, token {TOKEN}." in ran.out
    assert "PASSED" not in ran.out


def test_an_honest_peer_passes(
    tandem: Command, tampering: Callable[[Path, str], str], tiny_folder: Callable[[str], Path]
) -> None:
    """The same server without a fault: what the tests above find is the fault. A second time it remembers."""
    folder = tiny_folder("llama")
    peer = tampering(folder, "none")
    ran = tandem("verify", str(folder), "--peer", peer, *QUICK, "--json")
    assert ran.status == 0
    assert ran.report["passed"] is True
    assert ran.report["first_divergence"] is None
    again = tandem("verify", str(folder), "--peer", peer, *QUICK, "--json")
    assert again.status == 0
    cold = next(case for case in again.report["cases"] if case["name"] == "cold, 256 tokens")
    assert cold["handoff"]["cached"] == 255
    assert not cold["exact"]
    assert "knew 255 tokens" in cold["reason"]


def test_other_chunks_are_noticed(
    tandem: Command, tampering: Callable[[Path, str], str], tiny_folder: Callable[[str], Path]
) -> None:
    """The peer cuts at 256, 512 and 768. Who expects other places is told, and no bit is demanded to be equal."""
    folder = tiny_folder("llama")
    peer = tampering(folder, "none")
    ran = tandem("verify", str(folder), "--peer", peer, "--chunk", "192", "--length", "1000", "--quick", "--json")
    case = ran.report["cases"][0]
    assert case["passed"]
    assert not case["exact"]
    assert "--chunk" in case["reason"]


def test_rounding_where_bits_should_be_equal(
    tandem: Command, tampering: Callable[[Path, str], str], tiny_folder: Callable[[str], Path]
) -> None:
    """It fails, says what that may come from, and passes with a tolerance."""
    folder = tiny_folder("llama")
    peer = tampering(folder, "last bit")
    arguments = ("verify", str(folder), "--peer", peer, "--length", "100", "--quick", "--json")
    ran = tandem(*arguments)
    assert ran.status == 1
    assert "--tolerance" in ran.report["cases"][0]["reason"]
    ran = tandem(*arguments, "--tolerance", "0.001")
    assert ran.status == 0
    assert not ran.report["cases"][0]["layers"][LAYER]["bit_equal"]


def test_another_model_is_refused_by_name(
    tandem: Command, tampering: Callable[[Path, str], str], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tiny.build("llama", tmp_path / "other", seed=7)
    ran = tandem("verify", str(tiny_folder("llama")), "--peer", tampering(other, "none"), "--json")
    assert ran.status == 1
    assert ran.out == ""
    assert "weights" in ran.err
    deeper = tiny.build("llama", tmp_path / "deeper", num_hidden_layers=4)
    ran = tandem("verify", str(tiny_folder("llama")), "--peer", tampering(deeper, "none"))
    assert ran.status == 1
    assert "layers: 3 here, 4 there" in ran.err


def test_a_peer_that_goes_away(tandem: Command, tiny_folder: Callable[[str], Path]) -> None:
    ran = tandem("verify", str(tiny_folder("llama")), "--peer", "127.0.0.1:9")
    assert ran.status == 1
    assert "127.0.0.1:9 cannot be reached" in ran.err
