"""`tandem bench cluster`."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.bench.cluster.plan import ClusterPlan
from tandem.bench.running import run_bench, tell

DEFAULTS = ClusterPlan()


def cluster(
    nodes: Annotated[int, typer.Option(help="Nodes of the large cluster.")] = DEFAULTS.nodes,
    per_process: Annotated[
        int, typer.Option(help="Nodes that share a process, of those that are not killed.")
    ] = DEFAULTS.per_process,
    killed: Annotated[int, typer.Option(help="Nodes to kill while requests run.")] = DEFAULTS.killed,
    killed_idle: Annotated[int, typer.Option(help="Nodes to kill while the cluster is idle.")] = DEFAULTS.killed_idle,
    instances: Annotated[int, typer.Option(help="Simulated instances, on as many nodes.")] = DEFAULTS.instances,
    streams: Annotated[int, typer.Option(help="Requests that each node has under way.")] = DEFAULTS.streams,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = DEFAULTS.tokens,
    idle_seconds: Annotated[
        float, typer.Option(help="Seconds for which the idle cluster's processor time is measured.")
    ] = DEFAULTS.idle_seconds,
    traffic_seconds: Annotated[float, typer.Option(help="Seconds of requests.")] = DEFAULTS.traffic_seconds,
    kill_seconds: Annotated[
        float, typer.Option(help="Seconds of requests while nodes are killed.")
    ] = DEFAULTS.kill_seconds,
    model: Annotated[str, typer.Option(help="The model whose placement is timed: id of a card.")] = DEFAULTS.model,
    secret: Annotated[str, typer.Option(help="The large cluster's secret; empty for none.")] = DEFAULTS.secret,
    skip_quic: Annotated[bool, typer.Option("--skip-quic", help="No small cluster with a secret.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a bound is missed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a cluster costs: forming, noticing deaths, idling, placing, routing, and losing nodes at work.

    All nodes are real ones on this machine; several may share a process. Takes some two minutes with 50 nodes.
    """
    plan = ClusterPlan(
        nodes=nodes,
        per_process=per_process,
        killed=killed,
        killed_idle=killed_idle,
        instances=instances,
        streams=streams,
        tokens=tokens,
        idle_seconds=idle_seconds,
        traffic_seconds=traffic_seconds,
        kill_seconds=kill_seconds,
        model=model,
        secret=secret,
        quic=not skip_quic,
    )
    plan.check()
    # Imported late: `tandem bench --help` should not wait for them.
    from tandem.bench.cluster.bench import bench_cluster
    from tandem.bench.cluster.table import show

    report = run_bench(lambda work, say: bench_cluster(plan, work=work, say=say))
    tell(report, show, as_json=json, check=check)
