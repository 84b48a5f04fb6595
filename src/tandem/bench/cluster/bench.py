"""The cluster bench: its clusters, one after the other, and what is done with the large one."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import msgspec

from tandem.bench.cluster.cluster import Cluster, Host
from tandem.bench.cluster.messages import Traffic, together
from tandem.bench.cluster.plan import MODEL_ID, SMALL, ClusterPlan
from tandem.bench.cluster.report import ClusterReport, Forming, Idle, Kill, Placing
from tandem.bench.environment import describe, load_average
from tandem.bench.report import Series
from tandem.bench.serve import Say
from tandem.cluster.facts.engines import EngineProber
from tandem.types.facts import EngineFact

REFERENCE = f"sim:model_id={MODEL_ID},decode_tps=100,layers=1,kv_heads=1,head_dim=8"
SETTLE_SECONDS = 3.0
"""Between something that happened and the moment when the cluster counts as idle."""
REQUEST_SECONDS = 30.0
"""After which a request counts as never ended."""
LAUNCH_SECONDS = 120.0


async def bench_cluster(plan: ClusterPlan, *, work: Path, say: Say) -> ClusterReport:
    """Run the bench.

    Args:
        work: scratch folder.

    Raises:
        TandemError: a program or a node failed, or something did not happen in time.
    """
    load_before = load_average()
    say("engines of this machine")
    engines = await EngineProber().engines()
    small = {}
    for scheme in ("tcp", "quic") if plan.quic else ("tcp",):
        say(f"{SMALL} nodes over {scheme}")
        secret = secrets.token_hex(16) if scheme == "quic" else ""
        async with Cluster([1] * SMALL, work / f"small-{scheme}", secret, engines) as cluster:
            small[scheme] = await _form_and_kill(cluster, 1)
    return await _large(plan, small, work=work, say=say, engines=engines, load_before=load_before)


async def _large(
    plan: ClusterPlan,
    small: dict[str, Forming],
    *,
    work: Path,
    say: Say,
    engines: tuple[EngineFact, ...],
    load_before: float,
) -> ClusterReport:
    async with Cluster(plan.processes, work / "large", plan.secret, engines) as cluster:
        say(f"{plan.nodes} nodes: forming, {plan.killed_idle} killed")
        forming = await _form_and_kill(cluster, plan.killed_idle)
        say(f"{plan.instances} instances")
        victims = cluster.hosts[: plan.killed]
        await _launch(plan, cluster, victims)
        await asyncio.sleep(SETTLE_SECONDS)
        say(f"idle for {plan.idle_seconds:g} s")
        idle = await _idle(cluster, plan.idle_seconds)
        say("placement")
        placing = await _place(plan, cluster)
        say(f"requests for {plan.traffic_seconds:g} s")
        traffic = await _traffic(plan, cluster, plan.tokens, plan.traffic_seconds)
        await asyncio.sleep(SETTLE_SECONDS)
        say(f"idle again for {plan.idle_seconds:g} s")
        idle_after = await _idle(cluster, plan.idle_seconds)
        kill = None
        if victims:
            say(f"requests for {plan.kill_seconds:g} s, {len(victims)} nodes killed meanwhile")
            kill = await _kill(plan, cluster, victims)
        departures = await cluster.departures()
        say("the end")
    return ClusterReport(
        plan, describe(load_before), small, forming, idle, idle_after, placing, traffic, kill, departures
    )


async def _form_and_kill(cluster: Cluster, kill: int) -> Forming:
    nodes, processes, load = sum(host.nodes for host in cluster.hosts), len(cluster.hosts), load_average()
    formed, started = await cluster.form()
    # What every node has to tell of itself at first should not be in the way of what is timed.
    await asyncio.sleep(SETTLE_SECONDS)
    hosts = cluster.hosts[:kill]
    ids = [node_id for host in hosts for node_id in host.ids]
    since = await cluster.kill(hosts)
    noticed = await cluster.noticed(since, ids)
    return Forming(nodes, processes, len(ids), formed, started, noticed, load)


async def _launch(plan: ClusterPlan, cluster: Cluster, victims: list[Host]) -> None:
    """One instance on each of some nodes that will be killed, the others spread over the rest."""
    counts = {id(host): 1 for host in victims[: plan.killed_instances]}
    left = plan.instances - len(counts)
    rest = cluster.hosts[len(victims) :]
    while left:
        for host in rest:
            if left and counts.get(id(host), 0) < host.nodes:
                counts[id(host)] = counts.get(id(host), 0) + 1
                left -= 1
    wanted = [(host, [REFERENCE] * counts[id(host)]) for host in cluster.hosts if id(host) in counts]
    await asyncio.gather(*(host.ask("launch", LAUNCH_SECONDS, references=names) for host, names in wanted))
    await cluster.every("ready", LAUNCH_SECONDS, model_id=MODEL_ID, count=plan.instances)


async def _idle(cluster: Cluster, seconds: float) -> Idle:
    loop = asyncio.get_running_loop()
    began = loop.time()
    before = [host.cpu_seconds() for host in cluster.hosts]
    await asyncio.sleep(seconds)
    spent = [host.cpu_seconds() - earlier for host, earlier in zip(cluster.hosts, before, strict=True)]
    passed = loop.time() - began
    percent = [100 * used / passed / host.nodes for host, used in zip(cluster.hosts, spent, strict=True)]
    alone = [value for host, value in zip(cluster.hosts, percent, strict=True) if host.nodes == 1]
    shared = [value for host, value in zip(cluster.hosts, percent, strict=True) if host.nodes > 1]
    return Idle(Series.of(alone or shared), Series.of(shared) if shared else None, load_average())


async def _place(plan: ClusterPlan, cluster: Cluster) -> Placing:
    answer = await cluster.hosts[-1].ask("place", model=plan.model, rounds=plan.placement_rounds)
    placing, previewing = answer["place_ms"], answer["previews_ms"]
    total = [one + other for one, other in zip(placing, previewing, strict=True)]
    return Placing(Series.of(total), Series.of(placing), Series.of(previewing), answer["previews"], answer["nodes"])


async def _traffic(plan: ClusterPlan, cluster: Cluster, tokens: int, seconds: float) -> Traffic:
    answers = await cluster.every(
        "traffic",
        seconds + 2 * REQUEST_SECONDS,
        model=MODEL_ID,
        streams=plan.streams,
        tokens=tokens,
        seconds=seconds,
        request_deadline=REQUEST_SECONDS,
    )
    return together([msgspec.convert(answer, Traffic) for answer in answers])


async def _kill(plan: ClusterPlan, cluster: Cluster, victims: list[Host]) -> Kill:
    ids = [node_id for host in victims for node_id in host.ids]
    running = asyncio.create_task(_traffic(plan, cluster, plan.kill_tokens, plan.kill_seconds))
    try:
        await asyncio.sleep(plan.kill_seconds / 3)
        since = await cluster.kill(victims)
        traffic = await running
    finally:
        running.cancel()
        await asyncio.wait({running})
    # Asked afterwards, as a program does one thing at a time; the nodes wrote down when it was.
    noticed = await cluster.noticed(since, ids)
    again = await _traffic(plan, cluster, plan.tokens, 1.0)
    died = plan.killed_instances
    return Kill(len(ids), died, plan.instances, noticed, traffic, again.answered)
