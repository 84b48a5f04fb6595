"""`tandem verify` on real models, with a prefill runner of its own in another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gemma3 import gemma3_gguf

from tandem.models.packaged import INSTALL_HINT, packaged_gguf

from .conftest import Command

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


def check(report: dict[str, Any]) -> None:
    """Everything passed, without a tie, and what can be exact is."""
    assert report["passed"] is True
    assert report["first_divergence"] is None
    for case in report["cases"]:
        assert case["passed"]
        assert case["tokens"]["equal"], case["name"]
        if case["name"].startswith("cold"):
            assert case["exact"]
            assert case["logits"]["bit_equal"]
            assert all(layer["bit_equal"] for layer in case["layers"])


@pytest.fixture(scope="module")
def gemma3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M, converted."""
    from tandem.models.gguf.convert import convert_gguf

    path = gemma3_gguf()
    folder = tmp_path_factory.mktemp("models") / "gemma-3-270m"
    folder.mkdir()
    convert_gguf(path, folder)
    return folder


def test_smollm2(tandem: Command, smollm2_folder: Path) -> None:
    lengths = [part for length in (2, 66, 258) for part in ("--length", str(length))]
    ran = tandem("verify", str(smollm2_folder), "--quick", "--chunk", "64", "--tokens", "6", "--json", *lengths)
    assert ran.status == 0, ran.err
    check(ran.report)


@pytest.mark.skipif(
    "TANDEM_TEST_LONG" not in os.environ, reason="takes minutes on two cores: set TANDEM_TEST_LONG=1, or verify by hand"
)
def test_gemma3_around_its_window(tandem: Command, gemma3_folder: Path) -> None:
    """A prompt just beyond the window of 512, and longer ones whose beginning is known on either side."""
    options = ("--quick", "--chunk", "64", "--tokens", "4", "--length", "514")
    ran = tandem("verify", str(gemma3_folder), *options, "--json")
    assert ran.status == 0, ran.err
    report = ran.report
    check(report)
    cases = {case["name"]: case for case in report["cases"]}
    assert {layer["kind"] for layer in cases["cold, 514 tokens"]["layers"]} == {"window", "tokens"}
    # A client that knows the beginning, and a prompt that goes round the window after it.
    warm = cases["warm client 101"]
    assert warm["prompt_tokens"] > 512 > warm["start"] == 101


@pytest.fixture(scope="module")
def smollm2_folder() -> Path:
    """The packaged model, converted."""
    from tandem.config import settings
    from tandem.models.store import ModelStore

    if packaged_gguf() is None:
        pytest.skip(f"the packaged model is not installed: {INSTALL_HINT}")
    return ModelStore(settings()).obtain("demo").path
