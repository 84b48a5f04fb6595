"""Where output goes: answers and tables to standard output, everything about them to standard error."""

from __future__ import annotations

import json
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@lru_cache(maxsize=1)
def stdout() -> Console:
    """The console on standard output."""
    from rich.console import Console

    return Console()


@lru_cache(maxsize=1)
def stderr() -> Console:
    """The console on standard error."""
    from rich.console import Console

    return Console(stderr=True)


def note(text: str) -> None:
    """One dim line on standard error: what is being done, and why it takes a moment."""
    stderr().print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def print_event(value: dict[str, Any]) -> None:
    """`value` as one line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def human_bytes(size: int) -> str:
    """`size` as people write it: `538.1 MB`, powers of ten."""
    amount = float(size)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def command_name() -> str:
    """How this very `tandem` is called from the current folder."""
    own = Path(sys.argv[0]).absolute()
    found = shutil.which("tandem")
    if own.name != "tandem" or (found is not None and Path(found).absolute() == own):
        return "tandem"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
