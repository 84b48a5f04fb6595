"""Engines by name. Each is imported only when it is chosen: an engine's libraries are heavy."""

from __future__ import annotations

from tandem.engines.base import Engine, EngineOptions


def build_engine(options: EngineOptions) -> Engine:
    """The engine that `options.engine` names, not loaded yet."""
    if options.engine == "sim":
        from tandem.engines.sim.engine import SimEngine

        return SimEngine(options)
    if options.engine == "vllm":
        from tandem.engines.vllm import environment

        # vLLM reads these while it is imported.
        environment.prepare()
        from tandem.engines.vllm.engine import VllmEngine

        return VllmEngine(options)
    from tandem.engines.mlx import blas

    # MLX binds to the BLAS that it finds loaded: this has to come before its first import.
    blas.load()
    from tandem.engines.mlx.engine import MlxEngine

    return MlxEngine(options)
