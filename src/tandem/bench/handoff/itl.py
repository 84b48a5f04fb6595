"""Gaps between the tokens of running answers while a prompt arrives, beside those while none does.

A prompt arrives from its request until its entries are committed. What follows is told apart: the new answer joins the
batch, which costs the others as much after a prefill at home.

`tandem up` decodes; the prompt's entries come from the replaying prefill node at a set rate. Everything on the decode
side is the product's own: the decision rule, the transfer, the commit, the HTTP stream whose events are timed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.bench.handoff.plan import HandoffPlan
from tandem.bench.handoff.replaying import record, replay_node
from tandem.bench.handoff.report import TokenGaps
from tandem.bench.handoff.ttft import MOST
from tandem.bench.processes import HOST
from tandem.bench.prompts import PromptMaker
from tandem.bench.report import Series, ratios
from tandem.bench.serve import Say
from tandem.bench.servers import Target, tandem_server
from tandem.errors import DeadlineError, EngineError

STREAM_PROMPT_TOKENS = 128
"""Long enough for the node to learn its own prefill speed, which the decision rule needs."""
STREAM_TOKENS = 4000
GAPS_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Gaps:
    """One round: gaps in seconds, those that touch the window of receiving, those that touch that between it and the
    new answer's first token, and all others; the first window's seconds."""

    receiving: list[float]
    joining: list[float]
    otherwise: list[float]
    window: float


class Window(NamedTuple):
    """When a prompt was sent, when it had arrived, and when its first token came."""

    began: float
    committed: float
    answered: float


class Ticks:
    """When each text of a running answer arrived; lets others wait for more of them."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._more = asyncio.Event()

    def add(self, now: float) -> None:
        """A text arrived."""
        self.times.append(now)
        self._more.set()

    async def wait_for(self, count: int) -> None:
        """Until there are `count` of them."""
        while len(self.times) < count:
            self._more.clear()
            await self._more.wait()


def divide(times: Sequence[Sequence[float]], window: Window) -> Gaps:
    """Sort the gaps of several answers: a gap that touches a window counts, whole, to the first of them."""
    gaps = Gaps([], [], [], window.committed - window.began)
    for one in times:
        for first, second in itertools.pairwise(one):
            if second <= window.began or first >= window.answered:
                gaps.otherwise.append(second - first)
            elif first < window.committed:
                gaps.receiving.append(second - first)
            else:
                gaps.joining.append(second - first)
    return gaps


def p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


async def measure_itl(plan: HandoffPlan, folder: Path, work: Path, say: Say) -> TokenGaps:
    """Send one long prompt a round into running answers.

    Raises:
        TandemError: a process did not start, a request failed, or the long prompt was not handed off.
    """
    prompts = PromptMaker(folder)
    longs = [prompts.token_ids(f"gaps {number}", plan.itl_tokens) for number in range(plan.rounds)]
    rounds: list[Gaps] = []
    async with AsyncExitStack() as stack:
        say("starting the replaying prefill node")
        replay = await stack.enter_async_context(replay_node(folder, plan.itl_rate, work / "replay.log"))
        say("recording a prefill")
        nbytes = await record(replay, longs[0])
        peers = {"TANDEM_PREFILL_PEERS": f"{HOST}:{replay.ready['port']}", "TANDEM_CLUSTER_SECRET": ""}
        target = tandem_server(str(folder), work, batch=plan.itl_streams + 1, environment=peers)
        say("starting the decode node")
        await stack.enter_async_context(target.process)
        for number, tokens in enumerate(longs):
            say(f"round {number + 1} of {plan.rounds}: gaps between tokens")
            texts = [
                prompts.make(f"running {number} {stream}", STREAM_PROMPT_TOKENS) for stream in range(plan.itl_streams)
            ]
            rounds.append(await _round(target, texts, tokens, plan.itl_gaps))
    return _summary(rounds, nbytes)


async def _round(target: Target, texts: list[str], long: list[int], gaps: int) -> Gaps:
    ticks = [Ticks() for _ in texts]
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(target.complete(text, STREAM_TOKENS, ignore_eos=True, on_text=one.add))
                for text, one in zip(texts, ticks, strict=True)
            ]
            window = await _receive(target, long, ticks, gaps)
            # Closing the connection ends an answer.
            for task in running:
                task.cancel()
    except BaseExceptionGroup as errors:
        # The first is the cause; it has a message for people.
        raise errors.exceptions[0] from errors
    return divide([one.times for one in ticks], window)


async def _receive(target: Target, long: list[int], ticks: list[Ticks], gaps: int) -> Window:
    """Wait for gaps, have the long prompt handed off, wait for gaps again."""
    await _all(ticks, gaps)
    began = time.perf_counter()
    answer = await target.complete(long, 1, ignore_eos=True)
    committed = began + answer.statistics["queue_seconds"] + answer.statistics["prefill_seconds"]
    _must_be_remote(answer.statistics, len(long))
    await _all(ticks, max(len(one.times) for one in ticks) + gaps)
    return Window(began, committed, answer.first_text)


async def _all(ticks: list[Ticks], count: int) -> None:
    try:
        async with asyncio.timeout(GAPS_SECONDS):
            for one in ticks:
                await one.wait_for(count)
    except TimeoutError as error:
        raise DeadlineError(
            f"The running answers had not {count} tokens after {GAPS_SECONDS:.0f} s. Is the machine busy?"
        ) from error


def _must_be_remote(statistics_of_answer: dict[str, Any], tokens: int) -> None:
    handoff = statistics_of_answer.get("handoff", {})
    if handoff.get("prefill") != "remote" or handoff.get("remote_tokens", 0) < MOST * tokens:
        raise EngineError(
            f"The long prompt was not handed off whole ({handoff.get('prefill')}): {handoff.get('reason')} "
            "If its sender is too slow to be worth it, raise --itl-rate."
        )


def _summary(rounds: list[Gaps], nbytes: int) -> TokenGaps:
    means = [[statistics.fmean(gaps) for gaps in (one.receiving, one.otherwise)] for one in rounds]
    tails = [[p95(gaps) for gaps in (one.receiving, one.otherwise)] for one in rounds]
    return TokenGaps(
        payload_bytes=nbytes,
        itl_ratio=ratios(*zip(*means, strict=True)),
        p95_ratio=ratios(*zip(*tails, strict=True)),
        mean_receiving=Series.of([mean[0] for mean in means]),
        mean_otherwise=Series.of([mean[1] for mean in means]),
        p95_receiving=Series.of([tail[0] for tail in tails]),
        p95_otherwise=Series.of([tail[1] for tail in tails]),
        mean_joining=Series.of([statistics.fmean(one.joining) for one in rounds if one.joining] or [0.0]),
        longest_receiving=Series.of([max(one.receiving) for one in rounds]),
        receiving_seconds=Series.of([one.window for one in rounds]),
        receiving_rate=Series.of([nbytes / one.window for one in rounds]),
    )
