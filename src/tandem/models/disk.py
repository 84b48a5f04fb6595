"""Whether something fits on a disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from tandem.errors import NoSpaceError

RESERVE = 256 << 20
"""Bytes that a download leaves free on the disk."""


def check_disk_space(folder: Path, needed: int, what: str, reserve: int = RESERVE) -> None:
    """Raises:
    NoSpaceError: `needed` bytes would leave less than `reserve` on `folder`'s disk.
    """
    free = shutil.disk_usage(folder).free
    if needed + reserve > free:
        raise NoSpaceError(
            f"{what} needs {needed / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free. Free some "
            "space, or set TANDEM_HOME to a folder on a larger disk."
        )
