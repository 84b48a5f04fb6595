"""`tandem bench`: the benches a user can run."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.bench.cluster.cli import cluster
from tandem.bench.handoff.cli import handoff
from tandem.bench.pd.cli import pd
from tandem.bench.plan import Plan, parse_streams
from tandem.bench.running import run_bench, tell
from tandem.config import settings

app = typer.Typer(help="Measure Tandem, beside other servers where that is meaningful.", no_args_is_help=True)

DEFAULTS = Plan()


@app.callback()
def _bench() -> None:
    """Measure Tandem, beside other servers where that is meaningful."""


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="A model on this machine: id, alias or path.")] = DEFAULTS.model,
    rounds: Annotated[int, typer.Option(help="Rounds; figures are medians over them.")] = DEFAULTS.rounds,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each answer.")] = DEFAULTS.tokens,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt, for throughput.")] = DEFAULTS.prompt_tokens,
    ttft_prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt whose first text is timed.")
    ] = DEFAULTS.ttft_prompt_tokens,
    streams: Annotated[str, typer.Option(help="Answers side by side: numbers, with commas.")] = "1,8",
    sim_streams: Annotated[int, typer.Option(help="Simulated answers side by side.")] = DEFAULTS.sim_streams,
    sim_tokens: Annotated[int, typer.Option(help="Tokens of each simulated answer.")] = DEFAULTS.sim_tokens,
    sim_tps: Annotated[float, typer.Option(help="Tokens per second of each simulated answer.")] = DEFAULTS.sim_tps,
    sim_rounds: Annotated[int, typer.Option(help="Rounds with the simulated engine.")] = DEFAULTS.sim_rounds,
    skip_sim: Annotated[bool, typer.Option("--skip-sim", help="Leave the simulated engine out.")] = False,
    skip_mlx_lm: Annotated[bool, typer.Option("--skip-mlx-lm", help="Leave the comparison out.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a bound is missed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tandem beside mlx-lm's own server on the same model, and what many streams cost the server.

    Both servers get the same prompts, weights and BLAS; they take turns, round by round. Takes some four minutes on two
    cores.
    """
    plan = Plan(
        model=model,
        rounds=rounds,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        ttft_prompt_tokens=ttft_prompt_tokens,
        streams=parse_streams(streams),
        sim_streams=sim_streams,
        sim_tokens=sim_tokens,
        sim_tps=sim_tps,
        sim_rounds=sim_rounds,
    )
    plan.check()
    # Imported late: `tandem bench --help` should not wait for them.
    from tandem.bench.serve import bench_serve
    from tandem.bench.table import show
    from tandem.models.store import ModelStore

    folder = None if skip_mlx_lm else ModelStore(settings()).locate(model).path
    report = run_bench(lambda work, say: bench_serve(plan, folder, sim=not skip_sim, work=work, say=say))
    tell(report, show, as_json=json, check=check)


app.command()(handoff)
app.command()(cluster)
app.command()(pd)
