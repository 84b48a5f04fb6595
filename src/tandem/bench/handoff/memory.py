"""The decode process's peak memory during one hand-off, by the bytes of the prompt's entries.

The prefix cache is off: what it keeps is a choice, and no part of receiving. The sender replays, so it is sooner done.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from tandem.bench.handoff.children import Child
from tandem.bench.handoff.plan import HandoffPlan
from tandem.bench.handoff.replaying import record, replay_node
from tandem.bench.handoff.report import PeakMemory
from tandem.bench.processes import HOST
from tandem.bench.prompts import PromptMaker
from tandem.bench.report import Series, ratios
from tandem.bench.serve import Say

REPLAY_RATE = 500e6
SMALL_PROMPT_TOKENS = 300


async def measure_memory(plan: HandoffPlan, folder: Path, work: Path, say: Say) -> PeakMemory:
    """Hand the same prompt off in every round, after a short one that pays for what is needed once.

    Raises:
        TandemError: a process did not start, or a hand-off failed.
    """
    prompts = PromptMaker(folder)
    short = prompts.token_ids("memory, short", SMALL_PROMPT_TOKENS)
    tokens = prompts.token_ids("memory", plan.memory_tokens)
    answers: list[dict[str, int | str]] = []
    async with AsyncExitStack() as stack:
        say("starting the replaying prefill node")
        replay = await stack.enter_async_context(replay_node(folder, REPLAY_RATE, work / "memory-replay.log"))
        say("recording a prefill")
        nbytes = await record(replay, tokens)
        engine = {
            "engine": "mlx",
            "model_id": "bench",
            "path": str(folder),
            "prefix_cache_bytes": 0,
            "prefill_peers": [{"address": f"{HOST}:{replay.ready['port']}"}],
        }
        decoder = await stack.enter_async_context(
            Child("the decode engine", "tandem.bench.handoff.decoder", engine, work / "memory-decoder.log")
        )
        await decoder.ask({"tokens": short, "max_tokens": 2})
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}: memory")
            answers.append((await decoder.ask({"tokens": tokens, "max_tokens": 1, "memory": True}))["memory"])
    columns = {name: [float(one[name]) for one in answers] for name in answers[0] if name != "method"}
    kv = [float(nbytes)] * len(answers)
    above = [peak - base for peak, base in zip(columns["peak"], columns["baseline"], strict=True)]
    later = [peak - base for peak, base in zip(columns["first_token_peak"], columns["baseline"], strict=True)]
    return PeakMemory(
        kv_bytes=nbytes,
        peak_over_kv=ratios(above, kv),
        first_token_over_kv=ratios(later, kv),
        baseline_bytes=Series.of(columns["baseline"]),
        peak_bytes=Series.of(columns["peak"]),
        allocator_cache_bytes=Series.of(columns["allocator_cache"]),
        method=str(answers[0]["method"]),
    )
