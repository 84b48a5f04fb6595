"""The results of the bench of disaggregation as plain data, and the arithmetic from answers to figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from tandem.bench.client import Answer
from tandem.bench.environment import Environment
from tandem.bench.pd.plan import Case, PdPlan
from tandem.bench.plan import Bound
from tandem.bench.report import Series, ratios
from tandem.types import HandoffStatistics

Arrangement: TypeAlias = Literal["disaggregated", "decode_alone", "prefill_alone"]
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to one prompt, one of each arrangement."""

    answers: dict[Arrangement, Answer]

    def handoff(self, arrangement: Arrangement = "disaggregated") -> HandoffStatistics:
        """Where the prompt was read."""
        return msgspec.convert(self.answers[arrangement].statistics.get("handoff", {}), HandoffStatistics)

    def faults(self) -> list[str]:
        """Why its times are not to be compared."""
        found = []
        handoff = self.handoff()
        if handoff.prefill != "remote":
            found.append(f"disaggregated: the prompt was read {handoff.prefill}. {handoff.reason}".strip())
        for arrangement in ("decode_alone", "prefill_alone"):
            if (alone := self.handoff(arrangement)).prefill != "local":
                found.append(f"{arrangement}: the prompt was read {alone.prefill}. {alone.reason}".strip())
        for arrangement, answer in self.answers.items():
            if answer.cached_tokens:
                found.append(f"{arrangement}: {answer.cached_tokens} prompt tokens came from a prefix cache.")
        return found


class Timing(msgspec.Struct, frozen=True):
    """One arrangement of one case.

    Attributes:
        ttft_seconds: from the request to the first text, as a client sees them.
        total_seconds: to the end of the answer.
        decode_tokens_per_second: from the first token to the last one, as the engine tells.
    """

    ttft_seconds: Series
    total_seconds: Series
    decode_tokens_per_second: Series

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Timing:
        """Summarise one answer a round."""
        return cls(
            Series.of([answer.ttft for answer in answers]),
            Series.of([answer.ended - answer.started for answer in answers]),
            Series.of([float(answer.statistics["generation_tps"]) for answer in answers]),
        )


class CaseResult(msgspec.Struct, frozen=True):
    """Prompts of one length with answers of one length.

    Attributes:
        ttft_speedup_vs_decode_alone, ttft_speedup_vs_prefill_alone: seconds to the first text alone by those
            disaggregated, in the same round; None unless all rounds were disaggregated, whole.
        total_speedup_vs_decode_alone, total_speedup_vs_prefill_alone: the same to the answer's end.
        prefill: where the prompts were read; the worst of the rounds.
        reason: of that round.
        codec: of the entries; None without any.
        remote_tokens: prompt tokens whose entries came from the prefill side, in all rounds.
        remote_token_share: these by all prompt tokens. The last token of a prompt is never handed off.
        bytes: of entries, received as sent.
        exposed_seconds: of the transfer that computing did not hide.
        texts_equal: all three arrangements gave the same text in every round.
        equal_to_decode_alone, equal_to_prefill_alone: rounds in which the disaggregated text was the same.
        not_compared: why there are no speedups.
        handoffs: what the decode side told of each round.
    """

    prompt_tokens: int
    output_tokens: int
    disaggregated: Timing
    decode_alone: Timing
    prefill_alone: Timing
    ttft_speedup_vs_decode_alone: Series | None
    ttft_speedup_vs_prefill_alone: Series | None
    total_speedup_vs_decode_alone: Series | None
    total_speedup_vs_prefill_alone: Series | None
    prefill: Literal["remote", "partial", "local"]
    reason: str
    codec: str | None
    remote_tokens: int
    remote_token_share: float
    bytes: Series
    exposed_seconds: Series
    texts_equal: bool
    equal_to_decode_alone: int
    equal_to_prefill_alone: int
    not_compared: list[str]
    handoffs: list[HandoffStatistics]

    @classmethod
    def of(cls, case: Case, rounds: Sequence[Round]) -> CaseResult:
        """Summarise at least one round."""
        timings = {name: Timing.of([one.answers[name] for one in rounds]) for name in ARRANGEMENTS}
        faults = list(dict.fromkeys(fault for one in rounds for fault in one.faults()))
        handoffs = [one.handoff() for one in rounds]
        worst = max(handoffs, key=lambda one: ("remote", "partial", "local").index(one.prefill))
        equal = {
            alone: sum(one.answers[alone].text == one.answers["disaggregated"].text for one in rounds)
            for alone in ("decode_alone", "prefill_alone")
        }

        def speedup(alone: Arrangement, figure: Literal["ttft_seconds", "total_seconds"]) -> Series | None:
            if faults:
                return None
            lower: Series = getattr(timings["disaggregated"], figure)
            upper: Series = getattr(timings[alone], figure)
            return ratios(upper.rounds, lower.rounds)

        return cls(
            prompt_tokens=case.prompt_tokens,
            output_tokens=case.output_tokens,
            **timings,
            ttft_speedup_vs_decode_alone=speedup("decode_alone", "ttft_seconds"),
            ttft_speedup_vs_prefill_alone=speedup("prefill_alone", "ttft_seconds"),
            total_speedup_vs_decode_alone=speedup("decode_alone", "total_seconds"),
            total_speedup_vs_prefill_alone=speedup("prefill_alone", "total_seconds"),
            prefill=worst.prefill,
            reason=worst.reason,
            codec=next((one.codec for one in handoffs if one.codec is not None), None),
            remote_tokens=sum(one.remote_tokens for one in handoffs),
            remote_token_share=sum(one.remote_tokens for one in handoffs) / (case.prompt_tokens * len(rounds)),
            bytes=Series.of([float(one.bytes) for one in handoffs]),
            exposed_seconds=Series.of([one.exposed_seconds for one in handoffs]),
            texts_equal=min(equal.values()) == len(rounds),
            equal_to_decode_alone=equal["decode_alone"],
            equal_to_prefill_alone=equal["prefill_alone"],
            not_compared=faults,
            handoffs=handoffs,
        )


class PdReport(msgspec.Struct, frozen=True):
    """Everything one run found out.

    Attributes:
        plan: with the engines that running nodes have.
    """

    plan: PdPlan
    environment: Environment
    cases: list[CaseResult]

    def speedup(self, alone: Literal["decode_alone", "prefill_alone"]) -> Series | None:
        """Of the time to the first text, over all rounds with prompts of the greatest length: how long the answer gets
        makes no difference to it. None if one of these cases was not compared."""
        found = [getattr(case, f"ttft_speedup_vs_{alone}") for case in self.cases if self._longest(case)]
        return None if None in found else Series.of([value for series in found for value in series.rounds])

    def _longest(self, case: CaseResult) -> bool:
        return case.prompt_tokens == self.plan.longest

    @property
    def series(self) -> dict[str, Series | None]:
        """The headline figures by name; None where nothing was to be compared."""
        read = sum(case.remote_tokens for case in self.cases)
        sent = sum(case.prompt_tokens * len(case.handoffs) for case in self.cases)
        shares = [case.remote_token_share for case in self.cases]
        return {
            "ttft_speedup_vs_decode_alone": self.speedup("decode_alone"),
            "ttft_speedup_vs_prefill_alone": self.speedup("prefill_alone"),
            "remote_token_share": Series(read / sent, min(shares), max(shares), shares),
        }

    @property
    def missed(self) -> dict[str, Bound]:
        """Bounds that a figure missed; a figure that is not there misses its own."""
        series = self.series
        return {
            name: bound
            for name, bound in self.plan.bounds.items()
            if (values := series[name]) is None or not bound.met_by(values.median)
        }

    def to_json(self) -> dict[str, Any]:
        """One flat object: the headline figures first, then their bounds, then everything else."""
        figures = {name: None if values is None else values.median for name, values in self.series.items()}
        held = {name: msgspec.to_builtins(bound) for name, bound in self.plan.bounds.items()}
        passed = {name: name not in self.missed for name in held}
        told = msgspec.structs.replace(self, plan=self.plan.told())
        return {**figures, "bounds": held, "passed": passed, **msgspec.to_builtins(told)}
