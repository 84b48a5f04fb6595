"""The replaying prefill node as the bench sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.handoff.children import Child

RECORD_SECONDS = 600.0


def replay_node(folder: Path, rate: float, log: Path, *, prefix: Sequence[str] = (), **engine: Any) -> Child:
    """A child that replays prefills of the model in `folder` at `rate` bytes per second.

    Args:
        prefix: what to put before its command.
        engine: further fields of `EngineOptions`.
    """
    # What it computes is kept by the recorder, not by the engine.
    options = {"engine": "mlx", "model_id": "bench", "path": str(folder), "prefix_cache_bytes": 0, **engine}
    settings = {"engine": options, "rate": rate}
    return Child("the replaying node", "tandem.bench.handoff.replay", settings, log, prefix=prefix)


async def record(node: Child, tokens: list[int]) -> int:
    """Have it compute and keep the prefill of a prompt. Returns the bytes of its entries.

    Raises:
        TandemError: it failed.
    """
    nbytes: int = (await node.ask({"record": tokens[:-1]}, RECORD_SECONDS))["bytes"]
    return nbytes
