"""Running pip, with a deadline, and saying in words what it failed of."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.errors import ConfigError, DeadlineError, DiskFullError, DownloadError, TandemError

QUIET = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off", "PIP_NO_INPUT": "1", "PIP_NO_COLOR": "1"}
RETRIES = "2"
WORTH_SAYING = 20.0
"""Megabytes of a download that a person wants to know of."""
CONFLICT = "requirements"
"""`param` of the error that says that requirements do not agree."""
UNREACHABLE = re.compile(
    "NewConnectionError|NameResolutionError|Temporary failure in name resolution|ConnectTimeout|Read timed out|"
    "Connection refused|Network is unreachable|Max retries exceeded|ProxyError|getaddrinfo failed"
)
DOWNLOADING = re.compile(r"Downloading (?:\S*/)?(\S+) \((\d+(?:\.\d+)?) MB\)")


class Pip:
    """pip for one interpreter.

    Args:
        python: the interpreter whose environment it changes; it need not have a pip of its own.
        say: told what is under way.
        until: on the monotonic clock; whatever runs then is ended.
        folder: of the environment, for error messages.
    """

    def __init__(self, python: Path, say: Callable[[str], None], until: float, folder: Path) -> None:
        self._command = [sys.executable, "-m", "pip"]
        if python != Path(sys.executable):
            self._command += ["--python", str(python)]
        self._say = say
        self._until = until
        self._folder = folder

    def install(self, *arguments: str) -> None:
        """`pip install`.

        Raises:
            DownloadError: there is no network, or no such version.
            DiskFullError: the disk is full.
            ConfigError: pip is missing, may not write, or, with the parameter `CONFLICT`, finds no versions that
                agree.
            DeadlineError: it took too long.
        """
        self.run("install", "--retries", RETRIES, *arguments)

    def run(self, *arguments: str) -> list[str]:
        """Any command of pip; see `install`.

        Returns:
            The lines that it printed.
        """
        process = subprocess.Popen(
            [*self._command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **QUIET},
            start_new_session=True,
        )
        timer = threading.Timer(max(0.0, self._until - time.monotonic()), _end, (process,))
        timer.start()
        lines: list[str] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                found = DOWNLOADING.search(line)
                if found and float(found[2]) >= WORTH_SAYING:
                    self._say(f"downloading {found[1]} ({found[2]} MB)")
            status = process.wait()
        finally:
            # Also when this process is interrupted: pip must not go on alone.
            timer.cancel()
            _end(process)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if status == 0:
            return lines
        if time.monotonic() >= self._until:
            raise DeadlineError("The installation reached its deadline. Allow more with --deadline; it goes on there.")
        raise failure(lines, self._folder)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def failure(lines: Sequence[str], folder: Path) -> TandemError:
    """What pip's output says of its failure. Pure."""
    text = "\n".join(lines)
    if "No space left on device" in text or "Errno 28" in text:
        return DiskFullError(
            f"The disk is full ({folder}, or the folder for temporary files). Free some space and run it again."
        )
    if UNREACHABLE.search(text):
        return DownloadError(
            "pip cannot reach its package index. Connect this machine to the network and run the command again, or "
            "give pip a folder with the packages (PIP_FIND_LINKS, with PIP_NO_INDEX=1)."
        )
    if "ResolutionImpossible" in text or "conflicting dependencies" in text:
        return ConfigError(
            "No versions of the packages agree with those that Tandem needs. Use an environment for the engine alone: "
            "tandem engines install vllm --separate",
            param=CONFLICT,
        )
    if "No module named pip" in text:
        return ConfigError(f"This Python has no pip. Install it: {sys.executable} -m ensurepip --upgrade")
    if "Permission denied" in text or "externally-managed-environment" in text:
        return ConfigError(
            f"pip may not write to {folder}. Use an environment for the engine alone: "
            "tandem engines install vllm --separate"
        )
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no output")
    return DownloadError(f"pip failed: {last.removeprefix('ERROR:').strip()}")
