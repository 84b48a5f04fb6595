"""Which Python interpreter runs an engine: this one, or that of an environment of the engine's own.

An engine whose requirements do not agree with Tandem's lies in a virtual environment under the data folder, where
`tandem engines install` makes it and links Tandem into it. It counts once the installation was complete.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tandem.engines.base import EngineName
from tandem.errors import ConfigError

INSTALL_VLLM = "tandem engines install vllm"
VLLM_MISSING = f"vLLM is not installed: {INSTALL_VLLM}"
COMPLETE = "tandem-complete"
"""A file in an environment that was installed to its end."""


def environment_of(engine: str, home: Path) -> Path:
    """The folder of the environment that `engine` has of its own, if it has one.

    Args:
        home: the data folder.
    """
    return home / "engines" / engine


def interpreter_of(engine: EngineName | str, home: Path) -> Path:
    """The Python interpreter that a runner with `engine` is started with."""
    folder = environment_of(engine, home)
    python = folder / "bin" / "python"
    if (folder / COMPLETE).is_file() and python.is_file():
        return python
    return Path(sys.executable)


def not_installed(engine: EngineName, home: Path) -> str:
    """Why a runner with `engine` cannot even be tried, and the command that is missing; empty if it can."""
    if engine != "vllm" or interpreter_of(engine, home) != Path(sys.executable):
        return ""
    return "" if importlib.util.find_spec("vllm") is not None else VLLM_MISSING


def require(engine: EngineName, home: Path) -> None:
    """Refuse an engine that is not installed. Ask before a model is fetched for it.

    Raises:
        ConfigError: the message names the command that is missing.
    """
    if reason := not_installed(engine, home):
        raise ConfigError(reason, param="engine")
