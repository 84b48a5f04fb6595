"""How much of a prompt one step reads, by device."""

from __future__ import annotations

from tandem.engines.mlx.load import on_accelerator

CPU_PREFILL_CHUNK = 256
GPU_PREFILL_CHUNK = 2048


def usual_chunk() -> int:
    """Prompt tokens per step while no answer runs."""
    return GPU_PREFILL_CHUNK if on_accelerator() else CPU_PREFILL_CHUNK
