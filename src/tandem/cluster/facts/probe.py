"""Whether one engine works here: `python -m tandem.cluster.facts.probe MlxCpu` prints one JSON object, last.

A process of its own, because an import may load CUDA, take memory, hang, or end the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tandem.cluster.facts.sound import Sound, installed_version
from tandem.engines.installed import INSTALL_VLLM

MARK = "tandem-probe "
"""Begins the line with the answer; libraries print as well."""
MLX_PACKAGES = ("mlx", "mlx_lm", "transformers")


class Unavailable(Exception):
    """The engine does not work here; the text says why and what to do."""


def main(backend: str) -> dict[str, Any]:
    """What `backend` comes to: `available`, `version`, `reason`."""
    try:
        if backend == "Vllm":
            found, note = _vllm(), ""
        else:
            found, note = _mlx(backend)
    except Unavailable as error:
        return {"available": False, "version": "", "reason": str(error)}
    except ModuleNotFoundError as error:
        return {
            "available": False,
            "version": "",
            "reason": f"the module {error.name} is missing: {install(error.name)}",
        }
    except (ImportError, OSError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        return {"available": False, "version": "", "reason": lines[-1] if lines else type(error).__name__}
    return {"available": True, "version": found, "reason": note}


def install(module: str | None) -> str:
    """The command that installs a module."""
    package = (module or "").partition(".")[0].replace("_", "-")
    return f"{sys.executable} -m pip install {package}"


def _mlx(backend: str) -> tuple[str, str]:
    for module in MLX_PACKAGES:
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"{module} is not installed: {install(module)}")
    if backend == "MlxCuda" and not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        raise Unavailable("there is no NVIDIA GPU with a loaded driver here (nvidia-smi would list it)")

    from tandem.engines.mlx import blas, lean

    lean.without_torch()
    status = blas.load()
    mx = importlib.import_module("mlx.core")
    if backend == "MlxMetal" and not mx.metal.is_available():
        raise Unavailable("MLX finds no Metal device: it needs Apple silicon, not a virtual machine")
    if backend == "MlxCuda" and not mx.cuda.is_available():
        raise Unavailable(
            "the installed MLX is not its CUDA build, or that finds no GPU: "
            f"{sys.executable} -m pip install 'mlx[cuda13]' (for a driver of CUDA 12: 'mlx[cuda12]')"
        )
    mx.set_default_device(mx.cpu if backend == "MlxCpu" else mx.gpu)
    ones = mx.ones((8, 8))
    if (ones @ ones).sum().item() != 512:
        raise Unavailable("MLX multiplies matrices wrongly: install it again, or try another version")
    # What the runner imports, with everything behind it.
    importlib.import_module("tandem.engines.mlx.engine")
    note = ""
    if backend == "MlxCpu" and status.state == "slow":
        note = f"slow: OpenBLAS is missing: {blas.INSTALL_HINT}"
    return version("mlx"), note


def _vllm() -> str:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Unavailable(f"vLLM is not installed: {INSTALL_VLLM}")
    sound = Sound.of(spec.origin)
    if sound.known():
        return sound.version
    vllm = importlib.import_module("vllm")
    # The package imports its parts late: this one brings the compiled ones.
    if not hasattr(vllm, "LLM"):
        raise Unavailable(f"the installed vllm has no LLM: remove it, and then {INSTALL_VLLM}")
    if importlib.import_module("vllm.platforms").current_platform.is_unspecified():
        raise Unavailable("the installed vllm finds no device that it has kernels for: look at `nvidia-smi`")
    sound.remember()
    return sound.version or installed_version() or str(getattr(vllm, "__version__", ""))


if __name__ == "__main__":
    answer = main(sys.argv[1])
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)
