"""What a person sees of an error: one red line that says what to do."""

from __future__ import annotations

import sys

from tandem.errors import CancelledError, TandemError

FAILED = 1
INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


def describe_failure(error: Exception) -> int:
    """Print `error` to standard error and return the exit status it deserves."""
    if isinstance(error, CancelledError):
        red_line(error.message)
        return INTERRUPTED
    if isinstance(error, TandemError):
        red_line(error.message)
    else:
        name = type(error).__name__
        red_line(f"Unexpected {name}: {error}. Set TANDEM_DEBUG=1 and run it again to see where; please report it.")
    return FAILED


def red_line(message: str) -> None:
    """Print one line to standard error, in red where that is a terminal."""
    from tandem.cli.output import stderr

    text = " ".join(message.split())
    sys.stdout.flush()
    stderr().print(f"Error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
