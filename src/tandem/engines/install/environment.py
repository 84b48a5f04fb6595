"""A Python environment that an engine is installed in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tandem
from tandem.engines.installed import COMPLETE, environment_of
from tandem.errors import ConfigError, DeadlineError

LOOK_SECONDS = 60.0
_VERSIONS = """
import importlib.metadata as metadata, json, re
found = {}
for one in metadata.distributions():
    if one.name:
        found.setdefault(re.sub("[-_.]+", "-", one.name).lower(), one.version)
print(json.dumps(found))
"""
_REQUIRES = "import importlib.metadata, json, sys; print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))"
SERVING = frozenset({"fastapi"})


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment.

    Attributes:
        python: its interpreter.
        folder: where it lies.
        separate: it belongs to the engine alone, and was made by Tandem.
    """

    python: Path
    folder: Path
    separate: bool

    @classmethod
    def own(cls) -> Environment:
        """The one that this process runs in."""
        return cls(Path(sys.executable), Path(sys.prefix), separate=False)

    @classmethod
    def of_engine(cls, engine: str, home: Path) -> Environment:
        """The one that `engine` has of its own, made yet or not."""
        folder = environment_of(engine, home)
        return cls(folder / "bin" / "python", folder, separate=True)

    def make(self) -> None:
        """Make it, with Tandem linked into it, unless it is there. Not for `own`.

        Raises:
            ConfigError: it cannot be made.
        """
        if not self.python.is_file():
            try:
                shutil.rmtree(self.folder, ignore_errors=True)
                # Without a pip of its own: the one of this process serves it.
                venv.create(self.folder, with_pip=False, symlinks=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise ConfigError(f"No environment can be made in {self.folder}: {error}.") from error
        link = self._packages() / "tandem"
        source = Path(tandem.__file__).parent
        if not link.is_symlink() or link.resolve() != source.resolve():
            link.unlink(missing_ok=True)
            os.symlink(source, link)

    def _packages(self) -> Path:
        paths = sysconfig.get_paths("venv", {"base": str(self.folder), "platbase": str(self.folder)})
        return Path(paths["purelib"])

    def finish(self) -> None:
        """It is complete: runners use it from now on."""
        if self.separate:
            (self.folder / COMPLETE).touch()

    def reopen(self) -> None:
        """It is being changed: no runner is to start with it."""
        if self.separate:
            (self.folder / COMPLETE).unlink(missing_ok=True)

    def versions(self) -> dict[str, str]:
        """Versions of its distributions by canonical name."""
        found: dict[str, str] = json.loads(self._ask(_VERSIONS))
        return found

    def requires(self, distribution: str) -> list[str]:
        """`Requires-Dist` lines of an installed distribution."""
        found: list[str] = json.loads(self._ask(_REQUIRES, distribution))
        return found

    def _ask(self, script: str, *arguments: str) -> str:
        command = [str(self.python), "-I", "-c", script, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{self.python} gave no answer in {LOOK_SECONDS:.0f} seconds.") from error
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise ConfigError(f"{self.python} does not work: {last[0]}. Remove {self.folder} and install it again.")
        return done.stdout


def tandems_requirements(*, separate: bool) -> list[str]:
    """What Tandem itself needs in an environment, so that an engine's requirements do not take it away.

    Args:
        separate: an environment in which Tandem only runs an engine, and serves no HTTP. mlx-lm stays: tokenizers are
            read with it.
    """
    try:
        lines: Sequence[str] = requires("tandem") or ()
    except PackageNotFoundError:  # a source tree that was never installed
        return []
    found = [Requirement(line) for line in lines]
    applying = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    left_out = SERVING if separate else frozenset()
    kept = [one for one in applying if canonicalize_name(one.name) not in left_out]
    for one in kept:
        one.marker = None
    return [str(one) for one in kept]
