"""The hand-off bench: its sections, one after the other."""

from __future__ import annotations

from pathlib import Path

from tandem.bench.environment import describe, load_average
from tandem.bench.handoff.itl import measure_itl
from tandem.bench.handoff.link import check_machines, measure_link
from tandem.bench.handoff.memory import measure_memory
from tandem.bench.handoff.plan import HandoffPlan
from tandem.bench.handoff.report import HandoffReport
from tandem.bench.handoff.throughput import measure_throughput
from tandem.bench.handoff.ttft import measure_ttft
from tandem.bench.serve import Say


async def bench_handoff(plan: HandoffPlan, folder: Path | None, *, work: Path, say: Say) -> HandoffReport:
    """Run the bench.

    Args:
        folder: the model's folder; None if no section needs one.
        work: scratch folder.

    Raises:
        UnsupportedError: a section cannot run on this machine.
        TandemError: a process did not start, or a hand-off failed.
    """
    if "link" in plan.sections:
        check_machines()
    load_before = load_average()
    throughput = ttft = itl = memory = link = None
    if "throughput" in plan.sections:
        throughput = await measure_throughput(plan, work, say)
    if folder is not None:
        if "ttft" in plan.sections:
            ttft = await measure_ttft(plan, folder, work, say)
        if "itl" in plan.sections:
            itl = await measure_itl(plan, folder, work, say)
        if "memory" in plan.sections:
            memory = await measure_memory(plan, folder, work, say)
        if "link" in plan.sections:
            link = await measure_link(plan, folder, work, say)
    return HandoffReport(plan, describe(load_before), throughput, ttft, itl, memory, link)
