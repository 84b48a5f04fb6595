"""`tandem bench handoff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.bench.handoff.plan import EVERYWHERE, HandoffPlan, parse_sections
from tandem.bench.running import run_bench, tell
from tandem.config import settings
from tandem.errors import ConfigError

DEFAULTS = HandoffPlan()


def handoff(
    model: Annotated[str, typer.Option(help="A model on this machine: id, alias or path.")] = DEFAULTS.model,
    only: Annotated[
        str, typer.Option(help="Sections to run, with commas; link, which needs root on Linux, is another one.")
    ] = ",".join(EVERYWHERE),
    rounds: Annotated[int, typer.Option(help="Rounds; figures are medians over them.")] = DEFAULTS.rounds,
    throughput_tokens: Annotated[
        int, typer.Option(help="Tokens whose entries (128 KiB each) are moved, for throughput.")
    ] = DEFAULTS.throughput_tokens,
    ttft_tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt whose first token is timed.")
    ] = DEFAULTS.ttft_tokens,
    ttft_chunk: Annotated[
        int, typer.Option(help="Tokens that the prefill node computes together.")
    ] = DEFAULTS.ttft_chunk,
    itl_tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt that arrives while answers run.")
    ] = DEFAULTS.itl_tokens,
    itl_rate: Annotated[float, typer.Option(help="MB/s at which it arrives.")] = DEFAULTS.itl_rate / 1e6,
    itl_streams: Annotated[int, typer.Option(help="Answers that run meanwhile.")] = DEFAULTS.itl_streams,
    memory_tokens: Annotated[
        int, typer.Option(help="Tokens of the prompt whose peak memory is measured.")
    ] = DEFAULTS.memory_tokens,
    link_rate: Annotated[float, typer.Option(help="Mbit/s of the cable of the section link.")] = DEFAULTS.link_megabits,
    plot: Annotated[Path | None, typer.Option(help="Write the time to first token as an SVG picture here.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a bound is missed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a hand-off costs: throughput, time to first token, pauses of running answers, and memory.

    Each figure is a ratio within one run, beside its bound: throughput by a plain socket's, time to first token by the
    larger of prefill and transfer, gaps between tokens by those without a hand-off, peak memory by the entries' bytes.
    """
    plan = HandoffPlan(
        model=model,
        sections=parse_sections(only),
        rounds=rounds,
        throughput_tokens=throughput_tokens,
        ttft_tokens=ttft_tokens,
        ttft_chunk=ttft_chunk,
        itl_tokens=itl_tokens,
        itl_rate=itl_rate * 1e6,
        itl_streams=itl_streams,
        memory_tokens=memory_tokens,
        link_megabits=link_rate,
    )
    plan.check()
    if plot is not None and "ttft" not in plan.sections:
        raise ConfigError("--plot draws the time to first token, which --only leaves out. Add ttft.", param="plot")
    # Imported late: `tandem bench --help` should not wait for them.
    from tandem.bench.handoff.bench import bench_handoff
    from tandem.bench.handoff.plot import svg
    from tandem.bench.handoff.table import show
    from tandem.models.store import ModelStore

    needs_model = plan.sections != ("throughput",)
    folder = ModelStore(settings()).locate(model).path if needs_model else None
    report = run_bench(lambda work, say: bench_handoff(plan, folder, work=work, say=say))
    if plot is not None and report.ttft is not None:
        plot.write_text(svg(report.ttft), encoding="utf-8")
    tell(report, show, as_json=json, check=check)
