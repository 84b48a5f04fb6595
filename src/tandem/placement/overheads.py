"""What engines take beside weights and caches, as constants, with where they come from. Bytes and tokens."""

from __future__ import annotations

from tandem.types.facts import Backend

MIB = 1 << 20
GIB = 1 << 30

OVERHEAD: dict[Backend | None, int] = {
    "MlxCpu": 512 * MIB,
    "MlxMetal": 768 * MIB,
    "MlxCuda": 1 * GIB,
    "Vllm": 3 * GIB,
    None: 96 * MIB,
}
"""What a runner takes before it has a model, rounded up: its process and libraries, an accelerator's context, and for
vLLM on a GPU its captured graphs (not measured: no such GPU was at hand). None is the simulated engine."""
VLLM_CPU_OVERHEAD = 640 * MIB
VLLM_CPU_CHUNK = 512
VLLM_CPU_COPIES = (0.1, 2.0)
VLLM_CPU_LOGITS = 1024
"""What vLLM takes on a processor: 514 MiB before it has a model; a tenth of all weights and twice the embeddings beside
them, as it keeps some once more in the order of its kernels; and as much as the float32 logits of 1,024 tokens, which
its first run leaves behind. Fitted to the resident memory of vllm-cpu 0.32.0 with torch 2.13.0, eager, one thread,
steps of 512 tokens, a cache of 512 MiB of which 0.84 were touched, after two prompts of 400 tokens:

| model | bfloat16 | float32 |
| SmolLM2-135M | 1570 MiB | 2013 MiB |
| Gemma 3 270M | 3156 MiB | 4303 MiB |
"""
VLLM_SEQUENCES = 8
"""Requests that an instance answers at a time by default."""
VLLM_PADDING = 128 * (VLLM_SEQUENCES + 1)
"""Tokens of its cache that hold nothing: each request rounds up to a block, and one block is never used."""
PREFILL_CHUNK: dict[Backend | None, int] = {"MlxCpu": 256, "MlxMetal": 2048, "MlxCuda": 2048, "Vllm": 8192, None: 0}
"""Prompt tokens that are computed at once."""
