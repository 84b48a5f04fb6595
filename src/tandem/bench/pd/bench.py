"""Disaggregated, decode alone and prefill alone, on the same prompts.

Both sides run all the time, and answer one request at a time. Alone and disaggregated, the decode side is the same
process: what differs is whether the prefill side is named as one that may prefill for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.bench.client import Answer
from tandem.bench.environment import describe, load_average
from tandem.bench.pd.plan import Case, PdPlan
from tandem.bench.pd.report import ARRANGEMENTS, Arrangement, CaseResult, PdReport, Round
from tandem.bench.pd.sides import Side, two_sides
from tandem.bench.prompts import PromptMaker, story
from tandem.bench.serve import Say
from tandem.errors import EngineError

LABELS: dict[Arrangement, str] = {
    "disaggregated": "disaggregated",
    "decode_alone": "decode alone",
    "prefill_alone": "prefill alone",
}


class Prompts:
    """Prompts of exact lengths as token ids, each with a beginning of its own.

    Args:
        folder: of the model whose tokenizer makes them; None for simulated models, whose tokens are bytes.
    """

    def __init__(self, folder: Path | None, seed: int) -> None:
        self._maker = PromptMaker(folder) if folder is not None else None
        self._seed = seed

    def make(self, label: str, tokens: int) -> list[int]:
        """The same label and seed make the same prompt."""
        label = f"{self._seed} {label}"
        if self._maker is not None:
            return self._maker.token_ids(label, tokens)
        return list(story(label, tokens).encode("ascii")[:tokens])


async def bench_pd(plan: PdPlan, folder: Path | None, *, work: Path, say: Say) -> PdReport:
    """Run the bench.

    Args:
        folder: of the decode side's model; None for simulated ones.
        work: scratch folder.

    Raises:
        TandemError: a side did not start or is not there, or an answer failed or had another length than asked for.
    """
    load_before = load_average()
    prompts = Prompts(folder, plan.seed)
    say("starting both sides")
    async with two_sides(plan.prefill, plan.decode, work) as (prefill, decode):
        plan = _with_engines(plan, prefill, decode)
        pair = Pair(prefill, decode, plan.timeout_seconds)
        await _warm_up(plan, pair, prompts, say)
        results: dict[Case, list[Round]] = {case: [] for case in plan.cases}
        for number in range(plan.rounds):
            for place, case in enumerate(plan.cases):
                label = f"{number} {case.prompt_tokens} {case.output_tokens}"
                where = f"round {number + 1} of {plan.rounds}: {case.prompt_tokens} + {case.output_tokens} tokens"
                tokens = prompts.make(label, case.prompt_tokens)
                order = turn(number + place, reads_first=not prefill.own)
                results[case].append(await pair.ask(tokens, case.output_tokens, order, say, where))
    return PdReport(plan, describe(load_before), [CaseResult.of(case, rounds) for case, rounds in results.items()])


def turn(number: int, *, reads_first: bool = False) -> tuple[Arrangement, ...]:
    """The order in which the arrangements work: each of them is first, second and last in turn.

    Args:
        reads_first: the prefill side is asked for others' sake before its own. A request that must not read a prefix
            cache may fill it, and what prefills for others reads it.
    """
    first = number % len(ARRANGEMENTS)
    order = ARRANGEMENTS[first:] + ARRANGEMENTS[:first]
    if reads_first and order.index("prefill_alone") < order.index("disaggregated"):
        swapped: dict[Arrangement, Arrangement] = {
            "prefill_alone": "disaggregated",
            "disaggregated": "prefill_alone",
        }
        return tuple(swapped.get(one, one) for one in order)
    return order


class Pair:
    """Both sides.

    Args:
        deadline: seconds for an answer.
    """

    def __init__(self, prefill: Side, decode: Side, deadline: float) -> None:
        self._prefill = prefill
        self._decode = decode
        self._deadline = deadline

    async def ask(
        self, tokens: Sequence[int], count: int, order: Sequence[Arrangement], say: Say, where: str = ""
    ) -> Round:
        """Send one prompt in each arrangement, one after the other.

        Raises:
            TandemError: an answer failed, or had another length than asked for.
        """
        answers = {}
        for arrangement in order:
            say(f"{where}, {LABELS[arrangement]}")
            answers[arrangement] = await self._answer(arrangement, tokens, count)
        return Round(answers)

    async def _answer(self, arrangement: Arrangement, tokens: Sequence[int], count: int) -> Answer:
        side = self._prefill if arrangement == "prefill_alone" else self._decode
        if arrangement == "disaggregated":
            await self._decode.name_peers([self._prefill.kv])
        try:
            answer = await side.complete(tokens, count, self._deadline)
        finally:
            if arrangement == "disaggregated":
                await self._decode.name_peers([])
        if (answer.prompt_tokens, answer.completion_tokens) != (len(tokens), count):
            raise EngineError(
                f"{LABELS[arrangement]}: {answer.prompt_tokens} tokens were read and {answer.completion_tokens} "
                f"written, not {len(tokens)} and {count}. Is the model's context long enough?"
            )
        return answer


async def _warm_up(plan: PdPlan, pair: Pair, prompts: Prompts, say: Say) -> None:
    """Let both sides learn their speeds at every prompt length, so that hand-offs are decided by what is known."""
    for number in range(plan.warm_up):
        for length in dict.fromkeys(case.prompt_tokens for case in plan.cases):
            shortest = min(case.output_tokens for case in plan.cases)
            # The decode side alone first: a node that does not know its own speed reads its prompts itself. The prefill
            # side alone last: what it learns for others must not come from a cache.
            order: tuple[Arrangement, ...] = ("decode_alone", "disaggregated", "prefill_alone")
            tokens = prompts.make(f"warm-up {number} {length}", length)
            await pair.ask(tokens, shortest, order, say, f"warming up: {length} + {shortest} tokens")


def _with_engines(plan: PdPlan, prefill: Side, decode: Side) -> PdPlan:
    return msgspec.structs.replace(
        plan,
        prefill=msgspec.structs.replace(plan.prefill, engine=prefill.engine),
        decode=msgspec.structs.replace(plan.decode, engine=decode.engine),
    )
