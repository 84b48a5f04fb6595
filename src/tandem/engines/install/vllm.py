"""Installing vLLM, into Tandem's own environment or into one that it has for itself."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.engines.install.build import VllmBuild, build_for, cuda_parts, nvidia_here, pins, requirements, unmet
from tandem.engines.install.environment import Environment, tandems_requirements
from tandem.engines.install.pip import CONFLICT, Pip
from tandem.engines.installed import interpreter_of
from tandem.errors import ConfigError, DiskFullError, DownloadError

DEADLINE_SECONDS = 3600.0
ENGINE = "vllm"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Installed:
    """vLLM, installed.

    Attributes:
        changed: it was not, before.
    """

    build: VllmBuild
    python: Path
    separate: bool
    changed: bool


def install_vllm(
    home: Path,
    say: Say = lambda text: None,
    *,
    separate: bool = False,
    deadline: float = DEADLINE_SECONDS,
    build: VllmBuild | None = None,
    also: Sequence[str] | None = None,
) -> Installed:
    """Install vLLM so that Tandem's runners find it. Does nothing where that is done.

    Without `separate` it goes into Tandem's own environment, and into one of its own if the requirements of the two do
    not agree, or if it has one already.

    Args:
        home: the data folder.
        say: told what is under way.
        deadline: seconds for all of it.
        build: None takes this machine's.
        also: requirements that have to be met as well; None takes Tandem's own.

    Raises:
        ConfigError: there is no build for this machine, or no permission, or pip is missing.
        DownloadError: there is no network, or the index has no such package.
        DiskFullError: it does not fit on the disk.
        DeadlineError: it took too long.
    """
    build = build or build_for(sys.platform, nvidia_here())
    until = time.monotonic() + deadline
    alone = Environment.of_engine(ENGINE, home)
    if separate or interpreter_of(ENGINE, home) == alone.python:
        return _install_into(alone, build, say, until, also)
    try:
        return _install_into(Environment.own(), build, say, until, also)
    except ConfigError as error:
        if error.param != CONFLICT:
            raise
        say("its requirements and Tandem's do not agree: it gets an environment of its own")
        return _install_into(alone, build, say, until, also)


def is_installed(environment: Environment, build: VllmBuild, also: Sequence[str]) -> bool:
    """Whether `build` and everything that it needs are there, `also` included, without importing anything."""
    if not environment.python.is_file():
        return False
    versions = environment.versions()
    if versions.get(build.distribution) != build.version:
        return False
    return not unmet([*_all_requirements(environment, build, versions), *also], versions)


def _all_requirements(environment: Environment, build: VllmBuild, versions: dict[str, str]) -> list[str]:
    own = environment.requires(build.distribution)
    lines = requirements(own, build) + pins(own, build)
    for name in build.without_dependencies:
        if name in versions:
            lines += requirements(environment.requires(name), build)
    return lines


def _install_into(
    environment: Environment, build: VllmBuild, say: Say, until: float, also: Sequence[str] | None
) -> Installed:
    also = tandems_requirements(separate=environment.separate) if also is None else also
    if is_installed(environment, build, also) and interpreter_is_ours(environment):
        return Installed(build, environment.python, environment.separate, changed=False)
    _check_space(environment, build)
    say(f"installing {build.pinned} into {environment.folder}")
    if environment.separate:
        environment.make()
        environment.reopen()
    pip = Pip(environment.python, say, until, environment.folder)
    if build.torch:
        _check_torch(pip, build)
        say(f"installing {build.torch}")
        pip.install(build.torch)
    pip.install("--no-deps", build.pinned)
    needed = environment.requires(build.distribution)
    alone = pins(needed, build)
    wanted = requirements(needed, build)
    if alone:
        pip.install("--no-deps", *alone)
        for name in build.without_dependencies:
            wanted += requirements(environment.requires(name), build)
    wanted += also
    say(f"installing what it needs ({len(wanted)} requirements)")
    pip.install(*dict.fromkeys(wanted))
    environment.finish()
    return Installed(build, environment.python, environment.separate, changed=True)


def interpreter_is_ours(environment: Environment) -> bool:
    """Whether runners would start with this environment: one of the engine's own has to be complete."""
    if not environment.separate:
        return True
    home = environment.folder.parent.parent
    return interpreter_of(ENGINE, home) == environment.python


def _check_space(environment: Environment, build: VllmBuild) -> None:
    for folder in (environment.folder, Path(tempfile.gettempdir())):
        there = next(one for one in (folder, *folder.parents) if one.exists())
        free = shutil.disk_usage(there).free
        # What pip unpacks on its way is gone when it is done, and is one package at a time.
        needed = build.disk if folder == environment.folder else build.disk // 4
        if free < needed:
            raise DiskFullError(
                f"vLLM needs {needed / 1e9:.1f} GB in {there}, where {free / 1e9:.1f} GB are free. Free some space, "
                "or set TANDEM_HOME (with --separate) or TMPDIR to a folder on a larger disk."
            )


def _check_torch(pip: Pip, build: VllmBuild) -> None:
    """Raises:
    DownloadError: pip would fetch a PyTorch for GPUs.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-pip-") as folder:
        report = Path(folder) / "report.json"
        pip.install("--dry-run", "--report", str(report), build.torch)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    parts = cuda_parts(one["metadata"]["name"] for one in found)
    if parts:
        raise DownloadError(
            f"pip would fetch PyTorch's build for GPUs ({', '.join(parts[:3])}, ...), several gigabytes that this "
            "machine has no use for. Let pip find PyTorch's CPU build first: name its index in PIP_EXTRA_INDEX_URL, or "
            "a folder with its wheel in PIP_FIND_LINKS, and run the command again."
        )
