"""How far a download, a conversion or a copy has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """One step of a longer job.

    Attributes:
        phase: what is being done now.
        done, total: in `unit`.
    """

    phase: Literal["download", "convert", "copy"]
    done: int
    total: int
    unit: Literal["bytes", "tensors"]


ProgressCallback: TypeAlias = Callable[[Progress], None]
"""Called from the thread that does the work, or from a download thread. What it raises ends the job."""


def ignore_progress(progress: Progress) -> None:
    """The callback of those who do not want to know."""
