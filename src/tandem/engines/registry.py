"""Engines by name. Each is imported only when it is chosen: an engine's libraries are heavy."""

from __future__ import annotations

from tandem.engines.base import Engine, EngineOptions


def build_engine(options: EngineOptions) -> Engine:
    """The engine that `options.engine` names, not loaded yet."""
    if options.engine == "sim":
        from tandem.engines.sim.engine import SimEngine

        return SimEngine(options)
    from tandem.engines.mlx.engine import MlxEngine

    return MlxEngine(options)
