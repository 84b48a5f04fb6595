"""`tandem bench pd`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.bench.running import run_bench, tell
from tandem.config import settings


def pd(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with sides, nodes and cases; options here go before it.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model on this machine, for both sides. [default: demo]")] = "",
    prefill: Annotated[
        str,
        typer.Option(help="Engine that reads: mlx, vllm or sim:KEY=VALUE,... [default: vllm if it is here, or mlx]"),
    ] = "",
    decode: Annotated[str, typer.Option(help="Engine that writes, likewise. [default: mlx]")] = "",
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of the prompts: numbers, with commas. [default: 500,1000,2000]")
    ] = "",
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of the answers: numbers, with commas. [default: 16,64]")
    ] = "",
    rounds: Annotated[int | None, typer.Option(help="Rounds; figures are medians over them. [default: 3]")] = None,
    warm_up: Annotated[int | None, typer.Option(help="Rounds before that, not counted. [default: 1]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the prompts. [default: drawn]")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the time to first text as an SVG picture here.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a bound is missed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What it brings that one node reads the prompt and another one writes the answer.

    The same prompts three times: disaggregated, by the decode side alone, by the prefill side alone. Both sides are
    `tandem up` on this machine, or running nodes that a config file names. Each case tells how many of the prompt's
    tokens were really read by the prefill side; where not all were, there is no speedup.
    """
    from tandem.bench.pd.config import Options, make_plan, parse_lengths

    options = Options(
        prefill=prefill,
        decode=decode,
        model=model,
        prompt_tokens=parse_lengths(prompt_tokens, "prompt_tokens"),
        output_tokens=parse_lengths(output_tokens, "output_tokens"),
        rounds=rounds,
        warm_up=warm_up,
        seed=seed,
    )
    plan = make_plan(config, options)
    # Imported late: `tandem bench --help` should not wait for them.
    from tandem.bench.pd.bench import bench_pd
    from tandem.bench.pd.plot import svg
    from tandem.bench.pd.table import show
    from tandem.models.store import ModelStore

    simulated = plan.decode.engine == "sim"
    folder = None if simulated else ModelStore(settings()).locate(plan.decode.model).path
    report = run_bench(lambda work, say: bench_pd(plan, folder, work=work, say=say))
    if plot is not None:
        plot.write_text(svg(report), encoding="utf-8")
    tell(report, show, as_json=json, check=check)
