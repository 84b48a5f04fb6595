"""The serving bench: Tandem beside mlx-lm's own server, and the cost of many streams.

Only one server works at a time. The two take turns, and the one that goes first changes with every round, so that a
machine that others use, or that grows warm, does the same to both.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tandem.bench.client import Answer
from tandem.bench.environment import describe, load_average
from tandem.bench.float32_copy import is_float32
from tandem.bench.plan import Plan
from tandem.bench.prompts import PromptMaker, story
from tandem.bench.report import Agreement, Comparison, Delay, Report, Series, SimLoad, ratios
from tandem.bench.rounds import Batch, run_batch, second_turn
from tandem.bench.servers import Target, mlx_lm_server, tandem_server
from tandem.errors import EngineError

Say = Callable[[str], None]
"""Told what happens next."""

TTFT_TOKENS = 4
WARM_UP_PROMPT_TOKENS = 32
WARM_UP_TOKENS = 8
FIRST_TURN_TOKENS = 16


async def bench_serve(plan: Plan, folder: Path | None, *, sim: bool, work: Path, say: Say) -> Report:
    """Run the bench.

    Args:
        folder: the model's folder; None leaves the comparison out.
        sim: measure the server's CPU time with the simulated engine.
        work: scratch folder.

    Raises:
        TandemError: a server did not start, or an answer failed.
    """
    load_before = load_average()
    throughput: list[Comparison] = []
    ttft = warm = agreement = sim_load = None
    if folder is not None:
        throughput, ttft, warm, agreement = await _compare(plan, folder, work, say)
    if sim:
        sim_load = await measure_sim(plan, work, say)
    return Report(plan, describe(load_before), throughput, ttft, warm, agreement, sim_load)


# ------------------------------------------------------------------------------------------------------- comparison


class Pairs:
    """Answers of both servers to the same prompts."""

    def __init__(self) -> None:
        self.tandem: list[Answer] = []
        self.mlx_lm: list[Answer] = []

    def add(self, tandem: Batch, mlx_lm: Batch) -> None:
        self.tandem += tandem.answers
        self.mlx_lm += mlx_lm.answers

    def agreement(self, tokens: int) -> Agreement:
        """Check that both did the same work, and say how alike the results are.

        Raises:
            EngineError: they counted a prompt differently, so they did not read the same one.
        """
        for ours, theirs in zip(self.tandem, self.mlx_lm, strict=True):
            if ours.prompt_tokens != theirs.prompt_tokens:
                raise EngineError(
                    f"Tandem read {ours.prompt_tokens} prompt tokens where mlx-lm read {theirs.prompt_tokens}: "
                    "the two do not tokenise alike, so their speeds cannot be compared."
                )
        both = self.tandem + self.mlx_lm
        return Agreement(
            answers=len(self.tandem),
            # mlx-lm's text begins without the space that belongs to the first word.
            equal_texts=sum(a.text.lstrip() == b.text.lstrip() for a, b in zip(self.tandem, self.mlx_lm, strict=True)),
            short=sum(answer.completion_tokens < tokens for answer in both),
            cached_tokens=sum(answer.cached_tokens for answer in both),
        )


async def _compare(plan: Plan, folder: Path, work: Path, say: Say) -> tuple[list[Comparison], Delay, Delay, Agreement]:
    theirs = folder
    # On a GPU both compute with the weights as stored.
    if sys.platform == "linux" and not is_float32(folder):
        say("copying the weights as float32 for mlx-lm")
        theirs = work / "float32"
        await _copy(folder, theirs)
    prompts = PromptMaker(folder)
    async with AsyncExitStack() as stack:
        say("starting Tandem and mlx-lm's server")
        tandem = tandem_server(str(folder), work, batch=max(8, *plan.streams))
        mlx_lm = mlx_lm_server(theirs, work)
        for target in (tandem, mlx_lm):
            await stack.enter_async_context(target.process)
        for number, target in enumerate((tandem, mlx_lm)):
            say(f"warming {target.name} up")
            for streams in plan.streams:
                texts = [prompts.make(f"warm-up {number} {streams} {k}", WARM_UP_PROMPT_TOKENS) for k in range(streams)]
                await run_batch(target, texts, WARM_UP_TOKENS)
        return await _rounds(plan, tandem, mlx_lm, prompts, say)


async def _copy(source: Path, target: Path) -> None:
    # A process of its own: what it allocates is gone when the measurement begins.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem.bench.float32_copy", str(source), str(target), stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await process.communicate()
    if process.returncode != 0:
        raise EngineError(f"The float32 copy of {source} failed: {complaint.decode('utf-8', 'replace')[-500:]}")


async def _rounds(
    plan: Plan, tandem: Target, mlx_lm: Target, prompts: PromptMaker, say: Say
) -> tuple[list[Comparison], Delay, Delay, Agreement]:
    pairs = Pairs()
    batches: dict[int, tuple[list[Batch], list[Batch]]] = {streams: ([], []) for streams in plan.streams}
    delays: tuple[list[Answer], list[Answer]] = ([], [])
    turns: tuple[list[Answer], list[Answer]] = ([], [])
    for number in range(plan.rounds):
        order = [(0, tandem), (1, mlx_lm)]
        if number % 2:
            order.reverse()
        for streams in plan.streams:
            texts = [prompts.make(f"{number} {streams} {k}", plan.prompt_tokens) for k in range(streams)]
            for side, target in order:
                say(f"round {number + 1} of {plan.rounds}: {target.name}, {streams} at a time")
                batches[streams][side].append(await run_batch(target, texts, plan.tokens))
            pairs.add(batches[streams][0][-1], batches[streams][1][-1])
        for sample in range(plan.ttft_samples):
            text = prompts.make(f"{number} first {sample}", plan.ttft_prompt_tokens)
            for side, target in order if sample % 2 == 0 else order[::-1]:
                say(f"round {number + 1} of {plan.rounds}: {target.name}, time to first text")
                delays[side].append(await target.complete(text, TTFT_TOKENS))
        text = prompts.make(f"{number} turn", plan.ttft_prompt_tokens)
        for side, target in order:
            say(f"round {number + 1} of {plan.rounds}: {target.name}, second turn")
            turns[side].append(await second_turn(target, text, FIRST_TURN_TOKENS, TTFT_TOKENS))
    comparisons = [Comparison.of(streams, *sides) for streams, sides in batches.items()]
    return comparisons, _delay(*delays), _delay(*turns), pairs.agreement(plan.tokens)


def _delay(tandem: list[Answer], mlx_lm: list[Answer]) -> Delay:
    ours = [answer.ttft * 1e3 for answer in tandem]
    theirs = [answer.ttft * 1e3 for answer in mlx_lm]
    return Delay(
        ratio=ratios(ours, theirs),
        tandem_ms=Series.of(ours),
        mlx_lm_ms=Series.of(theirs),
        tandem_cached=[answer.cached_tokens for answer in tandem],
        mlx_lm_cached=[answer.cached_tokens for answer in mlx_lm],
    )


# ---------------------------------------------------------------------------------------------------- server's CPU


async def measure_sim(plan: Plan, work: Path, say: Say) -> SimLoad:
    """The server process's CPU time a token, with many streams from an engine that costs it nothing.

    Raises:
        TandemError: the server did not start, or an answer failed or had another length than asked for.
    """
    say("starting Tandem with the simulated engine")
    target = tandem_server(f"sim:decode_tps={plan.sim_tps:g}", work, name="tandem-sim", batch=plan.sim_streams)
    batches: list[Batch] = []
    async with target.process:
        await run_batch(target, [story("warm-up", 20)] * plan.sim_streams, 8, ignore_eos=True)
        for number in range(plan.sim_rounds):
            say(f"round {number + 1} of {plan.sim_rounds}: {plan.sim_streams} simulated streams")
            texts = [story(f"{number} {k}", 20) for k in range(plan.sim_streams)]
            batch = await run_batch(target, texts, plan.sim_tokens, ignore_eos=True)
            if batch.tokens != plan.sim_streams * plan.sim_tokens:
                raise EngineError(f"{batch.tokens} tokens came, not {plan.sim_streams * plan.sim_tokens}.")
            batches.append(batch)
    return SimLoad(
        streams=plan.sim_streams,
        tokens=plan.sim_tokens,
        offered_tokens_per_second=plan.sim_tps * plan.sim_streams,
        tokens_per_second=Series.of([batch.tokens_per_second for batch in batches]),
        events_per_token=Series.of([batch.events_per_token for batch in batches]),
        server_cpu_ms_per_token=Series.of([batch.server_cpu_ms_per_token for batch in batches]),
        runner_cpu_ms_per_token=Series.of([batch.children_cpu_ms_per_token for batch in batches]),
        client_cpu_ms_per_token=Series.of([batch.client_cpu_ms_per_token for batch in batches]),
    )
