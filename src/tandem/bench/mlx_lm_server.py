"""mlx-lm's own HTTP server with the fast BLAS that Tandem's runner loads.

`python -m tandem.bench.mlx_lm_server --model FOLDER --port N ...` takes mlx-lm's own options.
"""

from __future__ import annotations

from tandem.engines.mlx import blas


def main() -> None:
    """Load OpenBLAS before MLX, then hand over to mlx-lm."""
    blas.load()
    from mlx_lm import server

    server.main()


if __name__ == "__main__":
    main()
