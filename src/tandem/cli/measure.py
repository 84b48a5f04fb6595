"""How fast MLX multiplies matrices here: `python -m tandem.cli.measure` prints one JSON object.

A process of its own, because MLX chooses its BLAS once per process and a broken installation may end it.
"""

from __future__ import annotations

import json
import time

SIZE = 768
ROUNDS = 5
ENOUGH_SECONDS = 3.0


def measure() -> dict[str, object]:
    """`device` (`cpu` or `gpu`), `blas` and `library` as in `BlasStatus`, and the best of some rounds as `gflops`."""
    from tandem.engines.mlx import blas

    status = blas.load()
    import mlx.core as mx

    matrix = mx.random.normal((SIZE, SIZE))
    mx.eval(matrix @ matrix)
    began = time.perf_counter()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mx.eval(matrix @ matrix)
        end = time.perf_counter()
        best = min(best, end - start)
        if end - began > ENOUGH_SECONDS:
            break
    return {
        "device": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
        "blas": status.state,
        "library": status.library,
        "gflops": 2 * SIZE**3 / best / 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
